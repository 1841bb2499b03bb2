"""Sparse layers: their dense matrices, and curvature that is the projected one of dense layers."""

import copy
import io
import itertools
import math
import pickle

import pytest
import torch
from builders import affine_matrix, randomised, twin_basis
from cases import SPARSE, name_of
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twins import block_diagonal, central_differences, ggn, relative_error

import laplace_invariance as li
from laplace_invariance.curvature import (
    AugmentedEF,
    AugmentedGGN,
    check_model,
)
from laplace_invariance.curvature.rules import ElementwiseBlock, rules
from laplace_invariance.hyper import differentiable
from laplace_invariance.layers import (
    FactoredLinear2d,
    SparseConv2d,
    SparseLinear2d,
)
from laplace_invariance.layers.basis import (
    Basis,
    grid_points,
)

KINDS = ("regression", "exponential")
CLASSES = 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "spline"}, "kind must be one of 'regression', 'exponential', got 'spline'"),
        ({"anchors": "corner"}, "anchors must be one of 'grid', 'random', 'learnt', got 'corner'"),
        (
            {"learn_omega": True},
            "learn_omega must be one of 'fixed', 'weight', 'hyperparameter', got True",
        ),
        ({"n_anchors": 10}, "at most 9, the points of a grid of 3 x 3; got 10"),
        ({"n_anchors": 0}, "n_anchors must be at least 1 .* got 0"),
        ({"omega": 0.0}, "omega must be positive and finite, got 0.0"),
        ({"omega": -1.0}, "omega must be positive and finite, got -1.0"),
        ({"omega": math.nan}, "omega must be positive and finite, got nan"),
        ({"omega": math.inf}, "omega must be positive and finite, got inf"),
    ],
)
def test_bad_options_are_named(options, message):
    for build in (
        lambda **o: Basis((3, 3), **o),
        lambda **o: SparseConv2d(1, 2, 3, **o),
        lambda **o: SparseLinear2d(1, 2, 3, **o),
    ):
        with pytest.raises(ValueError, match=message):
            build(**options)


def test_other_bad_input_is_named():
    with pytest.raises(ValueError, match=r"height and a width, both positive, got \(3, 0\)"):
        Basis((3, 0))
    with pytest.raises(ValueError, match="must be divisible by groups"):
        SparseConv2d(3, 4, 3, groups=2)
    with pytest.raises(ValueError, match="padding='same' is not supported for strided"):
        SparseConv2d(3, 4, 3, stride=2, padding="same")
    with pytest.raises(TypeError, match="unexpected keyword argument 'omga'"):
        SparseConv2d(3, 4, 3, omga=1.0)
    with pytest.raises(
        ValueError,
        match=r"SparseConv2d was built for \[n, 3, height, width\], got shape \[2, 4, 5, 5\]",
    ):
        SparseConv2d(3, 4, 3)(torch.zeros(2, 4, 5, 5))
    with pytest.raises(
        ValueError, match=r"SparseLinear2d was built for \[n, 2, 4, 5\], got shape \[7, 2, 5, 4\]"
    ):
        SparseLinear2d(2, 3, (4, 5))(torch.zeros(7, 2, 5, 4))
    with pytest.raises(ValueError, match="at most 4, the points of a grid of 2 x 2; got 5"):
        SparseLinear2d(2, 3, 4, 2, n_anchors=5)
    assert SparseLinear2d(2, 3, 4, 2, n_anchors=(5, None)).theta_1.weight.shape == (2, 6)


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_linear_equals_its_dense_matrix(kind):
    layer = SparseLinear2d(2, 3, (4, 5), (3, 2), kind=kind, omega=0.8)
    nn.init.normal_(layer.basis_out.bias)
    u_1 = layer.theta_1.weight.detach().unflatten(1, (3, 2))  # [m', c', c]
    u_2 = layer.theta_2.weight.detach().unflatten(1, (2, 10))  # [c', c, m]
    phi_in = twin_basis(kind, 0.8, layer.basis_in.anchors.tolist(), 4, 5)
    phi_out = twin_basis(kind, 0.8, layer.basis_out.anchors.tolist(), 3, 2)
    expected = torch.zeros(3, 6, 2, 20)
    for c_out, x_out, c, x in itertools.product(range(3), range(6), range(2), range(20)):
        theta_1 = sum(u_1[m, c_out, c] * phi_out[m, x_out] for m in range(3))
        theta_2 = sum(u_2[c_out, c, m] * phi_in[m, x] for m in range(10))
        expected[c_out, x_out, c, x] = theta_1 * theta_2
    matrix, offset = affine_matrix(layer, (2, 4, 5))
    torch.testing.assert_close(matrix, expected.flatten(2).flatten(0, 1))
    torch.testing.assert_close(offset, layer.basis_out.bias.detach().repeat_interleave(6))


CONVOLUTIONS = [
    {},
    {"padding": (1, 2)},
    {"padding": (1, 2), "padding_mode": "circular"},
    {"stride": (2, 3), "padding": 1},
    {"stride": 2, "padding": 1, "padding_mode": "circular"},
    {"dilation": (1, 2), "padding": 2},
    {"dilation": (2, 1), "padding": 1, "padding_mode": "circular"},
    {"groups": 2},
    {"groups": 2, "padding": 1, "padding_mode": "circular", "bias": False},
    {"padding": "same"},
    {"padding": "same", "padding_mode": "circular", "dilation": 2},
    {"padding": "valid", "padding_mode": "circular"},
]


def twin_convolution(layer, filters, shape):
    """The matrix of a convolution, one weight at a time."""
    channels, height, width = shape
    sizes, padding = (height, width), layer.padding
    if padding == "same":
        before = [d * (k - 1) // 2 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        out = sizes
    else:
        before = (0, 0) if padding == "valid" else padding
        out = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, p, d, k, s in zip(
                sizes, before, layer.dilation, layer.kernel_size, layer.stride, strict=True
            )
        ]
    per_group, outputs_per_group = channels // layer.groups, layer.out_channels // layer.groups
    matrix = torch.zeros(layer.out_channels, *out, *shape)
    ranges = [range(n) for n in (layer.out_channels, per_group, *out, *layer.kernel_size)]
    for o, c, i, j, a, b in itertools.product(*ranges):
        y = i * layer.stride[0] + a * layer.dilation[0] - before[0]
        x = j * layer.stride[1] + b * layer.dilation[1] - before[1]
        if layer.padding_mode == "circular":
            y, x = y % height, x % width
        if 0 <= y < height and 0 <= x < width:
            matrix[o, i, j, o // outputs_per_group * per_group + c, y, x] += filters[o, c, a, b]
    return matrix.flatten(3).flatten(0, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_sparse_convolution_equals_its_dense_matrix(options, kind):
    layer, shape = SparseConv2d(4, 6, (2, 3), kind=kind, omega=0.8, **options), (4, 5, 7)
    phi = twin_basis(kind, 0.8, layer.anchors.tolist(), 2, 3)
    u, filters = layer.weight.detach(), torch.zeros(6, 4 // layer.groups, 2, 3)
    for o, c, a, b in itertools.product(*map(range, filters.shape)):
        filters[o, c, a, b] = sum(u[o, c, m] * phi[m, 3 * a + b] for m in range(3))
    torch.testing.assert_close(layer.filters().detach(), filters)
    matrix, offset = affine_matrix(layer, shape)
    torch.testing.assert_close(matrix, twin_convolution(layer, filters, shape))
    if layer.bias is not None:
        torch.testing.assert_close(
            offset.unflatten(0, (6, -1)),
            layer.bias.detach().unsqueeze(1).expand(6, len(offset) // 6),
        )


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_sparse_convolution_is_the_dense_one_with_its_filters(mode):
    layer = SparseConv2d(3, 5, (3, 4), padding="same", padding_mode=mode)
    dense = nn.Conv2d(3, 5, (3, 4), padding="same", padding_mode=mode)
    dense.load_state_dict({"weight": layer.filters(), "bias": layer.bias})
    x = torch.randn(2, 3, 6, 7)
    torch.testing.assert_close(layer(x), dense(x))


@pytest.mark.parametrize("kernel_size", [3, 4])
def test_circular_padding_is_equivariant_and_zero_padding_is_not(kernel_size):
    x = torch.randn(2, 3, 5, 7)
    error = {}
    for mode in ("circular", "zeros"):
        layer = SparseConv2d(3, 5, kernel_size, padding="same", padding_mode=mode)
        error[mode] = max(
            (layer(x.roll(shift, (2, 3))) - layer(x).roll(shift, (2, 3))).abs().max().item()
            for shift in itertools.product(range(5), range(7))
        )
    assert error["circular"] < 1e-10
    assert error["zeros"] > 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("omega", [0.3, 1.0, 3.0])
def test_layers_start_like_dense_ones(kind, omega):
    layer = SparseLinear2d(20, 30, 8, 6, kind=kind, omega=omega, scale=0.5)
    theta_2 = layer.theta_2.weight.unflatten(1, (20, -1)) @ layer.basis_in.matrix()
    theta_1 = layer.theta_1.weight.T @ layer.basis_out.matrix()
    assert theta_2.square().mean().item() == pytest.approx(1 / 64, rel=0.1)
    assert theta_1.square().mean().item() == pytest.approx(0.5**2 / 20, rel=0.1)
    assert not layer.basis_out.bias.any()
    sparse, dense = SparseConv2d(20, 30, 5, kind=kind, omega=omega), nn.Conv2d(20, 30, 5)
    assert sparse.filters().square().mean().item() == pytest.approx(
        dense.weight.square().mean().item(), rel=0.1
    )
    assert sparse.bias.abs().max() <= dense.weight.abs().max() * 1.01


def gradient(block, x, g):
    """Return the gradient of a parameter for each row, as its block says it is."""
    g = block.g(g)
    if isinstance(block, ElementwiseBlock):
        return (g if block.a is None else block.a(x) * g).sum(1)
    if block.slots == 1:
        return torch.einsum("nro,nri->noi", g, block.a(x)).flatten(1)
    return torch.einsum("nrqo,nrqi->nqoi", g, block.a(x)).flatten(1)


@pytest.mark.parametrize(("build", "shape"), SPARSE, ids=name_of)
def test_rule_equals_autograd(build, shape):
    module = randomised(build(), 1.0)
    x, other = torch.randn(shape), torch.randn(shape)
    output = module(x)
    g = torch.randn_like(output)
    blocks = {block.parameter: block for block in rules()[type(module)](module)}
    assert set(blocks) == {name for name, _ in module.named_parameters()}
    for name, parameter in module.named_parameters():
        rows = [
            torch.autograd.grad(output[i], parameter, g[i], retain_graph=True)[0] for i in (0, 1)
        ]
        block = blocks[name]
        torch.testing.assert_close(gradient(block, x, g), torch.stack(rows).flatten(1))
        if block.a is not None:
            torch.testing.assert_close(block.a(2 * x + other), 2 * block.a(x) + block.a(other))


@pytest.mark.parametrize("learn_omega", ["fixed", "weight", "hyperparameter"])
def test_every_parameter_is_covered(learn_omega):
    model = nn.Sequential(
        SparseConv2d(1, 2, 3, learn_omega=learn_omega),
        SparseLinear2d(2, 3, 4, learn_omega=learn_omega),
    )
    assert check_model(model)
    weights = {name for name, _ in model.named_parameters() if "omega" in name}
    moved_by_evidence = {name for name, _ in li.named_hyperparameters(model)}
    names = {"0.omega", "1.basis_in.omega", "1.basis_out.omega"}
    assert weights == (names if learn_omega == "weight" else set())
    assert moved_by_evidence == (names if learn_omega == "hyperparameter" else set())
    assert names <= set(model.state_dict())


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_sparse_curvature_is_dense_curvature_projected(options, approx):
    sparse, dense = (
        SparseConv2d(4, 6, (2, 3), omega=0.8, **options),
        nn.Conv2d(4, 6, (2, 3), **options),
    )
    dense.load_state_dict(
        {"weight": sparse.filters()} | ({"bias": sparse.bias} if sparse.bias is not None else {})
    )
    x, y = torch.randn(5, 4, 5, 7), torch.randint(CLASSES, (5,))
    rest = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(sparse(x[:1]).numel(), CLASSES))
    (_, found), (_, expected) = (
        AugmentedGGN(nn.Sequential(layer, rest), "classification", kfac_approx=approx).kron(
            x, y, N=5
        )
        for layer in (sparse, dense)
    )
    projection = torch.kron(
        torch.eye(4 // sparse.groups), sparse.matrix()
    )  # [channels m, channels t]
    torch.testing.assert_close(found.kfacs[0][1], projection @ expected.kfacs[0][1] @ projection.mT)
    torch.testing.assert_close(found.kfacs[0][0], expected.kfacs[0][0])
    torch.testing.assert_close(found.kfacs[1:], expected.kfacs[1:])


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_curvature_is_exact_for_one_datum_at_one_position(likelihood):
    model = nn.Sequential(
        SparseConv2d(2, 3, 3, padding_mode="circular", learn_omega="weight"),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(3, CLASSES),
    )
    x, y = (
        torch.randn(1, 2, 3, 3),
        torch.randint(CLASSES, (1,)) if likelihood == "classification" else torch.randn(1, CLASSES),
    )
    _, kron = AugmentedGGN(model, likelihood).kron(x, y, N=1)
    found = torch.block_diag(*(torch.kron(*f) if len(f) == 2 else f[0] for f in kron.kfacs))
    expected = block_diagonal(ggn(model, model(x), likelihood), model)
    torch.testing.assert_close(found, expected.detach())


def test_curvature_of_many_positions_is_not_exact():
    model = nn.Sequential(SparseConv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, CLASSES))
    x = torch.randn(1, 2, 4, 4)
    _, kron = AugmentedGGN(model, "regression").kron(x, torch.randn(1, CLASSES), N=1)
    n = model[0].weight.numel()
    expected = ggn(model, model(x), "regression").detach()[:n, :n]
    assert relative_error(torch.kron(*kron.kfacs[0]), expected) > 0.01


@pytest.mark.parametrize("backend", [AugmentedGGN, AugmentedEF])
def test_diagonal_and_dense_curvature_are_exact(backend):
    model = nn.Sequential(
        SparseConv2d(1, 2, 3, padding=1, learn_omega="weight"),
        nn.Tanh(),
        SparseLinear2d(2, 3, 4, 2, kind="exponential", learn_omega="weight"),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, CLASSES),
    )
    x, y = torch.randn(5, 1, 4, 4), torch.randint(CLASSES, (5,))
    if backend is AugmentedGGN:
        expected = ggn(model, model(x), "classification").detach()
    else:
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        rows = [
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            for loss in losses
        ]
        jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        expected = jacobian.mT @ jacobian
    torch.testing.assert_close(backend(model, "classification").full(x, y)[1], expected)
    torch.testing.assert_close(backend(model, "classification").diag(x, y)[1], expected.diagonal())


def test_the_block_of_a_weight_omega_is_exact_in_kron():
    model = nn.Sequential(
        SparseConv2d(1, 2, 3, learn_omega="weight"),
        nn.Tanh(),
        SparseLinear2d(2, 3, 4, 2, learn_omega="weight"),
        nn.Flatten(1),
    )
    x, y = torch.randn(5, 1, 6, 6), torch.randn(5, 12)
    _, kron = AugmentedGGN(model, "regression").kron(x, y, N=5)
    expected = block_diagonal(ggn(model, model(x), "regression"), model).detach()
    start = 0
    for (name, parameter), factors in zip(model.named_parameters(), kron.kfacs, strict=True):
        stop = start + parameter.numel()
        if "omega" in name or "bias" in name:
            torch.testing.assert_close(factors[0], expected[start:stop, start:stop], msg=name)
        start = stop


def convolutional(**basis):
    first = SparseConv2d(1, 2, 3, padding=1, padding_mode="circular", omega=0.9, **basis)
    second = SparseConv2d(2, 4, (3, 2), stride=2, groups=2, omega=1.2, **basis)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.Linear(16, CLASSES))


def factored(**basis):
    layer = SparseLinear2d(1, 2, (5, 4), (3, 2), omega=0.9, **basis)
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(12, CLASSES))


def evidence_of(model, structure, backend=AugmentedGGN):
    draws = torch.Generator().manual_seed(3)
    x = torch.randn(7, 1, 5, 4, generator=draws)
    y = torch.randint(CLASSES, (7,), generator=draws)
    la = Laplace(
        model,
        "classification",
        prior_precision=0.5,
        subset_of_weights="all",
        hessian_structure=structure,
        backend=backend,
    )
    la.fit(DataLoader(TensorDataset(x, y), batch_size=4))
    return la.log_marginal_likelihood()


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", [convolutional, factored])
def test_gradient_of_the_evidence_equals_central_differences(build, kind, structure):
    model = build(kind=kind, anchors="learnt", learn_omega="hyperparameter")
    evidence_of(model, structure).backward()
    found = dict(li.named_hyperparameters(model))
    assert len(found) == 4
    for name, tensor in found.items():
        difference = central_differences(lambda: evidence_of(model, structure).detach(), tensor)
        assert tensor.grad.abs().max() > 1e-3, name
        assert relative_error(tensor.grad, difference) < 2e-6, name


@pytest.mark.parametrize("structure", ["kron", "diag"])
@pytest.mark.parametrize("build", [convolutional, factored])
def test_gradient_in_anchors_goes_through_the_curvature_of_a_weight_omega(build, structure):
    model = build(anchors="learnt", learn_omega="weight")
    evidence_of(model, structure).backward()
    for name, tensor in li.named_hyperparameters(model):
        assert "anchors" in name
        difference = central_differences(lambda: evidence_of(model, structure).detach(), tensor)
        assert relative_error(tensor.grad, difference) < 2e-6, name


@pytest.mark.parametrize("build", [convolutional, factored])
def test_the_training_loss_leaves_hyperparameters_alone(build):
    model, x = build(anchors="learnt", learn_omega="hyperparameter"), torch.randn(3, 1, 5, 4)
    model(x).sum().backward()
    assert all(tensor.grad is None for tensor in li.hyperparameters(model))
    assert all(parameter.grad is not None for parameter in model.parameters())
    with differentiable():
        model(x).sum().backward()
    assert all(tensor.grad.abs().max() > 0 for tensor in li.hyperparameters(model))


def test_the_training_loss_moves_a_weight():
    model = convolutional(learn_omega="weight")
    model(torch.randn(3, 1, 5, 4)).sum().backward()
    assert model[0].omega.grad.abs() > 0


def test_steps_keep_omega_positive_and_anchors_on_the_grid():
    model = convolutional(anchors="learnt", learn_omega="hyperparameter")
    with li.learning(model, lr=5.0, optimizer=torch.optim.SGD) as learner:
        (-1000 * evidence_of(model, "kron")).backward()
    assert set(learner.steps.values()) == {1}
    for layer in (model[0], model[2]):
        assert layer.omega > 0
        assert (layer.anchors.abs() <= grid_points(*layer.grid)[-1] + 1e-12).all()
    assert torch.isfinite(evidence_of(model, "kron"))


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("learn_omega", ["fixed", "weight", "hyperparameter"])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, pickled, saved], ids=["deepcopy", "pickle", "file"]
)
@pytest.mark.parametrize("build", [convolutional, factored])
def test_copies_are_independent(build, duplicate, learn_omega):
    model, x = build(learn_omega=learn_omega, anchors="random"), torch.randn(2, 1, 5, 4)
    expected = model(x)
    twin = duplicate(model)
    assert all(
        module._cache is None for module in twin.modules() if isinstance(module, Basis)
    )  # not in files
    torch.testing.assert_close(twin(x), expected, rtol=0, atol=0)
    for module in twin.modules():
        if isinstance(module, Basis):
            module.omega.data.mul_(2)
    assert not torch.allclose(twin(x), expected)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    model.load_state_dict(twin.state_dict())
    torch.testing.assert_close(model(x), twin(x))
    assert [n for n, _ in li.named_hyperparameters(model)] == [
        n for n, _ in li.named_hyperparameters(twin)
    ]


def test_single_precision_agrees_with_double():
    """Also for a smooth kernel, whose matrix is close to singular."""
    layer = SparseLinear2d(2, 3, 8, omega=0.3)
    x = torch.randn(4, 2, 8, 8)
    expected = layer(x).detach()
    assert relative_error(layer.float()(x.float()).detach().double(), expected) < 1e-5
    assert layer.basis_in.matrix().dtype == torch.float32


def test_counts_are_those_of_factored_layers_with_fewer_positions():
    sparse, dense = SparseLinear2d(10, 20, 32, 16), FactoredLinear2d(10, 20, 32, 16, bias=False)
    count = sum(p.numel() for p in sparse.parameters())
    assert count == sum(p.numel() for p in dense.parameters()) // 2 + 20
    assert "regression from 5 anchors on 3 x 3, omega=1 (fixed)" in str(SparseConv2d(1, 2, 3))
