"""Lower bounds of the evidence from tangent kernels: exact for one block, ordered, unbiased."""

import itertools
import math

import pytest
import torch
from cases import COMPOSED, WITH_RULES, name_of
from laplace import Laplace
from test_engines import Free, Residual, around
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from twins import central_differences, ggn, relative_error

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN, kernels, ntk
from laplace_invariance.curvature.ntk import KINDS, TangentKernelBound
from laplace_invariance.hyper import differentiable

LIKELIHOODS = ("classification", "regression")
CLASSES, TEMPERATURE = 3, 0.8


def targets(n, likelihood):
    if likelihood == "classification":
        return torch.randint(CLASSES, (n,))
    return torch.randn(n, CLASSES)


def noise_of(likelihood):
    return None if likelihood == "classification" else torch.tensor([0.7], requires_grad=True)


def points(n=6, n_samples=3):
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    augmentation = li.AffinePoints(init=[0.1, -0.2, 0.3, 0.15, 0.25, 0.05])
    model = li.InvariantModel(net, augmentation, n_samples, generator=torch.Generator())
    return model, torch.randn(n, 2)


def fixed(n=6):
    """A model without randomness, so that parts of a batch have the samples they have in it."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    return li.InvariantModel(net, li.FiniteGroup("quarter_turns", init=0.3)), torch.randn(
        n, 1, 4, 4
    )


def seed(model):
    for module in model.modules():
        if isinstance(module, li.InvariantModel):
            module.generator = torch.Generator().manual_seed(1)


def precisions(model):
    n = len(list(model.parameters()))
    return torch.linspace(0.4, 1.3, n).requires_grad_()


def exact(model, likelihood, x, y):
    """Laplace with the exact curvature of all data, in one batch."""
    seed(model)
    settings = {"subset_of_weights": "all", "hessian_structure": "full", "backend": AugmentedGGN}
    la = Laplace(model, likelihood, temperature=TEMPERATURE, **settings)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
    return la


def estimated(model, likelihood, x, y, n, prior, noise=None, kind="full", **kwargs):
    seed(model)
    bound = TangentKernelBound(model, likelihood, kind)
    return bound.estimate(x, y, n, prior, noise, TEMPERATURE, **kwargs)


def assert_is_exact(model, likelihood, x):
    """Raise unless one block has the exact evidence, its terms and its gradients."""
    y, noise, prior = targets(len(x), likelihood), noise_of(likelihood), precisions(model)
    la = exact(model, likelihood, x, y)
    evidence = la.log_marginal_likelihood(prior, noise)
    hyper = [tensor for tensor in li.hyperparameters(model) if tensor.requires_grad]
    wanted = [prior, *hyper] if noise is None else [prior, noise, *hyper]
    options = {"allow_unused": True, "materialize_grads": True}
    expected = torch.autograd.grad(evidence, wanted, **options)
    found = estimated(model, likelihood, x, y, len(x), prior, noise)
    assert found.evidence.item() == pytest.approx(evidence.item(), rel=1e-10)
    for name in ("log_likelihood", "log_det_ratio", "scatter"):
        assert getattr(found, name).item() == pytest.approx(getattr(la, name).item(), rel=1e-10)
    actual = [found.precision_gradient, found.noise_gradient, *found.hyperparameter_gradients]
    actual = [gradient for gradient in actual if gradient is not None]
    for gradient, derivative in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, derivative, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("n_samples", [1, 3])
@pytest.mark.parametrize(("build", "shape"), WITH_RULES + COMPOSED, ids=name_of)
def test_one_block_is_exact_for_every_layer(build, shape, n_samples):
    model, x, _ = around(build, (4, *shape[1:]))
    model.n_samples = n_samples
    assert_is_exact(model, "classification" if n_samples == 3 else "regression", x)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("pieces", [8, 2**22])
def test_one_block_is_exact_for_layers_called_twice(likelihood, pieces, monkeypatch):
    monkeypatch.setattr(kernels, "PIECE_ELEMENTS", pieces)
    augmentation = li.AffinePoints(init=0.2)
    head = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), Residual())
    assert_is_exact(li.InvariantModel(head, augmentation, 3), likelihood, torch.randn(7, 2))
    assert_is_exact(head, likelihood, torch.randn(7, 2))


def dense(model, likelihood, x, y, prior, noise):
    """The evidence from the Jacobian of all parameters, in one graph."""
    with differentiable():
        seed(model)
        outputs = model(x)
    factor = 1 / TEMPERATURE if noise is None else 1 / noise.square() / TEMPERATURE
    sizes = torch.tensor([p.numel() for p in model.parameters()])
    each = prior.repeat_interleave(sizes)
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    ratio = (factor * ggn(model, outputs, likelihood) + each.diag()).logdet() - each.log().sum()
    if likelihood == "classification":
        loss = nn.functional.cross_entropy(outputs, y, reduction="sum")
        log_likelihood = -factor * loss
    else:
        constant = y.numel() * (noise * math.sqrt(2 * math.pi)).log()
        log_likelihood = -factor * (outputs - y).square().sum() / 2 - constant
    return (log_likelihood - 0.5 * (ratio + (each * theta) @ theta)).squeeze()


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_one_block_equals_the_dense_twin(likelihood):
    model, x = points()
    y, noise, prior = targets(6, likelihood), noise_of(likelihood), precisions(model)
    expected = dense(model, likelihood, x, y, prior, noise)
    wanted = [prior, model.augmentation.eta] + [noise] * (noise is not None)
    gradients = torch.autograd.grad(expected, wanted)
    found = estimated(model, likelihood, x, y, 6, prior, noise)
    torch.testing.assert_close(found.evidence, expected.detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(found.precision_gradient, gradients[0])
    torch.testing.assert_close(found.hyperparameter_gradients, [gradients[1]])
    if noise is not None:
        torch.testing.assert_close(found.noise_gradient, gradients[2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_gradients_equal_central_differences(likelihood, kind):
    model, x = points()
    y, noise, prior = targets(6, likelihood), noise_of(likelihood), precisions(model)

    def estimate():
        return estimated(model, likelihood, x, y, 20, prior, noise, kind, column=1)

    found = estimate()
    (eta_gradient,) = found.hyperparameter_gradients
    pairs = [(prior, found.precision_gradient), (model.augmentation.eta, eta_gradient)]
    if noise is not None:
        pairs.append((noise, found.noise_gradient))
    for tensor, gradient in pairs:
        expected = central_differences(lambda: estimate().evidence, tensor)
        assert relative_error(gradient, expected) < 1e-7


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_determinant_is_differentiable(kind):
    model, x = points()
    prior, factor = precisions(model), torch.tensor(1.7, requires_grad=True)
    bound = TangentKernelBound(model, "classification", kind)

    def value():
        seed(model)
        return bound.log_determinant(x, prior, factor, column=2)

    (3 * value()).backward()
    for tensor in (prior, factor, model.augmentation.eta):
        expected = central_differences(lambda: 3 * value(), tensor)
        assert relative_error(tensor.grad, expected) < 1e-7


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_every_partition_bounds_the_evidence_from_below(likelihood):
    model, x = fixed()
    y, noise, prior = targets(6, likelihood), noise_of(likelihood), precisions(model).detach()
    evidence = exact(model, likelihood, x, y).log_marginal_likelihood(prior, noise).item()
    full, output = [], []
    for order in [*itertools.permutations(range(6))][::180]:
        for size in (1, 2, 3):
            parts = torch.tensor(order).split(size)
            for kind, found in (("full", full), ("output", output)):
                estimates = [
                    estimated(model, likelihood, x[part], y[part], 6, prior, noise, kind)
                    for part in parts
                ]
                found.append(sum(e.evidence.item() for e in estimates) / len(parts))
    assert evidence > max(full)
    assert all(o < f for o, f in zip(output, full, strict=True))
    whole = estimated(model, likelihood, x, y, 6, prior, noise, "output").evidence.item()
    assert max(output) < whole < evidence


def test_larger_random_subsets_bound_more_tightly():
    """Also where they do not divide the data: Han's inequality."""
    model, x = fixed(5)
    bound, prior = TangentKernelBound(model, "classification"), precisions(model).detach()
    means = []
    for size in range(1, 6):
        subsets = list(itertools.combinations(range(5), size))
        values = [bound.log_determinant(x[list(subset)], prior).item() for subset in subsets]
        means.append(5 / size * sum(values) / len(values))
    assert means == sorted(means, reverse=True)
    assert len(set(means)) == 5


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_single_columns_average_to_output(likelihood):
    model, x = points()
    y, noise, prior = targets(6, likelihood), noise_of(likelihood), precisions(model)
    output = estimated(model, likelihood, x, y, 20, prior, noise, "output")
    singles = [
        estimated(model, likelihood, x, y, 20, prior, noise, "single", column=column)
        for column in range(CLASSES)
    ]
    assert len({single.evidence.item() for single in singles}) == CLASSES
    for name in ("evidence", "precision_gradient"):
        mean = torch.stack([getattr(single, name) for single in singles]).mean(0)
        torch.testing.assert_close(mean, getattr(output, name))
    mean = torch.stack([single.hyperparameter_gradients[0] for single in singles]).mean(0)
    torch.testing.assert_close(mean, output.hyperparameter_gradients[0])


def test_single_draws_its_column_from_the_generator():
    model, x = fixed()
    prior = torch.tensor([0.5])
    generator = torch.Generator().manual_seed(0)
    bound = TangentKernelBound(model, "classification", "single", generator=generator)
    known = [round(bound.log_determinant(x, prior, column=c).item(), 8) for c in range(CLASSES)]
    drawn = [round(bound.log_determinant(x, prior).item(), 8) for _ in range(20)]
    assert set(drawn) == set(known)


@pytest.mark.parametrize("kind", ["full", "output"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_minibatches_average_to_the_bound(likelihood, kind):
    model, x = fixed()
    y, noise, prior = targets(6, likelihood), noise_of(likelihood), torch.tensor([0.5])
    bound = TangentKernelBound(model, likelihood, kind)
    factor = 1 / TEMPERATURE if noise is None else 1 / noise.detach().square() / TEMPERATURE
    parts = torch.arange(6).split(2)
    la = exact(model, likelihood, x, y)
    blocks = sum(bound.log_determinant(x[part], prior, factor) for part in parts)
    la.log_marginal_likelihood(prior, noise)
    expected = la.log_likelihood - 0.5 * (blocks + la.scatter)
    estimates = [bound.estimate(x[p], y[p], 6, prior, noise, TEMPERATURE).evidence for p in parts]
    torch.testing.assert_close(sum(estimates) / 3, expected.detach().squeeze())


@pytest.mark.parametrize("reduced", [False, True])
def test_roots_of_the_softmax_hessian(reduced):
    logits = 3 * torch.randn(5, 4)
    root = kernels.softmax_root(logits, reduced)
    assert root.shape == (4 - reduced, 5, 4)
    p = logits.softmax(-1)
    hessian = torch.diag_embed(p) - torch.einsum("bc,bd->bcd", p, p)
    torch.testing.assert_close(torch.einsum("kbc,kbd->bcd", root, root), hessian)


@pytest.mark.parametrize("kind", KINDS)
def test_saturated_logits_have_finite_gradients(kind):
    model, x = points()
    model.net[2].weight.data.mul_(1e4)
    y, prior = targets(6, "classification"), precisions(model)
    found = estimated(model, "classification", x, y, 20, prior, kind=kind, column=0)
    assert model(x).softmax(-1).min() == 0
    assert found.log_det_ratio.isfinite()
    assert found.precision_gradient.isfinite().all()
    assert found.hyperparameter_gradients[0].isfinite().all()


# Kernels of single parameters.

# block, column, batch, r, slots, d_in, d_out
PAIRED = (1, 3, 4, 2, 1, 200, 5)
EXPLICIT = (1, 3, 4, 17, 1, 2, 5)


@pytest.mark.parametrize("pieces", [1, 60, 2**22])
@pytest.mark.parametrize(
    ("sizes", "way"),
    [
        (PAIRED, kernels._paired),
        ((3, 1, 4, 2, 2, 200, 5), kernels._paired),
        (EXPLICIT, kernels._explicit),
        ((3, 1, 4, 17, 2, 2, 5), kernels._explicit),
    ],
)
def test_kernel_of_a_matrix(sizes, way, pieces, monkeypatch):
    monkeypatch.setattr(kernels, "PIECE_ELEMENTS", pieces)
    block, column, batch, r, slots, d_in, d_out = sizes
    a = torch.randn(batch, r, slots, d_in, requires_grad=True)
    g = torch.randn(block, column, batch, r, slots, d_out, requires_grad=True)
    scale = torch.tensor(0.7, requires_grad=True)
    assert kernels._plan(a, g)[0] is way
    psi = torch.einsum("nrqi,bknrqo->bknqoi", a, g).flatten(3).flatten(1, 2)
    expected = scale * psi @ psi.mT
    actual = kernels.matrix_kernel(a, g, scale)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad(actual, [a, g, scale], weights)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, [a, g, scale], weights))
    if slots == 1:
        torch.testing.assert_close(kernels.matrix_kernel(a[:, :, 0], g[..., 0, :], scale), expected)


def test_log_determinant_of_kernels_with_large_round_off():
    """In single precision, where eigenvalues that should be zero are less than -1."""
    psi = torch.randn(2, 9, 4) * 4e3
    expected = torch.logdet(torch.eye(4) + psi.mT @ psi).sum()
    kernel = (psi @ psi.mT).float().requires_grad_()
    assert torch.linalg.eigvalsh(kernel.double()).min() < -1
    value = kernels.log_determinant(kernel)
    value.backward()
    assert value.item() == pytest.approx(expected.item(), rel=0.1)
    assert kernel.grad.dtype == torch.float32
    assert torch.linalg.eigvalsh(kernel.grad).min() > -1e-6
    with pytest.raises(torch.linalg.LinAlgError, match="not finite"):
        kernels.log_determinant(torch.full((1, 2, 2), math.nan))


# Memory.


class Largest(TorchDispatchMode):
    """Remember the number of elements of the largest tensor that is computed."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 40])  # paired, explicit
def test_no_jacobian_is_formed(rows, kind, monkeypatch):
    monkeypatch.setattr(kernels, "PIECE_ELEMENTS", 2**8)
    net = nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, CLASSES))
    layers = [nn.Flatten(), nn.Unflatten(1, (rows, 30)), net, nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(rows * CLASSES, CLASSES))
    x, prior = torch.randn(6, rows * 30), precisions(model)
    bound = TangentKernelBound(model, "classification", kind)
    bound.log_determinant(x[:2], prior)  # matches, which forms Jacobians of two inputs
    with Largest() as largest:
        bound.log_determinant(x, prior)
    jacobian = len(x) * CLASSES * net[0].weight.numel()
    gradients = len(x) * CLASSES * rows * 30
    assert largest.numel <= max(gradients, 30 * 30, len(x) * CLASSES * 30 * 2)
    assert rows > 1 or largest.numel < jacobian / 8


# Conditions.


def test_evaluates_in_evaluation_mode_and_leaves_nothing_behind():
    net = nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, CLASSES))
    model = li.InvariantModel(net, li.AffinePoints(init=0.1), 3)
    y, prior = targets(6, "classification"), precisions(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    values = []
    for _ in range(2):
        found = estimated(model, "classification", torch.ones(6, 2), y, 6, prior)
        values.append(found.evidence)
    torch.testing.assert_close(*values)
    assert model.net.training
    torch.testing.assert_close(dict(model.state_dict()), before)
    gradients = [*model.parameters(), *li.hyperparameters(model), prior]
    assert all(tensor.grad is None for tensor in gradients)
    assert not any(module._forward_hooks for module in model.modules())


def test_draws_are_fresh_even_without_gradients():
    model, x = points()
    y, prior = targets(6, "classification"), precisions(model)
    bound = TangentKernelBound(model, "classification")
    with torch.no_grad():
        values = {bound.estimate(x, y, 6, prior).evidence.item() for _ in range(3)}
    assert len(values) == 3


def test_fixed_hyperparameters_have_no_gradient():
    model, x = points()
    model.augmentation.eta.requires_grad_(False)
    y, prior = targets(6, "classification"), torch.tensor(0.5)
    found = TangentKernelBound(model, "classification").estimate(x, y, 6, prior)
    assert found.hyperparameter_gradients == []
    assert found.precision_gradient.shape == ()


def test_kernels_that_are_too_large_are_refused(monkeypatch):
    monkeypatch.setattr(ntk, "KERNEL_ELEMENTS", 120)
    (model, x), prior = points(11), torch.tensor([1.0])
    full = TangentKernelBound(model, "classification", "full")
    with pytest.raises(ValueError, match="at most 5 or kind='output' or kind='single'"):
        full.log_determinant(x[:6], prior)
    full.log_determinant(x[:5], prior)
    single = TangentKernelBound(model, "classification", "single")
    with pytest.raises(ValueError, match=r"use minibatches of at most 10$"):
        single.log_determinant(x, prior)
    single.log_determinant(x[:10], prior)


def test_what_cannot_work_is_refused():
    model, x = points()
    y, prior = targets(6, "classification"), torch.tensor([1.0])
    with pytest.raises(ValueError, match="kind must be one of 'full', 'output', 'single'"):
        TangentKernelBound(model, "classification", "dense")
    bound = TangentKernelBound(model, "classification")
    with pytest.raises(NotImplementedError, match="one for each of 4 tensors, got 33"):
        bound.estimate(x, y, 6, torch.ones(33))
    with pytest.raises(ValueError, match="a classification has no noise"):
        bound.estimate(x, y, 6, prior, torch.tensor([1.0]))
    with pytest.raises(ValueError, match="must have the shape of the outputs"):
        TangentKernelBound(model, "regression").estimate(x, torch.randn(6, 1), 6, prior)
    with pytest.raises(NotImplementedError, match="tangent kernels need rules"):
        TangentKernelBound(Free(), "classification").log_determinant(torch.randn(4, 5), prior)
