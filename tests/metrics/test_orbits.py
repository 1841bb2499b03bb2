"""Orbits have every element but the identity."""

import math

import pytest
import torch
from builders import images, quarter_turned, small_cnn

import laplace_invariance as li
from laplace_invariance.layers.symmetry import Group
from laplace_invariance.metrics import (
    InvarianceError,
    logit_invariance,
)
from laplace_invariance.metrics.orbits import Orbit

ROTATIONS = {"init": {"rotation": math.pi}, "draws": "sobol"}


@pytest.mark.parametrize("group", ["p4", li.FiniteGroup("quarter_turns")], ids=["p4", "finite"])
def test_random_elements_are_even_and_never_the_identity(group):
    x = images(600)
    moved = Orbit(group).random(x, 2)
    assert moved.shape == (600, 2, 2, 5, 5)
    hits = torch.stack([(moved == y.unsqueeze(1)).flatten(2).all(-1) for y in quarter_turned(x)])
    assert (hits.sum(0) == 1).all()
    assert (hits.double().mean((1, 2)) - 1 / 3).abs().max() < 0.05


@pytest.mark.parametrize("n_samples", [1, 2, 3, 8])
def test_the_identity_is_not_on_an_orbit_of_draws(n_samples):
    x, rotations = images(), li.AffineImage(**ROTATIONS)
    moved = Orbit(rotations, n_samples).all(x)
    assert moved.shape[1] == n_samples + n_samples % 2
    assert (moved - x.unsqueeze(1)).flatten(2).norm(dim=-1).min() > 0.1
    assert logit_invariance(small_cnn(), x, rotations, n_samples=n_samples) > 0.1


def test_groups_that_move_nothing_are_refused():
    with pytest.raises(ValueError, match="transforms nothing"):
        Orbit(Group("hue", [[0, 1, 2], [1, 2, 0], [2, 0, 1]]))
    with pytest.raises(ValueError, match="draws of a grid are always the same"):
        InvarianceError(li.AffineImage(init={"rotation": math.pi}, learn="rotation", draws="grid"))
