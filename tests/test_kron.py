"""The matrices: equal to their dense twins, gradients included."""

import pytest
import torch
from laplace.utils.matrix import Kron, KronDecomposed
from twins import central_differences, relative_error

from laplace_invariance.curvature import DifferentiableKron, DifferentiableKronDecomposed


def positive(n, rank=None):
    root = torch.randn(n, rank or n + 1)
    return root @ root.mT


def factors():
    """A matrix, a dense block and a diagonal block."""
    return [[positive(3), positive(5)], [positive(2)], [torch.rand(4)]]


def dense(kfacs, deltas, scale):
    blocks = []
    for fs, delta in zip(kfacs, deltas, strict=True):
        block = fs[0].diag() if fs[0].ndim == 1 else fs[0]
        block = torch.kron(block, fs[1]) if len(fs) == 2 else block
        blocks.append(scale * block + delta * torch.eye(len(block)))
    return torch.block_diag(*blocks)


@pytest.fixture
def setting():
    kfacs, deltas, scale = factors(), torch.tensor([0.5, 0.7, 0.3]), torch.tensor(1.7)
    decomposed = DifferentiableKron(kfacs).decompose() * scale + deltas
    return decomposed, dense(kfacs, deltas, scale)


def test_equals_the_dense_matrix_in_all_it_offers(setting):
    decomposed, matrix = setting
    W = torch.randn(2, 3, len(matrix))
    torch.testing.assert_close(decomposed.to_matrix(), matrix)
    torch.testing.assert_close(decomposed.logdet(), matrix.logdet())
    torch.testing.assert_close(decomposed.diag(), matrix.diagonal())
    inverse = torch.linalg.inv(matrix)
    torch.testing.assert_close(decomposed.diag(-1), inverse.diagonal())
    torch.testing.assert_close(decomposed.bmm(W, -1), W @ inverse)
    torch.testing.assert_close(decomposed.bmm(W[0], 1), W[0] @ matrix)
    torch.testing.assert_close(decomposed.bmm(W[0, 0], 1), W[0, 0] @ matrix)
    torch.testing.assert_close(decomposed.inv_square_form(W), W @ inverse @ W.mT)
    root = decomposed.to_matrix(-0.5)
    torch.testing.assert_close(root @ root, inverse)


def test_agrees_with_stock_where_that_is_right():
    kfacs, deltas = factors()[:2], torch.tensor([0.5, 0.7])
    ours = DifferentiableKron(kfacs).decompose() * 2.0 + deltas
    stock = Kron(kfacs).decompose() * 2.0 + deltas
    W = torch.randn(2, 3, 17)
    torch.testing.assert_close(ours.logdet(), stock.logdet())
    torch.testing.assert_close(ours.bmm(W, -0.5), stock.bmm(W, -0.5))
    torch.testing.assert_close(ours.diag(-1), stock.diag(-1))
    for mine, theirs in zip(ours.eigenvalues, stock.eigenvalues, strict=True):  # the scale is split differently
        torch.testing.assert_close(
            torch.outer(*mine) if len(mine) == 2 else mine[0], torch.outer(*theirs) if len(theirs) == 2 else theirs[0]
        )


def test_gradients_equal_those_of_the_dense_matrix():
    kfacs = [[f.requires_grad_() for f in fs] for fs in factors()]
    deltas, scale = torch.tensor([0.5, 0.7, 0.3], requires_grad=True), torch.tensor(1.7, requires_grad=True)
    inputs = [deltas, scale, *(f for fs in kfacs for f in fs)]
    ours = torch.autograd.grad((DifferentiableKron(kfacs).decompose() * scale + deltas).logdet(), inputs)
    twin = torch.autograd.grad(dense(kfacs, deltas, scale).logdet(), inputs)
    for mine, wanted in zip(ours, twin, strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("kind", ["repeated", "zero", "rank deficient"])
def test_gradient_is_finite_where_eigenvectors_have_none(kind):
    factor = {"repeated": 2 * torch.eye(4), "zero": torch.zeros(4, 4), "rank deficient": positive(4, 2)}[kind]
    factor = factor.requires_grad_()
    other = positive(3)

    def logdet():
        return (DifferentiableKron([[factor, other]]).decompose() + torch.tensor([0.5])).logdet()

    (gradient,) = torch.autograd.grad(logdet(), factor)
    twin = torch.autograd.grad((torch.kron(factor, other) + 0.5 * torch.eye(12)).logdet(), factor)[0]
    torch.testing.assert_close(gradient, twin)
    assert torch.isfinite(gradient).all()


def test_can_be_walked_back_repeatedly():
    factor = positive(3).requires_grad_()
    summed = DifferentiableKron([[factor, positive(2)]]) + DifferentiableKron([[positive(3), positive(2)]])
    decomposed = summed.decompose()
    gradients = []
    for _ in range(3):
        factor.grad = None
        (decomposed * torch.tensor(2.0) + torch.tensor([0.5])).logdet().backward()
        gradients.append(factor.grad)
    assert torch.equal(gradients[0], gradients[2])


def test_scale_gradient_is_right_where_stock_loses_it():
    kfacs = factors()[:2]
    scale = torch.tensor(1.7, requires_grad=True)

    def logdet(kron, s):
        return (kron.decompose() * s + torch.tensor([0.5, 0.7])).logdet()

    (gradient,) = torch.autograd.grad(logdet(DifferentiableKron(kfacs), scale), scale)
    expected = central_differences(lambda: logdet(DifferentiableKron(kfacs), scale), scale)
    assert relative_error(gradient, expected) < 1e-8
    assert not logdet(Kron(kfacs), scale).requires_grad


def test_stock_sum_becomes_ours():
    model = torch.nn.Linear(5, 3)
    total = Kron.init_from_model(model, torch.device("cpu"), torch.get_default_dtype())
    batch = DifferentiableKron([[positive(3), positive(5)], [positive(3)]])
    total += batch
    total += batch
    assert type(total) is DifferentiableKron
    torch.testing.assert_close(total.kfacs[0][1], 2 * batch.kfacs[0][1])
    assert type(total.decompose()) is DifferentiableKronDecomposed
    assert isinstance(total.decompose(), KronDecomposed)


def test_other_structure_replaces_zeros_but_nothing_else():
    model = torch.nn.Linear(5, 3)
    zeros = Kron.init_from_model(model, torch.device("cpu"), torch.get_default_dtype())
    batch = DifferentiableKron([[torch.rand(15)], [torch.rand(3)]])
    torch.testing.assert_close((zeros + batch).kfacs[0][0], batch.kfacs[0][0])
    zeros.kfacs[0][0] += 1
    with pytest.raises(ValueError, match="cannot add Kronecker factors"):
        zeros + batch


def test_multiplication_distributes_over_factors():
    kfacs = factors()[:2]
    torch.testing.assert_close((3.0 * DifferentiableKron(kfacs)).to_matrix(), 3 * DifferentiableKron(kfacs).to_matrix())


def test_bad_input_is_refused():
    kron = DifferentiableKron(factors())
    with pytest.raises(ValueError, match="can only add Kron"):
        kron + 1.0
    with pytest.raises(ValueError, match="3 and of 2 parameters"):
        kron + DifferentiableKron(factors()[:2])
    with pytest.raises(ValueError, match="scalar"):
        kron.decompose() * torch.ones(2)
    with pytest.raises(ValueError, match="delta"):
        kron.decompose() + torch.ones(2)
    with pytest.raises(NotImplementedError, match="damping"):
        kron.decompose(damping=True)
    with pytest.raises(torch.linalg.LinAlgError, match="not finite"):
        DifferentiableKron([[torch.full((2, 2), float("nan"))]]).decompose()
