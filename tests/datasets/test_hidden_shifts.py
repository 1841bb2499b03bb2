"""Vectors with a hidden symmetry: shifts, their invariants, pairs and orbits."""

import pytest
import torch
import torch.nn.functional as F

from laplace_invariance.datasets import HiddenShifts
from laplace_invariance.datasets.synthetic import PAIR_TASKS


def test_shift_is_that_of_the_paper():
    x = torch.tensor([[1.0, 2, 3, 4, 5]])
    assert HiddenShifts(5).shifted(x, torch.tensor([[2]])).tolist() == [[4, 5, 1, 2, 3]]


def test_parts_are_shifted_each_for_itself():
    x = torch.tensor([[1.0, 2, 3, 4, 5, 6]])
    assert HiddenShifts(6, 2).shifted(x, torch.tensor([[1, 2]])).tolist() == [[3, 1, 2, 5, 6, 4]]


def test_entries_move_along_the_cycle():
    order = torch.tensor([2, 0, 3, 1])
    x = torch.tensor([[10.0, 11, 12, 13]])
    moved = HiddenShifts(4, order=order).shifted(x, torch.tensor([[1]]))
    for here, there in zip(order.tolist(), order.roll(-1).tolist(), strict=True):
        assert moved[0, there] == x[0, here]


@pytest.mark.parametrize("task", PAIR_TASKS)
def test_invariants_stay_and_tell_vectors_apart(task):
    symmetry = HiddenShifts.for_task(task, 6, torch.Generator().manual_seed(1))
    x = torch.randn(40, 6)
    transformed = symmetry.transformed(x)
    assert (transformed - x).abs().amax(1).count_nonzero() > 20
    torch.testing.assert_close(symmetry.invariants(transformed), symmetry.invariants(x))
    assert F.pdist(symmetry.invariants(x)).min() > 1e-3


def test_order_of_the_permutation_matters():
    symmetry = HiddenShifts.for_task("permutation", 6, torch.Generator().manual_seed(1))
    x = torch.randn(40, 6)
    assert (
        symmetry.invariants(HiddenShifts(6).transformed(x)) - symmetry.invariants(x)
    ).abs().mean() > 0.1


@pytest.mark.parametrize("order", [None, torch.tensor([4, 2, 0, 1, 5, 3])])
def test_two_vectors_of_one_part_are_not_the_same(order):
    symmetry = HiddenShifts(6, 2, order)
    x, other, distance = symmetry.pairs(2000)
    halves = (symmetry.invariants(x) - symmetry.invariants(other)).unflatten(1, (2, 3)).norm(
        dim=2
    ) < 1e-9
    shares = [(halves.sum(1) == k).double().mean().item() for k in (0, 1, 2)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.05)
    assert torch.equal(distance < 1e-9, halves.all(1))
    assert x.abs().max() <= 1
    assert x.std().item() == pytest.approx(3**-0.5, abs=0.02)


def test_factors_are_between_a_half_and_two():
    x = torch.ones(3000, 4)
    factors = HiddenShifts.for_task("scaled-shift", 4).transformed(x)[:, 0]
    assert factors.log2().min().item() == pytest.approx(-1, abs=0.01)
    assert factors.log2().max().item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("task", "n"), [("shift", 6), ("two-part", 9), ("permutation", 6), ("scaled-shift", 6)]
)
def test_orbit_is_all_of_it(task, n):
    symmetry = HiddenShifts.for_task(task, 6, torch.Generator().manual_seed(1))
    x = torch.randn(6)
    orbit = symmetry.orbit(x)
    assert orbit.shape == (n, 6)
    assert len(orbit.round(decimals=9).unique(dim=0)) == n
    invariants = symmetry.invariants(orbit)
    torch.testing.assert_close(invariants, symmetry.invariants(x[None]).expand_as(invariants))


def test_draws_repeat_with_a_generator():
    state = torch.get_rng_state()
    drawn = [HiddenShifts(6, 3).pairs(5, torch.Generator().manual_seed(2)) for _ in range(2)]
    torch.testing.assert_close(drawn[0], drawn[1], rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: HiddenShifts(7, 2), "7 features, 2 parts"),
        (lambda: HiddenShifts(3, 3), "of two entries at least: 3 features, 3 parts"),
        (lambda: HiddenShifts(4, max_factor=0.5), "at least 1, got 0.5"),
        (
            lambda: HiddenShifts(3, order=torch.tensor([0, 1, 1])),
            r"permutation of 3 entries, got \[0, 1, 1\]",
        ),
        (
            lambda: HiddenShifts.for_task("turn", 4),
            "unknown task 'turn'; choose from dft, shift, two-part",
        ),
        (lambda: HiddenShifts(4).transformed(torch.zeros(2, 5)), r"\[n, 4\], got shape \[2, 5\]"),
        (lambda: HiddenShifts(4).invariants(torch.zeros(2, 4).long()), "of torch.int64"),
    ],
)
def test_data_refuse(call, match):
    with pytest.raises(ValueError, match=match):
        call()
