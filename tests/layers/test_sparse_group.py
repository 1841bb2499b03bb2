"""Sparse group convolutions: their filters, and curvature that is a projection of dense one."""

import copy
import pickle

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twins import block_diagonal, central_differences, ggn, product, relative_error

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN, check_model
from laplace_invariance.layers import (
    Group,
    GroupConv2d,
    LiftingConv2d,
    SparseGroupConv2d,
    SparseLiftingConv2d,
    SparseLinear2d,
)
from laplace_invariance.layers.basis import Basis, spread_on_group
from laplace_invariance.metrics import equivariance_error

CIRCULAR = {"padding": 1, "padding_mode": "circular"}
CLASSES = 3


def distances(group):
    """Squared distances of elements by the angle between them, or of a mirror image."""
    matrices = Group.of(group).matrices.double()
    found = torch.zeros(len(matrices), len(matrices))
    for i, one in enumerate(matrices):
        for j, other in enumerate(matrices):
            turn = one.mT @ other
            if torch.linalg.det(turn) < 0:
                found[i, j] = 1.0
            else:
                found[i, j] = 1 - turn.trace() / 2  # of the cosine
    return found


@pytest.mark.parametrize("group", ["p4", "p4m"])
def test_the_embedding_of_a_group_knows_angles(group):
    points = Group.of(group).embedding
    torch.testing.assert_close(torch.cdist(points, points).square(), distances(group))


@pytest.mark.parametrize("group", ["p2", "p4", "pm", "p4m", Group("hue", [[0, 1], [1, 0]])])
def test_no_element_changes_distances(group):
    group = Group.of(group)
    apart = torch.cdist(group.embedding, group.embedding)
    nearest = (apart + 9 * torch.eye(group.order)).min()
    torch.testing.assert_close(nearest, torch.tensor(1.0))
    for row in group.table:
        torch.testing.assert_close(apart[row][:, row], apart)


def test_the_trivial_group_adds_nothing():
    plain, trivial = Basis((3, 4)), Basis((3, 4), group=Group.of("p1"))
    torch.testing.assert_close(trivial.matrix(), plain.matrix())


@pytest.mark.parametrize("kind", ["regression", "exponential"])
def test_basis_functions_are_products_over_element_and_position(kind):
    basis = Basis((8, 3), kind=kind, omega=0.7, group=Group.of("p4"), n_anchors=24)
    order = spread_on_group(4, 2, 3)
    element, position = order // 6, order % 6
    rows, columns = position // 3, position % 3
    squared = (rows.unsqueeze(1) - rows) ** 2 + (columns.unsqueeze(1) - columns) ** 2
    squared = squared + distances("p4")[element][:, element]
    kernel = torch.exp(-(0.7**2) * squared / 2)
    found = basis.matrix()[:, order]
    expected = kernel
    if kind == "regression":
        expected = torch.linalg.solve(kernel + 1e-4 * torch.eye(24), kernel)
    torch.testing.assert_close(found, expected)


def test_half_of_the_anchors_are_a_chessboard():
    chosen = spread_on_group(4, 4, 4)[:32]
    element, row, column = chosen // 16, chosen % 16 // 4, chosen % 4
    assert len(set(chosen.tolist())) == 32
    assert len({int(colour) for colour in (element + row + column) % 2}) == 1
    assert sorted(spread_on_group(3, 2, 5).tolist()) == list(range(30))


def test_a_grid_that_elements_do_not_share_is_named():
    with pytest.raises(ValueError, match=r"group 'p4' has a height of 4 times .*, got 6"):
        Basis((6, 3), group=Group.of("p4"))


def dense_twin(sparse):
    """The layer whose filter has an entry for every point of the basis."""
    options = {"groups": sparse.groups, "group": sparse.group, "bias": sparse.bias is not None}
    options |= {name: getattr(sparse, name) for name in ("kernel_size", "padding", "padding_mode")}
    channels = sparse.in_channels, sparse.out_channels
    if isinstance(sparse, LiftingConv2d):
        twin = LiftingConv2d(*channels, **options)
    else:
        twin = GroupConv2d(*channels, kernel=sparse.kernel, **options)
    with torch.no_grad():
        filters = sum(
            sparse.weight[:, :, m, None] * function for m, function in enumerate(sparse.matrix())
        )
        twin.weight.copy_(filters.reshape(twin.weight.shape))
        if sparse.bias is not None:
            twin.bias.copy_(sparse.bias)
    return twin


LAYERS = {
    "lifting": lambda **o: SparseLiftingConv2d(4, 6, 3, **CIRCULAR, **o),
    "full": lambda **o: SparseGroupConv2d(4, 6, 3, **CIRCULAR, **o),
    "pointwise": lambda **o: SparseGroupConv2d(4, 6, 3, kernel="pointwise", bias=False, **o),
    "groups": lambda **o: SparseGroupConv2d(4, 6, 2, group="p4m", groups=2, **o),
}


def features(layer, n=5):
    shape = [4] if isinstance(layer, LiftingConv2d) else [4, layer.group.order]
    return torch.randn(n, *shape, 4, 4)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_the_one_with_its_filter(name):
    layer = LAYERS[name]()
    x = features(layer)
    torch.testing.assert_close(layer(x), dense_twin(layer)(x))
    points = 4 * 9 if name == "full" else 8 * 4 if name == "groups" else 9
    assert layer.n_points == points
    assert layer.weight.shape == (6, 4 // layer.groups, (points + 1) // 2)


@pytest.mark.parametrize("learn_omega", ["fixed", "weight"])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_equivariant(name, learn_omega):
    layer = LAYERS[name](learn_omega=learn_omega)
    symmetries = ["shifts"] if layer.padding_mode == "circular" else []
    assert equivariance_error(layer, [*symmetries, layer.group], features(layer)) < 1e-10


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("name", LAYERS)
def test_sparse_curvature_is_dense_curvature_projected(name, approx):
    sparse = LAYERS[name](omega=0.8)
    x, y = features(sparse), torch.randint(CLASSES, (5,))
    rest = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(sparse(x[:1]).numel(), CLASSES))
    (_, found), (_, expected) = (
        AugmentedGGN(nn.Sequential(layer, rest), "classification", kfac_approx=approx).kron(
            x, y, N=5
        )
        for layer in (sparse, dense_twin(sparse))
    )
    projection = torch.kron(torch.eye(4 // sparse.groups), sparse.matrix())
    torch.testing.assert_close(found.kfacs[0][1], projection @ expected.kfacs[0][1] @ projection.mT)
    torch.testing.assert_close(found.kfacs[0][0], expected.kfacs[0][0])
    torch.testing.assert_close(found.kfacs[1:], expected.kfacs[1:])


def test_curvature_is_exact_where_nothing_is_shared():
    for group, size in (("p1", 3), ("p4", 4)):
        layer = SparseGroupConv2d(2, 3, 3, group=group, learn_omega="weight")
        model = nn.Sequential(layer, nn.Flatten(), nn.Tanh())
        x = torch.randn(1, 2, layer.group.order, size, size)
        y = torch.randn_like(model(x))
        _, kron = AugmentedGGN(model, "regression").kron(x, y, N=1)
        expected = block_diagonal(ggn(model, model(x), "regression"), model).detach()
        torch.testing.assert_close(kron.kfacs[0][0], expected[:1, :1])  # omega
        n = 1 + layer.weight.numel()
        error = relative_error(product(kron.kfacs[1]), expected[1:n, 1:n])
        assert error < 1e-10 if group == "p1" else error > 1e-3


def network(**basis):
    return nn.Sequential(
        SparseLiftingConv2d(1, 2, 3, **CIRCULAR, **basis),
        nn.Tanh(),
        SparseGroupConv2d(2, 2, 2, omega=0.8, **basis),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(72, CLASSES),
    )


def evidence_of(model):
    draws = torch.Generator().manual_seed(3)
    x = torch.randn(6, 1, 4, 4, generator=draws)
    y = torch.randint(CLASSES, (6,), generator=draws)
    la = Laplace(
        model,
        "classification",
        prior_precision=0.5,
        subset_of_weights="all",
        hessian_structure="kron",
        backend=AugmentedGGN,
    )
    la.fit(DataLoader(TensorDataset(x, y), batch_size=4))
    return la.log_marginal_likelihood()


def test_gradient_of_the_evidence_equals_central_differences():
    model = network(anchors="learnt", learn_omega="hyperparameter")
    evidence_of(model).backward()
    found = dict(li.named_hyperparameters(model))
    assert set(found) == {"0.omega", "0.anchors", "2.omega", "2.anchors"}
    for name, tensor in found.items():
        difference = central_differences(lambda: evidence_of(model).detach(), tensor)
        assert tensor.grad.abs().max() > 1e-4, name
        assert relative_error(tensor.grad, difference) < 2e-6, name


def test_steps_keep_anchors_within_grid_and_group():
    model = network(anchors="learnt", learn_omega="hyperparameter")
    for layer in (model[0], model[2]):
        with torch.no_grad():
            layer.anchors.mul_(5)
            layer.project_()
        points = layer.points()
        assert (layer.anchors <= points.amax(0)).all()
        assert (layer.anchors >= points.amin(0)).all()


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_copies_are_independent(duplicate):
    layer, x = SparseGroupConv2d(2, 3, 3, anchors="learnt"), torch.randn(2, 2, 4, 4, 4)
    expected = layer(x)
    layer.patch_index(x)
    twin = duplicate(layer)
    assert twin._cache is None
    assert twin._patch_indices == {}
    torch.testing.assert_close(twin(x), expected, rtol=0, atol=0)
    twin.omega.data.mul_(2)
    assert not torch.allclose(twin(x), expected)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    assert set(layer.state_dict()) == {"weight", "bias", "omega", "anchors"}
    assert "kernel='full', regression from 18 learnt anchors on 12 x 3" in repr(layer)


def test_sparse_factors_are_sums_of_functions_on_the_group():
    group = Group.of("p4")
    layer = SparseLinear2d(2, 3, (8, 3), (4, 1), group=group)
    basis_in, basis_out = Basis((8, 3), group=group).matrix(), Basis((4, 1), group=group).matrix()
    u_1 = layer.theta_1.weight.unflatten(1, (3, 2))
    u_2 = layer.theta_2.weight.unflatten(1, (2, 12))
    x = torch.randn(5, 2, 8, 3)
    theta_1 = torch.einsum("mdc,mp->dcp", u_1, basis_out)
    theta_2 = torch.einsum("dcm,mp->dcp", u_2, basis_in)
    expected = torch.einsum("dcp,dcq,ncq->ndp", theta_1, theta_2, x.flatten(2))
    torch.testing.assert_close(layer(x).flatten(2), expected)
    lifted = SparseLinear2d(2, 3, (2, 3), (4, 1), group=(None, group))
    assert lifted.basis_in.on_group is None
    assert lifted.basis_out.on_group is group
    assert check_model(nn.Sequential(layer, nn.Flatten()))
