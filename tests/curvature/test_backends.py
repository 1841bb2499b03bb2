"""Curvature of one batch.

Equal to stock backends without samples, equal to the dense GGN where theory makes it exact.
"""

import copy
import warnings

import pytest
import torch
from laplace.curvature.asdl import AsdlEF, AsdlGGN
from laplace.curvature.backpack import BackPackEF, BackPackGGN
from laplace.curvature.curvlinops import CurvlinopsEF, CurvlinopsGGN
from torch import nn
from twins import block_diagonal, ggn, parameter_jacobian, product

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedEF, AugmentedGGN, register_rule
from laplace_invariance.curvature import rules as rules_module
from laplace_invariance.curvature.engines.autograd import AutogradEngine
from laplace_invariance.draws import replaying

N = 20
LIKELIHOODS = ("classification", "regression")


def mlp():
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4)), torch.randn(6, 2)


def cnn(bias=True):
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, bias=bias),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(60, 4, bias=bias),
    )
    return net, torch.randn(6, 2, 4, 5)


def targets(n, likelihood, classes=4):
    return (
        torch.randint(classes, (n,)) if likelihood == "classification" else torch.randn(n, classes)
    )


def curvature(backend, net, likelihood, structure, x, y):
    net = copy.deepcopy(net)
    net.output_size = 4  # as Laplace.fit sets it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss, result = getattr(backend(net, likelihood), structure)(x, y, N=N)
    return loss, [product(fs) for fs in result.kfacs] if structure == "kron" else result


@pytest.mark.parametrize("invariant", [False, True], ids=["plain", "averaged"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize(
    "stock", [CurvlinopsGGN, BackPackGGN, AsdlGGN, CurvlinopsEF, BackPackEF, AsdlEF]
)
def test_equals_stock_without_samples(stock, likelihood, invariant):
    """With the native engine; test_engines has the others agree with it."""
    net, x = mlp()
    y = targets(6, likelihood)
    model = li.InvariantModel(net, li.AffinePoints(), n_samples=1) if invariant else net
    ours = AugmentedEF if stock.__name__.endswith("EF") else AugmentedGGN
    for structure in ("kron", "diag", "full"):
        if stock is BackPackEF and structure == "kron":
            with pytest.raises(NotImplementedError):
                stock(net, likelihood).kron(None, None, N=N)
            continue
        loss, actual = curvature(ours, model, likelihood, structure, x, y)
        expected_loss, expected = curvature(stock, net, likelihood, structure, x, y)
        torch.testing.assert_close(loss, expected_loss)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_where_stock_backends_differ_on_convolutions(likelihood):
    """Weights: KFAC-expand with 1 / R on G, as Curvlinops and ASDL. Bias: exact, as BackPACK."""
    net, x = cnn()
    y = targets(6, likelihood)
    results = {
        b: curvature(b, net, likelihood, "kron", x, y)[1]
        for b in (AugmentedGGN, CurvlinopsGGN, BackPackGGN, AsdlGGN)
    }
    ours = results[AugmentedGGN]
    for same in (CurvlinopsGGN, AsdlGGN):
        torch.testing.assert_close(ours[0], results[same][0])
        assert not torch.allclose(ours[1], results[same][1])
    torch.testing.assert_close(ours[1], results[BackPackGGN][1])
    assert not torch.allclose(ours[0], results[BackPackGGN][0])
    dense = ggn(net, net(x), likelihood)
    torch.testing.assert_close(ours[1], dense[54:57, 54:57])
    torch.testing.assert_close(ours[2:], results[CurvlinopsGGN][2:])


def test_expand_over_sequence_positions_equals_curvlinops():
    net = nn.Sequential(
        nn.Linear(3, 5, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(35, 4, bias=False)
    )
    x, y = torch.randn(6, 7, 3), targets(6, "classification")
    _, ours = curvature(AugmentedGGN, net, "classification", "kron", x, y)
    _, stock = curvature(CurvlinopsGGN, net, "classification", "kron", x, y)
    torch.testing.assert_close(ours, stock)


def test_reduce_equals_curvlinops():
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(18, 4, bias=False)
    )
    x, y = torch.randn(6, 2, 4, 5), targets(6, "classification")
    _, ours = AugmentedGGN(net, "classification", kfac_approx="reduce").kron(x, y, N=N)
    _, stock = CurvlinopsGGN(net, "classification").kron(x, y, N=N, kfac_approx="reduce")
    torch.testing.assert_close([product(f) for f in ours.kfacs], [product(f) for f in stock.kfacs])


def test_grouped_convolution_is_closer_to_the_ggn_than_averaging_groups():
    net = nn.Sequential(
        nn.Conv2d(4, 6, 3, groups=2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(36, 4)
    )
    x, y = torch.randn(6, 4, 4, 5), targets(6, "classification")
    dense = ggn(net, net(x), "classification")[:108, :108]

    def error(backend):
        _, kron = backend(net, "classification").kron(x, y, N=6)
        return (product(kron.kfacs[0]) - dense).norm() / dense.norm()

    assert error(AugmentedGGN) < error(CurvlinopsGGN)


# Exact cases, with samples. N is the batch, since there is one batch.


def dense_twin(model, x, likelihood, y):
    """Our factors, and blocks of the dense GGN of the averaged network under the same draws."""
    generator = model.generator
    state = generator.get_state()
    _, kron = AugmentedGGN(model, likelihood).kron(x, y, N=len(x))
    generator.set_state(state)
    return kron.to_matrix(), block_diagonal(ggn(model, model(x), likelihood), model)


def invariant(net, n_samples=5, init=0.4):
    return li.InvariantModel(
        net, li.AffinePoints(init=init), n_samples, generator=torch.Generator()
    )


def test_exact_for_one_linear_layer():
    """With Gaussian likelihood for all data; with softmax for one datum, since Lambda varies."""
    model = invariant(nn.Linear(2, 3))
    actual, expected = dense_twin(model, torch.randn(7, 2), "regression", torch.randn(7, 3))
    torch.testing.assert_close(actual, expected)
    actual, expected = dense_twin(model, torch.randn(1, 2), "classification", torch.tensor([1]))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_exact_for_one_datum_with_equal_samples(likelihood):
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    model = invariant(net, init=0.0)
    actual, expected = dense_twin(model, torch.randn(1, 2), likelihood, targets(1, likelihood, 3))
    torch.testing.assert_close(actual, expected)


def test_exact_for_a_deep_linear_network_with_gaussian_likelihood():
    net = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 7), nn.Linear(7, 3))
    actual, expected = dense_twin(
        invariant(net), torch.randn(6, 2), "regression", torch.randn(6, 3)
    )
    torch.testing.assert_close(actual, expected)


def test_not_exact_elsewhere():
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    actual, expected = dense_twin(
        invariant(net), torch.randn(6, 2), "regression", torch.randn(6, 3)
    )
    first = slice(0, 10)  # the weights of the first layer
    assert (actual - expected)[first, first].norm() / expected[first, first].norm() > 0.05


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_diag_and_full_are_exact_for_any_number_of_samples(backend, likelihood):
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.LayerNorm(80),
        nn.Linear(80, 4),
    )
    model = li.InvariantModel(net, li.AffineImage(init=0.1), 3, generator=torch.Generator())
    x, y = torch.randn(6, 2, 4, 5), targets(6, likelihood)
    engine = backend(model, likelihood)
    state = model.generator.get_state()
    loss, full = engine.full(x, y)
    model.generator.set_state(state)
    _, diag = engine.diag(x, y)
    model.generator.set_state(state)
    outputs = model(x)
    torch.testing.assert_close(loss, engine.factor * engine.lossfunc(outputs, y))
    if issubclass(backend, AugmentedGGN):
        expected = ggn(model, outputs, likelihood)
    else:
        rows = []
        for i in range(6):
            loss = engine.lossfunc(outputs[i : i + 1], y[i : i + 1])
            row = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            rows.append(torch.cat([g.flatten() for g in row]))
        gradients = torch.stack(rows)
        expected = engine.factor * gradients.mT @ gradients
        model.generator.set_state(state)
        actual, total = engine.gradients(x, y)
        torch.testing.assert_close(actual, gradients)
        torch.testing.assert_close(total, engine.lossfunc(outputs, y))
    torch.testing.assert_close(full, expected)
    torch.testing.assert_close(diag, expected.diagonal())


def test_jacobians_are_those_of_predictions(ggn_backend):
    net, x = mlp()
    model = li.InvariantModel(net, li.AffinePoints(init=0.4), 5)
    backend = ggn_backend(model, "classification")
    jacobians, outputs = backend.jacobians(x)
    with torch.no_grad():
        torch.testing.assert_close(outputs, model(x))
    with replaying([model.augmentation.fixed(5)]):
        torch.testing.assert_close(jacobians, parameter_jacobian(model, model(x)).detach())
    assert not jacobians.requires_grad
    x.requires_grad_()
    for chunk_size in (None, 2):
        backend = ggn_backend(model, "classification", chunk_size=chunk_size)
        jacobians, outputs = backend.jacobians(x, enable_backprop=True)
        (gradient,) = torch.autograd.grad(jacobians.square().sum() + outputs.sum(), x)
        assert gradient.abs().min() > 0


def with_gradient(backend, structure, **options):
    """Loss, curvature and a gradient of both to the hyperparameters; five samples per input."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4), nn.LayerNorm(4))
    model = invariant(net, 5)
    model.generator.manual_seed(1)
    x, y = torch.randn(4, 2), targets(4, "classification")
    loss, result = getattr(backend(model, "classification", **options), structure)(x, y, N=N)
    factors = [f for fs in result.kfacs for f in fs] if structure == "kron" else [result]
    squares = [tensor.square().sum() for tensor in (loss, *factors)]
    (gradient,) = torch.autograd.grad(squares, model.augmentation.eta)
    return [loss.detach(), *(f.detach() for f in factors), gradient]


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_chunks_change_nothing(structure):
    """Below five, the samples of one input are split."""
    expected = with_gradient(AugmentedGGN, structure)
    for chunk_size in (1, 3, 4, 9, 100):
        actual = with_gradient(AugmentedGGN, structure, chunk_size=chunk_size)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("chunk_size", [3, 9])
def test_chunks_change_nothing_in_any_engine(backend, chunk_size):
    for structure in ("kron", "full"):
        actual = with_gradient(backend, structure, chunk_size=chunk_size)
        torch.testing.assert_close(actual, with_gradient(backend, structure))


def test_full_rank_is_exact_and_the_discarded_share_is_reported():
    net, x = mlp()
    y = targets(6, "classification")
    exact = AugmentedGGN(net, "classification")
    _, expected = exact.kron(x, y, N=N)
    assert exact.discarded == 0
    _, kron = AugmentedGGN(net, "classification", output_rank=3).kron(x, y, N=N)
    torch.testing.assert_close(kron.to_matrix(), expected.to_matrix())
    truncated = AugmentedGGN(net, "classification", output_rank=2)
    _, kron = truncated.kron(x, y, N=N)
    values = torch.linalg.eigvalsh(
        torch.diag_embed(p := net(x).softmax(-1)) - p.unsqueeze(2) * p.unsqueeze(1)
    )
    best = (1 - values[:, -2:].sum() / values.sum()).item()
    assert best - 1e-12 < truncated.discarded < best + 1e-3
    assert 0 < truncated.discarded < 1
    hybrid = AugmentedGGN(net, "classification", output_rank=1, stochastic=True)
    hybrid.kron(x, y, N=N)
    assert hybrid.discarded == 0
    smaller = [f[0].trace() < e[0].trace() for f, e in zip(kron.kfacs, expected.kfacs, strict=True)]
    assert all(smaller)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_sampled_curvature_is_unbiased(likelihood):
    net, x = mlp()
    y = targets(6, likelihood)
    _, exact = AugmentedGGN(net, likelihood).diag(x, y)
    backend = AugmentedGGN(net, likelihood, stochastic=True, num_samples=2)
    sampled = torch.stack([backend.diag(x, y)[1] for _ in range(1000)])
    mean = sampled.mean(0)
    torch.testing.assert_close(mean, exact, rtol=0.1, atol=0.03 * exact.max().item())
    assert (sampled[0] - exact).abs().max() > 0.01 * exact.max()


@pytest.mark.parametrize(
    ("backend", "options", "match"),
    [
        (AugmentedGGN, {"kfac_approx": "average"}, "kfac_approx"),
        (AugmentedGGN, {"on_unsupported": "skip"}, "on_unsupported"),
        (AugmentedEF, {"chunk_size": 0}, "chunk_size"),
        (AugmentedEF, {"chunk_size": 2.5}, "chunk_size must be a positive integer or None"),
        (AugmentedGGN, {"chunk_size": float("nan")}, "chunk_size must be a positive integer"),
        (AugmentedGGN, {"output_rank": 1.5}, "output_rank must be a positive integer or None"),
        (AugmentedGGN, {"num_samples": 2.0}, "num_samples must be a positive integer"),
        (AugmentedGGN, {"output_rank": 0}, "output_rank"),
        (AugmentedGGN, {"num_samples": 0}, "num_samples"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_bad_options_are_refused(backend, options, match):
    with pytest.raises(ValueError, match=match):
        backend(mlp()[0], "classification", **options)


def test_output_rank_is_refused_for_regression():
    with pytest.raises(ValueError, match="regression"):
        AugmentedGGN(mlp()[0], "regression", output_rank=2)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_input_that_is_not_finite_is_refused(structure, value):
    net, x = mlp()
    x[3, 1] = value
    with pytest.raises(ValueError, match="NaN or infinite"):
        getattr(AugmentedGGN(net, "classification"), structure)(
            x, targets(6, "classification"), N=N
        )


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_weights_that_are_not_finite_are_named(structure):
    net, x = mlp()
    name, weight = next(iter(net.named_parameters()))
    weight.data[0] = float("nan")
    with pytest.raises(FloatingPointError, match=f"outputs .* are not finite, as {name} are not"):
        getattr(AugmentedGGN(net, "classification"), structure)(
            x, targets(6, "classification"), N=N
        )


WIDE = {
    "images": (lambda: li.AffineImage(init={"x_scale": 1e3}), (3, 4, 4)),
    "colours": (lambda: li.Colour(init={"brightness": 1e3}), (3, 4, 4)),
    "points": (lambda: li.AffinePoints(init={"x_scale": 1e3}), (2,)),
}


@pytest.mark.parametrize(("augmentation", "shape"), WIDE.values(), ids=WIDE)
def test_ranges_that_make_numbers_overflow_are_named(augmentation, shape):
    """Also where a layer hides it from the outputs, such as one that saturates."""
    n_in = torch.Size(shape).numel()
    net = nn.Sequential(nn.Flatten(), nn.Linear(n_in, 5), nn.Tanh(), nn.Linear(5, 3))
    model = li.InvariantModel(net, augmentation(), n_samples=4)
    match = r"not finite; check .*its ranges \(augmentation\.eta up to 1e\+03\)"
    with pytest.raises(FloatingPointError, match=match):
        AugmentedGGN(model, "classification").kron(
            torch.rand(6, *shape), targets(6, "classification"), N=N
        )


def test_unknown_arguments_are_refused():
    net, x = mlp()
    with pytest.raises(TypeError, match="backend_kwargs"):
        AugmentedGGN(net, "classification").kron(x, targets(6, "classification"), N=N, mc_samples=3)


def test_every_target_needs_its_input():
    net, x = mlp()
    with pytest.raises(ValueError, match="5 targets for 6 inputs"):
        AugmentedGGN(net, "classification").kron(x, targets(5, "classification"), N=N)


def test_rules_run_once_per_module(monkeypatch):
    """Not once per parameter, nor again for later batches."""
    monkeypatch.setattr(rules_module, "_rules", rules_module.rules())
    original, modules = rules_module.rules()[nn.Linear], []

    @register_rule(nn.Linear, overwrite=True)
    def counted(module):
        modules.append(module)
        return original(module)

    net, x = mlp()
    backend = AugmentedGGN(net, "classification")
    for structure in ("kron", "diag", "full", "kron"):
        getattr(backend, structure)(x, targets(6, "classification"), N=N)
    backend.jacobians(x)
    assert modules == [net[0], net[2]]


def test_engines_compute_values_and_autograd_derivatives():
    class Counting(AutogradEngine):
        runs = 0

        def run(self, *args):
            Counting.runs += 1
            return super().run(*args)

    class Counted(AugmentedGGN):
        engine = Counting()

    net, x = mlp()
    model = invariant(net)
    _, kron = Counted(model, "classification").kron(x, targets(6, "classification"), N=N)
    assert Counting.runs == 1
    kron.kfacs[0][0].sum().backward()
    assert Counting.runs == 1
    assert model.augmentation.eta.grad.abs().max() > 0
