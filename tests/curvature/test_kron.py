"""The matrices: equal to their dense twins, gradients included."""

import pytest
import torch
from laplace.utils.matrix import Kron, KronDecomposed
from torch import nn
from twins import central_differences, product, relative_error

import laplace_invariance as li
from laplace_invariance.curvature import (
    AugmentedGGN,
    DifferentiableKron,
    DifferentiableKronDecomposed,
    eigen,
    kfac,
)


def positive(n, rank=None):
    root = torch.randn(n, rank or n + 1)
    return root @ root.mT


def blocks(q, n):
    return torch.stack([positive(n) for _ in range(q)])


def factors():
    """A matrix, a dense and a diagonal block; blocks on the right, on the left, in pairs.

    Then diagonals on the left and on the right.
    """
    plain = [[positive(3), positive(5)], [positive(2)], [torch.rand(4)]]
    return [
        *plain,
        [positive(3), blocks(2, 5)],
        [blocks(3, 2), positive(4)],
        [blocks(4, 3), blocks(4, 2)],
        [torch.rand(3), positive(2)],
        [positive(2), torch.rand(5)],
    ]


DELTAS, SCALE = [0.5, 0.7, 0.3, 0.4, 0.6, 0.8, 0.2, 0.9], 1.7


def dense(kfacs, deltas, scale):
    matrices = []
    for fs, delta in zip(kfacs, deltas, strict=True):
        if len(fs) == 2 and fs[0].ndim == fs[1].ndim == 3:  # the parameter is [o, q, i]
            (q, o, _), i = fs[0].shape, fs[1].shape[1]
            matrix = torch.einsum("qab,qij,qr->aqibrj", *fs, torch.eye(q)).reshape(
                o * q * i, o * q * i
            )
        else:
            matrix = product(fs)
        matrices.append(scale * matrix + delta * torch.eye(len(matrix)))
    return torch.block_diag(*matrices)


@pytest.fixture
def setting():
    kfacs, deltas, scale = factors(), torch.tensor(DELTAS), torch.tensor(SCALE)
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


def test_factors_themselves_equal_the_dense_matrix():
    kron = DifferentiableKron(factors())
    matrix = dense(kron.kfacs, [0.0] * len(kron), 1.0)
    W = torch.randn(2, 3, len(matrix))
    torch.testing.assert_close(kron.to_matrix(), matrix)
    torch.testing.assert_close(kron.diag(), matrix.diagonal())
    torch.testing.assert_close(kron.bmm(W), W @ matrix)
    torch.testing.assert_close(kron.logdet(), matrix.logdet())
    torch.testing.assert_close((3.0 * kron).to_matrix(), 3 * matrix)
    torch.testing.assert_close(
        (kron + kron).decompose().to_matrix()[:15, :15], 4 * matrix[:15, :15]
    )


def test_agrees_with_stock_where_that_is_right():
    kfacs, deltas = factors()[:2], torch.tensor([0.5, 0.7])
    ours = DifferentiableKron(kfacs).decompose() * 2.0 + deltas
    stock = Kron(kfacs).decompose() * 2.0 + deltas
    W = torch.randn(2, 3, 17)
    torch.testing.assert_close(ours.logdet(), stock.logdet())
    torch.testing.assert_close(ours.bmm(W, -0.5), stock.bmm(W, -0.5))
    torch.testing.assert_close(ours.diag(-1), stock.diag(-1))
    for mine, theirs in zip(
        ours.eigenvalues, stock.eigenvalues, strict=True
    ):  # the scale is split differently
        torch.testing.assert_close(
            torch.outer(*mine) if len(mine) == 2 else mine[0],
            torch.outer(*theirs) if len(theirs) == 2 else theirs[0],
        )


def test_gradients_equal_those_of_the_dense_matrix():
    kfacs = [[f.requires_grad_() for f in fs] for fs in factors()]
    deltas, scale = (
        torch.tensor(DELTAS, requires_grad=True),
        torch.tensor(SCALE, requires_grad=True),
    )
    inputs = [deltas, scale, *(f for fs in kfacs for f in fs)]
    ours = torch.autograd.grad(
        (DifferentiableKron(kfacs).decompose() * scale + deltas).logdet(), inputs
    )
    twin = torch.autograd.grad(dense(kfacs, deltas, scale).logdet(), inputs)
    for mine, wanted in zip(ours, twin, strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("kind", ["repeated", "zero", "rank deficient"])
def test_gradient_is_finite_where_eigenvectors_have_none(kind):
    factor = {
        "repeated": 2 * torch.eye(4),
        "zero": torch.zeros(4, 4),
        "rank deficient": positive(4, 2),
    }[kind]
    factor = factor.requires_grad_()
    other = positive(3)

    def logdet():
        return (DifferentiableKron([[factor, other]]).decompose() + torch.tensor([0.5])).logdet()

    (gradient,) = torch.autograd.grad(logdet(), factor)
    twin = torch.autograd.grad((torch.kron(factor, other) + 0.5 * torch.eye(12)).logdet(), factor)[
        0
    ]
    torch.testing.assert_close(gradient, twin)
    assert torch.isfinite(gradient).all()


def test_can_be_walked_back_repeatedly():
    factor = positive(3).requires_grad_()
    summed = DifferentiableKron([[factor, positive(2)]]) + DifferentiableKron(
        [[positive(3), positive(2)]]
    )
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
    torch.testing.assert_close(
        (3.0 * DifferentiableKron(kfacs)).to_matrix(), 3 * DifferentiableKron(kfacs).to_matrix()
    )


def test_bad_input_is_refused():
    kron = DifferentiableKron(factors())
    with pytest.raises(ValueError, match="can only add Kron"):
        kron + 1.0
    with pytest.raises(ValueError, match="8 and of 2 parameters"):
        kron + DifferentiableKron(factors()[:2])
    with pytest.raises(ValueError, match="scalar"):
        kron.decompose() * torch.ones(2)
    with pytest.raises(ValueError, match="delta"):
        kron.decompose() + torch.ones(2)
    with pytest.raises(torch.linalg.LinAlgError, match="not finite"):
        DifferentiableKron([[torch.full((2, 2), float("nan"))]]).decompose()


def counting(monkeypatch, name):
    """Sizes ``[n, d]`` of what a function of torch.linalg decomposes, as it is called."""
    calls, plain = [], getattr(torch.linalg, name)

    def counted(matrices):
        calls.append(matrices.shape[:-1])
        return plain(matrices)

    monkeypatch.setattr(torch.linalg, name, counted)
    return calls


def test_equal_factors_are_decomposed_once_and_those_of_a_size_together(monkeypatch):
    calls = counting(monkeypatch, "eigh")
    twin, large = positive(3), positive(6)
    kfacs = [[twin, large], [twin.clone()], [positive(3), positive(6)], [positive(3)]]
    monkeypatch.setattr(eigen, "STACKED_SIZE", 5)
    values, vectors = zip(*eigen.decompose([f for fs in kfacs for f in fs]), strict=True)
    assert sorted(calls) == [(1, 6), (1, 6), (3, 3)]
    assert torch.equal(values[0], values[2])
    for factor, value, vector in zip(sum(kfacs, []), values, vectors, strict=True):  # noqa: RUF017
        torch.testing.assert_close(vector @ value.diag() @ vector.mT, factor)


def test_a_sum_that_overflows_is_not_taken_for_infinite_entries():
    factor = 2e38 * torch.eye(2).float()
    ((values, _),) = eigen.decompose([factor])
    assert values.isfinite().all()


def test_eigenvectors_are_found_when_they_are_asked_for(monkeypatch):
    calls = counting(monkeypatch, "eigh")
    kfacs, deltas = factors(), torch.tensor(DELTAS, requires_grad=True)
    decomposed = DifferentiableKron(kfacs).decompose() * 2.0 + deltas
    decomposed.logdet().backward()
    expected = dense(kfacs, deltas.detach(), 2.0)
    torch.testing.assert_close(decomposed.logdet(), expected.logdet())
    assert not calls
    shifted = decomposed + deltas.detach()
    torch.testing.assert_close(decomposed.to_matrix(), expected)
    n = len(calls)
    assert n > 0
    torch.testing.assert_close(shifted.diag(), dense(kfacs, 2 * deltas.detach(), 2.0).diagonal())
    assert len(calls) == n
    kfacs[0][0].requires_grad_()
    DifferentiableKron(kfacs).decompose()
    assert len(calls) == 2 * n


def test_cotangents_of_the_log_determinant_need_not_be_symmetrised(monkeypatch):
    """They arrive marked at every batch, through the sum over batches."""
    net = nn.Sequential(nn.Conv2d(4, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    model = li.InvariantModel(net, li.AffineImage(init=0.1), 2)
    x, y, total = torch.randn(4, 4, 3, 3), torch.randint(3, (4,)), None
    for _ in range(3):
        _, kron = AugmentedGGN(model, "classification").kron(x, y, N=4)
        total = kron if total is None else total + kron
    seen, plain = [], kfac.symmetrised

    def watched(cotangent):
        seen.append(plain(cotangent) is cotangent)
        return plain(cotangent)

    monkeypatch.setattr(kfac, "symmetrised", watched)
    (total.decompose() + torch.tensor([0.5])).logdet().backward()
    assert len(seen) == 3 * 6  # four factors and two biases of three batches
    assert all(seen)
    assert model.augmentation.eta.grad.abs().max() > 0
