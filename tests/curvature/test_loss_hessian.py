"""Columns of the loss Hessian: equal to the dense one, or so in the mean, gradients included."""

import pytest
import torch
from torch import nn
from twins import ggn, loss_hessian, parameter_jacobian, relative_error

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN, kfac
from laplace_invariance.curvature import loss_hessian as loss_hessian_module
from laplace_invariance.curvature.loss_hessian import (
    LossHessian,
    exact_columns,
    fresh_signs,
    leading_directions,
    root_product,
    softmax_trace,
    unit_directions,
)
from laplace_invariance.draws import recording, replaying


def hessian_of(columns, weights, factors=None):
    """The matrix ``[C, C]`` that columns stand for, summed over inputs, seen through factors."""
    vectors = torch.stack(list(columns), dim=1)
    if factors is not None:
        vectors = vectors @ factors
    return kfac.gram(vectors, weights)


def twin(logits, factors):
    dense = loss_hessian(logits, "classification")
    return (factors.mT @ dense @ factors).sum(0)


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_exact_columns_give_the_softmax_hessian_and_its_gradient(classes):
    logits = (3 * torch.randn(5, classes)).requires_grad_()
    factors, cotangent = torch.randn(5, classes, 4), torch.randn(4, 4)
    columns, weights = exact_columns(logits)
    assert len(columns) == classes - 1
    assert weights.shape == (5, classes - 1)
    actual, expected = hessian_of(columns, weights, factors), twin(logits, factors)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(m, logits, cotangent)[0] for m in (actual, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("columns_of", [exact_columns, LossHessian(True, 2, 1).columns])
def test_saturated_logits_have_finite_gradients_in_single_precision(columns_of):
    logits = torch.tensor([[100.0, 0, -100, 3, 1], [0, 0, 0, 0, 1000]]).float().requires_grad_()
    columns, weights = columns_of(logits)
    matrix = hessian_of(columns, weights)
    (gradient,) = torch.autograd.grad(matrix, logits, torch.randn(5, 5).float())
    assert matrix.isfinite().all()
    assert gradient.isfinite().all()


def test_confident_predictions_keep_their_digits():
    """Differences to the likeliest class involve small probabilities only."""
    logits = torch.tensor([[20.0, 1.0, 0.0, 2.0]])
    columns, weights = exact_columns(logits.float())
    expected = loss_hessian(logits, "classification")[0]
    actual = hessian_of(columns, weights).double()
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_root_squared_is_the_hessian():
    logits = torch.randn(5, 4)
    root = root_product(logits, torch.eye(4).expand(5, 4, 4))
    expected = loss_hessian(logits, "classification")
    torch.testing.assert_close(root.mT @ root, expected)
    torch.testing.assert_close(softmax_trace(logits), expected.diagonal(dim1=1, dim2=2).sum(-1))


def some_logits(kind, classes=50):
    """Logits of vague and confident predictions, with four likeliest classes, and equal ones."""
    logits = torch.randn(6, classes)
    if kind == "near tie":
        logits[:, :4] = 5 + 1e-4 * torch.randn(6, 4)
    return {"vague": 1, "confident": 4, "near tie": 1, "uniform": 0}[kind] * logits


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["vague", "confident", "near tie", "uniform"])
def test_leading_directions_keep_what_eigenvectors_keep(kind, rank):
    logits = some_logits(kind)
    directions = leading_directions(logits, rank)
    torch.testing.assert_close(directions @ directions.mT, torch.eye(rank).expand(6, rank, rank))
    kept = root_product(logits, directions).square().sum()
    values = torch.linalg.eigvalsh(loss_hessian(logits, "classification"))
    best = values[:, -rank:].sum()
    assert 0.9995 * best < kept < best + 1e-12
    many = root_product(logits, leading_directions(logits, rank, steps=300)).square().sum()
    assert many > 0.9999 * best


@pytest.mark.parametrize("rank", [0, 1])
def test_random_columns_are_unbiased_in_value_and_derivative(rank, monkeypatch):
    """Exactly: the mean over all sign vectors, of the factors and of their derivative."""
    classes = 4
    logits = torch.randn(3, classes, requires_grad=True)
    factors, cotangent = torch.randn(3, classes, 5), torch.randn(5, 5)
    hessian = LossHessian(True, rank, 1)
    total, gradient = torch.zeros(5, 5), torch.zeros_like(logits)
    every = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * classes)
    for signs in every:
        monkeypatch.setattr(
            loss_hessian_module, "fresh_signs", lambda n, *_, z=signs: z.expand(n, 1, -1)
        )
        columns, weights = hessian.columns(logits)
        assert len(columns) == rank + 1
        matrix = hessian_of(columns, weights, factors)
        total += matrix.detach() / len(every)
        gradient += torch.autograd.grad(matrix, logits, cotangent)[0] / len(every)
    expected = twin(logits, factors)
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits, cotangent)[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_hybrid_factors_of_a_network_are_unbiased(rank, monkeypatch):
    """The same of Kronecker factors and of their gradient in hyperparameters."""
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4))
    model = li.InvariantModel(net, li.AffinePoints(init=0.3), 3, generator=torch.Generator())
    eta, x, y = model.augmentation.eta, torch.randn(6, 2), torch.randint(4, (6,))

    def found(**options):
        model.generator.manual_seed(1)
        _, kron = AugmentedGGN(model, "classification", **options).kron(x, y, N=6)
        factors = [f for fs in kron.kfacs for f in fs]
        (gradient,) = torch.autograd.grad(factors, eta, cotangents[: len(factors)])
        return [*(f.detach() for f in factors), gradient]

    sizes = (5, 2, 5, 4, 5, 4)
    cotangents = [torch.randn(d, d) for d in sizes]
    every = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 4)
    totals = None
    for signs in every:
        monkeypatch.setattr(
            loss_hessian_module, "fresh_signs", lambda n, *_, z=signs: z.expand(n, 1, -1)
        )
        results = found(stochastic=True, output_rank=rank or None)
        totals = results if totals is None else list(map(torch.add, totals, results))
    torch.testing.assert_close([total / len(every) for total in totals], found())


def test_hybrid_has_less_variance_than_signs_alone():
    logits = 4 * torch.randn(1, 9)
    expected = loss_hessian(logits, "classification")[0]

    def spread(hessian):
        errors = [hessian_of(*hessian.columns(logits)) - expected for _ in range(200)]
        return torch.stack(errors).square().mean()

    assert spread(LossHessian(True, 2, 1)) < 0.2 * spread(LossHessian(True, 0, 3))


@pytest.mark.parametrize(
    "hessian",
    [
        LossHessian(True, 0, 0),
        LossHessian(True, 3, 0),
        LossHessian(True, 0, 3),
        LossHessian(True, 2, 1),
        LossHessian(True, 5, 5),
    ],
    ids=str,
)
def test_as_many_columns_as_it_takes_are_exact(hessian):
    logits = torch.randn(5, 4)
    assert hessian.n_columns(4) == 3
    columns, weights = hessian.columns(logits)
    assert len(columns) == 3
    expected = loss_hessian(logits, "classification").sum(0)
    torch.testing.assert_close(hessian_of(columns, weights), expected)


def test_two_classes_with_one_sample_have_no_variance():
    net = nn.Linear(3, 2)
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    _, matrix = AugmentedGGN(net, "classification", stochastic=True).full(x, y)
    torch.testing.assert_close(matrix, ggn(net, net(x), "classification").detach())


def test_regression_is_exact_with_as_many_samples_as_outputs():
    net = nn.Linear(3, 4)
    x, y = torch.randn(5, 3), torch.randn(5, 4)
    expected = ggn(net, net(x), "regression").detach()
    _, exact = AugmentedGGN(net, "regression", stochastic=True, num_samples=4).full(x, y)
    torch.testing.assert_close(exact, expected)
    _, sampled = AugmentedGGN(net, "regression", stochastic=True, num_samples=3).full(x, y)
    assert relative_error(sampled, expected) > 1e-3
    assert len(unit_directions(net(x))) == 4


def test_signs_belong_to_inputs_and_are_taped():
    logits, hessian, tape = torch.randn(5, 4), LossHessian(True, 1, 1), []
    with recording(tape):
        first, _ = hessian.columns(logits)
    (signs,) = tape
    assert signs.shape == (5, 1, 4)
    assert set(signs.flatten().tolist()) == {-1.0, 1.0}
    with replaying(tape):
        again, _ = hessian.columns(logits)
    torch.testing.assert_close(first, again)
    assert fresh_signs(2, 3, 5, logits).shape == (2, 3, 5)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_diag_and_full_have_the_gradient_of_the_dense_matrix(structure):
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4))
    model = li.InvariantModel(net, li.AffinePoints(init=0.3), 3, generator=torch.Generator())
    eta, x, y = model.augmentation.eta, torch.randn(5, 2), torch.randint(4, (5,))
    model.generator.manual_seed(1)
    _, actual = getattr(AugmentedGGN(model, "classification"), structure)(x, y)
    model.generator.manual_seed(1)
    with li.hyper.differentiable():
        outputs = model(x)
    jacobian, dense = parameter_jacobian(model, outputs), loss_hessian(outputs, "classification")
    expected = torch.einsum("bcp,bcd,bdq->pq", jacobian, dense, jacobian)
    if structure == "diag":
        expected = expected.diagonal()
    torch.testing.assert_close(actual, expected.detach())
    cotangent = torch.randn_like(expected)
    gradients = [torch.autograd.grad(m, eta, cotangent)[0] for m in (actual, expected)]
    torch.testing.assert_close(*gradients)
