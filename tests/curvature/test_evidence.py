"""The evidence of stock Laplace, and its gradient in hyperparameters, priors and noise."""

import math
from itertools import chain

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twins import block_diagonal, central_differences, ggn, relative_error

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedEF, AugmentedGGN, MatrixBlock, kfac
from laplace_invariance.curvature.engines.autograd import AutogradEngine
from laplace_invariance.curvature.trace.matching import match
from laplace_invariance.hyper import differentiable

STRUCTURES = ("kron", "diag", "full")
BACKENDS = (AugmentedGGN, AugmentedEF)
LIKELIHOODS = ("classification", "regression")
CLASSES, SAMPLES = 3, 4


def points(**kwargs):
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    augmentation = li.AffinePoints(init=[0.1, -0.2, 0.3, 0.15, 0.25, 0.05], **kwargs)
    return li.InvariantModel(net, augmentation, SAMPLES, generator=torch.Generator()), torch.randn(
        11, 2
    )


def images(**kwargs):
    first = [nn.Conv2d(1, 2, 3), nn.GELU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(2, 4, 2, groups=2, padding=1), nn.ReLU(), nn.Flatten()]
    net = nn.Sequential(*first, *second, nn.Linear(36, CLASSES))
    augmentation = li.AffineImage(init=[0.1, -0.2, 0.3, 0.15, 0.25, 0.05], **kwargs)
    return li.InvariantModel(net, augmentation, SAMPLES, generator=torch.Generator()), torch.randn(
        11, 1, 6, 6
    )


def in_words(options):
    """Return the id of a test with these options."""
    return ",".join(f"{name}={value}" for name, value in options.items()) or "default"


def loader_of(x, likelihood):
    y = (
        torch.randint(CLASSES, (len(x),))
        if likelihood == "classification"
        else torch.randn(len(x), CLASSES)
    )
    return DataLoader(TensorDataset(x, y), batch_size=4)


def fit(model, loader, likelihood, structure, backend, **kwargs):
    """Fit stock Laplace, with the same draws every time."""
    model.generator.manual_seed(1)
    noise = {} if likelihood == "classification" else {"sigma_noise": 0.7}
    settings = (
        {"prior_precision": 0.5, "subset_of_weights": "all", "hessian_structure": structure}
        | noise
        | kwargs
    )
    la = Laplace(model, likelihood, backend=backend, **settings)
    la.fit(loader)
    return la


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("data", [points, images])
def test_gradient_equals_central_differences(data, likelihood, backend, structure):
    model, x = data()
    loader, eta = loader_of(x, likelihood), model.augmentation.eta

    def evidence():
        return fit(model, loader, likelihood, structure, backend).log_marginal_likelihood().detach()

    fit(model, loader, likelihood, structure, backend).log_marginal_likelihood().backward()
    # Points are smooth. Images have kinks where a sample crosses a pixel, or where a maximum or a
    # ReLU changes: a small step passes few.
    step, tolerance = (1e-5, 1e-5) if data is points else (1e-7, 1e-4)
    assert relative_error(eta.grad, central_differences(evidence, eta, step)) < tolerance


@pytest.mark.parametrize(
    "options",
    [{"correlated": True}, {"constraint": "softplus"}, {"constraint": "tanh"}, {"draws": "sobol"}],
    ids=in_words,
)
def test_gradient_of_every_parametrisation(options):
    model, x = points(**options)
    if "correlated" in options:
        model.augmentation.mixing.data.copy_(0.1 * torch.randn(6, 6))
    loader = loader_of(x, "classification")

    def evidence():
        return fit(model, loader, "classification", "kron", AugmentedGGN).log_marginal_likelihood()

    evidence().backward()
    for name, tensor in li.named_hyperparameters(model):
        entries = torch.randperm(tensor.numel())[:6]  # of the 36 that mix coefficients, some
        difference = central_differences(evidence, tensor, entries=entries)
        assert relative_error(tensor.grad.flatten()[entries], difference) < 1e-5, name


@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradient_of_group_weights(structure):
    net = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    model = li.InvariantModel(net, li.FiniteGroup("all", init=0.3), generator=torch.Generator())
    loader = loader_of(torch.randn(7, 1, 5, 5), "classification")

    def evidence():
        return fit(
            model, loader, "classification", structure, AugmentedGGN
        ).log_marginal_likelihood()

    evidence().backward()
    eta = model.augmentation.eta
    assert relative_error(eta.grad, central_differences(lambda: evidence().detach(), eta)) < 1e-6


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize(
    "options",
    [{"stochastic": True, "num_samples": 2}, {"kfac_approx": "reduce"}, {"chunk_size": 3}],
    ids=in_words,
)
def test_gradient_with_every_option(options, likelihood):
    model, x = images()
    loader, eta = loader_of(x, likelihood), model.augmentation.eta

    def evidence():
        torch.manual_seed(7)  # the signs of stochastic come from torch's default generator
        return fit(
            model, loader, likelihood, "kron", AugmentedGGN, backend_kwargs=options
        ).log_marginal_likelihood()

    evidence().backward()
    entries = torch.randperm(eta.numel(), generator=torch.Generator().manual_seed(1))[:2]
    difference = central_differences(evidence, eta, 1e-7, entries)
    assert relative_error(eta.grad[entries], difference) < 1e-4


def test_truncated_gradient_holds_the_directions_fixed():
    """Equal to the exact one at full rank, close to it when little is discarded."""
    model, x = points()
    model.net[2].weight.data.mul_(4)
    loader, eta = loader_of(x, "classification"), model.augmentation.eta

    def gradient(**options):
        eta.grad = None
        la = fit(model, loader, "classification", "kron", AugmentedGGN, backend_kwargs=options)
        la.log_marginal_likelihood().backward()
        return eta.grad.clone(), la.backend.discarded

    exact, _ = gradient()
    full, discarded = gradient(output_rank=CLASSES - 1)
    torch.testing.assert_close(full, exact)
    assert discarded == 0
    truncated, discarded = gradient(output_rank=1)
    assert 0 < discarded < 0.5
    assert 0 < relative_error(truncated, exact) < 1


def columns_of(outputs, likelihood):
    """Directions that span the loss Hessian, and its entries between them."""
    if likelihood == "regression":
        return [unit.expand_as(outputs) for unit in torch.eye(CLASSES)], None
    basis = kfac.complement_basis(CLASSES, outputs).expand(len(outputs), -1, -1)
    return basis.unbind(-1), basis.mT @ kfac.softmax_hessian(outputs) @ basis


def factors_of(trace, matched, likelihood, n):
    columns, weights = columns_of(trace.outputs, likelihood)
    terms = zip(
        matched.blocks, trace.averaged_inputs(), trace.averaged_gradients(columns), strict=True
    )
    return [
        block.factors(a, g, weights, n, "expand", False)
        if isinstance(block, MatrixBlock)
        else [kfac.gram(g, weights)]
        for block, a, g in terms
    ]


def one_big_graph(model, loader, likelihood, structure):
    """The log marginal likelihood with all batches in one graph, and a dense log determinant."""
    matched = match(model, list(model.parameters()), model, next(iter(loader))[0][:2])
    interface = AugmentedGGN(model, likelihood)
    model.generator.manual_seed(1)
    loss, precision, n = 0.0, 0.0, len(loader.dataset)
    scale = 1.0 if likelihood == "classification" else 1 / 0.7**2
    batches = []
    for x, y in loader:
        engine = AutogradEngine(differentiate=True)
        with differentiable(), engine.run(model, x, matched) as trace:
            if structure == "kron":
                batches.append(factors_of(trace, matched, likelihood, n))
            else:
                precision = precision + ggn(model, trace.outputs, likelihood)
        loss = loss + interface.factor * interface.lossfunc(trace.outputs, y)
    factors = [[sum(terms) for terms in zip(*fs, strict=True)] for fs in zip(*batches, strict=True)]
    if structure == "kron":
        precision = torch.block_diag(
            *(torch.kron(*fs) if len(fs) == 2 else fs[0] for fs in factors)
        )
    elif structure == "diag":
        precision = precision.diagonal().diag()
    theta = torch.cat([p.flatten() for p in model.parameters()]).detach()
    log_likelihood = -scale * loss
    if likelihood == "regression":
        log_likelihood = log_likelihood - n * CLASSES * math.log(0.7 * math.sqrt(2 * math.pi))
    posterior = scale * precision + 0.5 * torch.eye(len(theta))
    return log_likelihood - 0.5 * (
        posterior.logdet() - len(theta) * math.log(0.5) + 0.5 * theta @ theta
    )


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("data", [points, images])
def test_checkpointed_equals_one_big_graph(data, likelihood, structure):
    model, x = data()
    loader, eta = loader_of(x, likelihood), model.augmentation.eta
    la = fit(model, loader, likelihood, structure, AugmentedGGN)
    evidence = la.log_marginal_likelihood()
    twin = one_big_graph(model, loader, likelihood, structure)
    torch.testing.assert_close(evidence, twin, rtol=1e-10, atol=1e-10)
    evidence.backward()
    (expected,) = torch.autograd.grad(twin, eta)
    assert relative_error(eta.grad, expected) < 1e-10


def test_evidence_equals_the_closed_form_of_a_linear_gaussian_model():
    """Full curvature of a linear model: y is distributed as N(0, s^2 I + Phi Phi^T / d)."""
    model = li.InvariantModel(
        nn.Linear(2, 1, bias=False), li.AffinePoints(init=0.3), SAMPLES, generator=torch.Generator()
    )
    x = torch.randn(9, 2)
    y = torch.randn(9, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=9)
    model.generator.manual_seed(1)
    phi = (
        model.augmentation.transform(x, model.augmentation.sample(9, SAMPLES, model.generator))
        .mean(1)
        .detach()
    )
    noise, prior = 0.7, 0.5
    mode = torch.linalg.solve(phi.mT @ phi / noise**2 + prior * torch.eye(2), phi.mT @ y / noise**2)
    model.net.weight.data.copy_(mode.mT)
    expected = torch.distributions.MultivariateNormal(
        torch.zeros(9), noise**2 * torch.eye(9) + phi @ phi.mT / prior
    ).log_prob(y.squeeze(1))
    for structure in ("full", "kron"):
        evidence = fit(
            model, loader, "regression", structure, AugmentedGGN
        ).log_marginal_likelihood()
        torch.testing.assert_close(evidence.detach(), expected)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradients_of_noise_and_priors(structure):
    model, x = points()
    loader = loader_of(x, "regression")
    noise = torch.tensor(0.7, requires_grad=True)
    prior = torch.tensor([0.5, 0.6, 0.7, 0.8], requires_grad=True)
    la = fit(model, loader, "regression", structure, AugmentedGGN)
    la.log_marginal_likelihood(prior, noise).backward()
    for tensor in (noise, prior):
        expected = central_differences(
            lambda: la.log_marginal_likelihood(prior, noise).detach(), tensor
        )
        assert relative_error(tensor.grad, expected) < 1e-7


def test_stock_noise_gradient_is_wrong_and_ours_is_not():
    """Why the matrix class exists; when laplace-torch mends this, the first assertion tells."""
    net, x = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, CLASSES)), torch.randn(11, 2)
    loader = loader_of(x, "regression")

    def error(backend):
        noise = torch.tensor(0.7, requires_grad=True)
        la = Laplace(
            net, "regression", subset_of_weights="all", hessian_structure="kron", backend=backend
        )
        la.fit(loader)
        la.log_marginal_likelihood(sigma_noise=noise).backward()
        expected = central_differences(
            lambda: la.log_marginal_likelihood(sigma_noise=noise).detach(), noise
        )
        return relative_error(noise.grad, expected)

    assert error(None) > 1e-2
    assert error(AugmentedGGN) < 1e-7


def test_evidence_can_be_walked_back_repeatedly_and_keeps_its_draws():
    model, x = points()
    loader, eta = loader_of(x, "classification"), model.augmentation.eta
    la = fit(model, loader, "classification", "kron", AugmentedGGN)
    gradients = []
    for _ in range(3):
        eta.grad = None
        la.log_marginal_likelihood().backward()
        gradients.append(eta.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_draws_differ_from_batch_to_batch_and_from_fit_to_fit():
    model, x = points()
    loader = loader_of(x, "classification")
    settings = {"subset_of_weights": "all", "hessian_structure": "kron", "backend": AugmentedGGN}
    values = []
    for _ in range(2):
        la = Laplace(model, "classification", **settings)
        la.fit(loader)
        values.append(la.log_marginal_likelihood().item())
    assert values[0] != values[1]


def test_without_hyperparameters_there_is_no_graph():
    model, x = points()
    model.augmentation.eta.requires_grad_(False)
    la = fit(model, loader_of(x, "classification"), "classification", "kron", AugmentedGGN)
    assert not la.loss.requires_grad
    assert not la.H_facs.kfacs[0][0].requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("options", [{}, {"output_rank": 1}, {"stochastic": True}], ids=in_words)
@pytest.mark.parametrize("trouble", ["saturated", "repeated", "dead"])
def test_evidence_and_gradient_are_finite_in_trouble(trouble, options, structure, dtype):
    torch.set_default_dtype(dtype)
    model, x = points()
    if trouble == "saturated":
        model.net[2].weight.data.mul_(1000)
    elif trouble == "repeated":
        for parameter in model.parameters():
            parameter.data.fill_(0.5)
        x[:] = x[0]
    else:
        model.net[2].weight.data.zero_()
        model.net[0].weight.data.zero_()
        x.zero_()
    loader = loader_of(x, "classification")
    la = fit(model, loader, "classification", structure, AugmentedGGN, backend_kwargs=options)
    evidence = la.log_marginal_likelihood()
    evidence.backward()
    assert torch.isfinite(evidence)
    assert torch.isfinite(model.augmentation.eta.grad).all()


def test_float32_agrees_with_float64():
    model, x = images()
    loader = loader_of(x, "classification")
    la = fit(model, loader, "classification", "kron", AugmentedGGN)
    la.log_marginal_likelihood().backward()
    expected = model.augmentation.eta.grad.clone()
    model.augmentation.eta.grad = None
    draws = torch.Generator().manual_seed(1)
    tapes = [model.augmentation.sample(len(xb), SAMPLES, draws) for xb, _ in loader]
    model.float()
    taped = iter(tapes)
    model.augmentation.sample = lambda n, s, g: next(taped).float()
    single = DataLoader(TensorDataset(x.float(), loader.dataset.tensors[1]), batch_size=4)
    la32 = fit(model, single, "classification", "kron", AugmentedGGN)
    la32.log_marginal_likelihood().backward()
    assert la32.log_marginal_likelihood().item() == pytest.approx(
        la.log_marginal_likelihood().item(), rel=1e-4
    )
    assert relative_error(model.augmentation.eta.grad.double(), expected) < 1e-2


def test_full_evidence_is_the_dense_one():
    model, x = points()
    loader = loader_of(x, "classification")
    la = fit(model, loader, "classification", "full", AugmentedGGN)
    model.generator.manual_seed(1)
    expected = sum(ggn(model, model(xb), "classification") for xb, _ in loader)
    torch.testing.assert_close(la.H.detach(), expected.detach())
    assert not torch.allclose(block_diagonal(expected, model), expected)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("data", [points, images])
def test_one_pass_with_known_cotangents_equals_the_graph(data, structure):
    model, x = data()
    y = torch.randint(CLASSES, (len(x),))
    backend = AugmentedGGN(model, "classification", chunk_size=5 * SAMPLES)
    model.generator.manual_seed(1)
    loss, curvature = getattr(backend, structure)(x, y, N=len(x))
    tensors = [loss]
    tensors += chain(*curvature.kfacs) if structure == "kron" else [curvature]
    cotangents = [torch.randn_like(tensor) for tensor in tensors]
    (expected,) = torch.autograd.grad(tensors, model.augmentation.eta, cotangents)
    model.generator.manual_seed(1)
    values, (gradient,) = backend.pull_back(structure, x, y, len(x), cotangents)
    torch.testing.assert_close(values, [tensor.detach() for tensor in tensors])
    torch.testing.assert_close(gradient, expected)
    assert not any(value.requires_grad for value in values)
