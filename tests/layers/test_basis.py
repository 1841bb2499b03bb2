"""The basis of sparse layers equals its formula, and is computed when it must be."""

import itertools
import math

import pytest
import torch
from builders import twin_basis

from laplace_invariance.hyper import differentiable
from laplace_invariance.layers import (
    SparseConv2d,
)
from laplace_invariance.layers.basis import (
    Basis,
    basis_derivative,
    basis_matrix,
    grid_points,
    spread,
)

KINDS = ("regression", "exponential")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("anchors", ["grid", "random", "learnt"])
def test_basis_equals_the_formula(kind, anchors):
    basis = Basis((3, 5), kind, anchors=anchors, omega=0.7)
    assert basis.matrix().shape == (8, 15)
    expected = twin_basis(kind, 0.7, basis.anchors.tolist(), 3, 5)
    torch.testing.assert_close(basis.matrix(), expected)


@pytest.mark.parametrize("anchors", ["grid", "random"])
def test_regression_interpolates_at_anchors(anchors):
    basis = Basis((4, 5), anchors=anchors, omega=1.3)
    at = (basis.anchors.unsqueeze(1) == grid_points(4, 5)).all(-1)  # [M, T], one per anchor
    assert (at.sum(1) == 1).all()
    values = basis.matrix() @ at.double().T
    assert 0 < (values - torch.eye(10)).abs().max() < 5e-3
    exponential = Basis((4, 5), "exponential", anchors=anchors, omega=1.3).matrix() @ at.double().T
    assert (exponential - torch.eye(10)).abs().max() > 0.1


def test_a_basis_of_all_points_is_all_functions():
    basis = Basis((3, 2), n_anchors=6, omega=2.0)
    inverse = spread(3, 2).argsort()
    torch.testing.assert_close(basis.matrix()[inverse], torch.eye(6), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (3, 3), (3, 5), (4, 4), (5, 6), (1, 7), (32, 32)]
)
def test_half_of_the_points_are_a_chessboard(height, width):
    order = spread(height, width)
    assert sorted(order.tolist()) == list(range(height * width))
    basis = Basis((height, width))
    assert basis.n_anchors == math.ceil(height * width / 2)
    chosen = order[: basis.n_anchors]
    assert len({(int(i) // width + int(i) % width) % 2 for i in chosen}) == 1


def test_few_anchors_are_spread():
    chosen = [divmod(int(i), 8) for i in spread(8, 8)[:4]]
    assert min(math.dist(a, b) for a, b in itertools.combinations(chosen, 2)) == 4
    assert Basis((5, 5), n_anchors=1).anchors.tolist() == [[0.0, 0.0]]


def test_random_anchors_are_distinct_and_come_from_the_generator():
    first, again, other = (
        Basis((4, 4), anchors="random", generator=torch.Generator().manual_seed(s))
        for s in (1, 1, 2)
    )
    assert torch.equal(first.anchors, again.anchors)
    assert not torch.equal(first.anchors, other.anchors)
    assert len({tuple(z) for z in first.anchors.tolist()}) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_derivative_equals_autograd_and_differences(kind):
    omega, z, t = torch.tensor([0.8]), torch.randn(4, 2), grid_points(2, 3)
    _, tangent = torch.func.jvp(lambda w: basis_matrix(kind, w, z, t), (omega,), (torch.ones(1),))
    torch.testing.assert_close(basis_derivative(kind, omega, z, t), tangent)
    above, below = (basis_matrix(kind, omega + step, z, t) for step in (1e-5, -1e-5))
    torch.testing.assert_close(tangent, (above - below) / 2e-5, rtol=1e-5, atol=1e-6)


def test_the_sign_of_omega_means_nothing():
    layer = SparseConv2d(1, 2, 3, learn_omega="hyperparameter")
    expected = layer.matrix()
    with torch.no_grad():
        layer.omega.neg_()
        torch.testing.assert_close(layer.matrix(), expected)
        layer.project_()
    assert layer.omega == 1


@pytest.fixture
def solves(monkeypatch):
    """Counts the linear systems that were solved."""
    count = []
    solve = torch.linalg.solve_ex
    monkeypatch.setattr(torch.linalg, "solve_ex", lambda *args: (count.append(1), solve(*args))[1])
    return count


@pytest.mark.parametrize("learn_omega", ["fixed", "hyperparameter"])
def test_the_matrix_is_kept_until_something_changes(learn_omega, solves):
    layer, x = (
        SparseConv2d(1, 2, 3, learn_omega=learn_omega, anchors="learnt"),
        torch.randn(2, 1, 5, 5),
    )

    def solved():
        solves.clear()
        for _ in range(3):
            layer(x).sum().backward()
        expected = twin_basis("regression", layer.omega.item(), layer.anchors.tolist(), 3, 3)
        torch.testing.assert_close(layer.matrix(), expected.to(layer.weight), rtol=1e-5, atol=1e-5)
        return len(solves)

    layer(x)
    assert solved() == 0
    with torch.no_grad():
        layer.omega.mul_(1.5)
    assert solved() == 1
    layer.omega.data.mul_(1.5)  # which version counters do not see
    assert solved() == 1
    layer.omega.data = torch.tensor([0.7])
    assert solved() == 1
    with torch.no_grad():
        layer.anchors[0, 0] += 0.5
    assert solved() == 1
    layer.load_state_dict(SparseConv2d(1, 2, 3, omega=0.6).state_dict())
    assert solved() == 1
    layer.float()
    x = x.float()
    assert solved() == 1
    assert layer.matrix().dtype == torch.float32
    layer.double()
    x = x.double()
    assert solved() == 1
    assert layer.matrix().dtype == torch.float64


def test_the_matrix_of_a_weight_is_computed_once_per_pass(solves):
    layer, x = SparseConv2d(1, 2, 3, learn_omega="weight"), torch.randn(2, 1, 5, 5)
    solves.clear()
    for passes in (1, 2, 3):
        layer(x)
        assert len(solves) == passes
    solves.clear()
    with torch.no_grad():
        layer(x)
        layer(x)
    assert len(solves) == 0  # kept from initialisation
    with differentiable():
        layer(x)
    assert len(solves) == 1


def test_a_matrix_kept_in_inference_mode_can_be_trained_with():
    layer, x = SparseConv2d(1, 2, 3), torch.randn(2, 1, 5, 5)
    layer.omega.fill_(2.0)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
