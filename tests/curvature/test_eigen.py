"""Decompositions that are made anew only where factors changed enough."""

import pytest
import torch

from laplace_invariance.curvature.eigen import Decompositions, decompose


def factors():
    roots = [torch.randn(7, 5), torch.randn(3, 7, 4), torch.randn(2, 3)]
    return [*(root.mT @ root for root in roots), torch.rand(6)]


def rebuilt(pair):
    values, vectors = pair
    if vectors is None:
        return values
    return (vectors * values.unsqueeze(-2)) @ vectors.mT


def test_multiples_are_not_decomposed_again():
    first = factors()
    known = Decompositions(0.1)
    known.decompose(first)
    for scale in (0.3, 2.0):
        found = known.decompose([scale * factor for factor in first])
        for pair, factor in zip(found, first, strict=True):
            torch.testing.assert_close(rebuilt(pair), scale * factor)
    assert (known.n_made, known.n_reused) == (4, 8)


def test_what_changed_enough_is_decomposed_and_the_rest_is_near():
    first = factors()
    known = Decompositions(0.1)
    known.decompose(first)
    changed = [factor.clone() for factor in first]
    changed[0] += torch.eye(5) * changed[0].norm()
    changed[1] += 0.01 * changed[1].norm() * torch.eye(4)
    found = known.decompose(changed)
    assert (known.n_made, known.n_reused) == (5, 3)
    torch.testing.assert_close(rebuilt(found[0]), changed[0])
    assert 0 < (rebuilt(found[1]) - changed[1]).norm() <= 0.1 * changed[1].norm()


def test_differences_do_not_add_up():
    """Small steps away from what was decomposed are noticed when they sum up."""
    factor, direction = torch.eye(5), torch.diag(torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0]))
    known = Decompositions(0.1)
    for step in range(10):
        (found,) = known.decompose([factor + 0.03 * step * direction])
        error = (rebuilt(found) - factor - 0.03 * step * direction).norm()
        assert error <= 0.11 * factor.norm()
    assert 1 < known.n_made < 5


def test_a_state_goes_on_as_it_would_have():
    first = factors()
    known, other = Decompositions(0.1), Decompositions(0.1)
    known.decompose(first)
    other.load_state_dict(known.state_dict())
    later = [1.7 * factor + 0.01 * torch.ones_like(factor) for factor in first]
    for ours, theirs in zip(known.decompose(later), other.decompose(later), strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert ours[1] is theirs[1] is None or torch.equal(ours[1], theirs[1])


def test_factors_that_are_not_finite_are_refused():
    known = Decompositions(0.1)
    known.decompose([torch.eye(3)])
    with pytest.raises(torch.linalg.LinAlgError, match="not finite"):
        known.decompose([torch.full((3, 3), torch.nan)])


def test_without_tolerance_everything_is_decomposed():
    first, second = factors(), factors()
    known = Decompositions(0.0)
    known.decompose(first)
    for ours, theirs in zip(known.decompose(second), decompose(second), strict=True):
        torch.testing.assert_close(ours[0], theirs[0])
