"""What a search may open of each augmentation: sets of ranges, widths, limits."""

import math

import pytest
import torch

from laplace_invariance import (
    AffineImage,
    AffinePoints,
    Augmentation,
    Colour,
    Compose,
    FiniteGroup,
    Sequence,
)


class Blur(Augmentation):
    """One of a user's own, which knows nothing of searches."""

    def __init__(self):
        super().__init__()
        self.register_hyperparameter("width", torch.zeros(2))


AUGMENTATIONS = {
    "image": AffineImage,
    "points": AffinePoints,
    "points in 3-D": lambda: AffinePoints(3),
    "one range": lambda: AffineImage(learn="rotation"),
    "correlated": lambda: AffineImage(init=0.3, correlated=True),
    "softplus": lambda: AffineImage(constraint="softplus"),
    "tanh": lambda: AffineImage(constraint="tanh"),
    "colour": Colour,
    "signal": Sequence,
    "circular": lambda: Sequence(padding="circular"),
    "finite": FiniteGroup,
    "composed": lambda: Compose(Colour(), AffineImage()),
    "twice": lambda: Compose(AffineImage(), AffineImage(learn="rotation")),
    "own": Blur,
}


@pytest.mark.parametrize("make", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_every_opening_can_be_opened_and_closed(make):
    augmentation = make()
    openings = augmentation.openings()
    assert openings
    for names, widths in openings.items():
        for width in widths:
            augmentation.open_(dict.fromkeys(names, width))
            if isinstance(augmentation, FiniteGroup):
                found = dict(zip(augmentation.names[1:], augmentation.eta.tolist(), strict=True))
            else:
                found = augmentation.magnitudes()
            for name, value in found.items():
                expected = width if name in names else 0.0
                assert value == pytest.approx(expected, abs=2e-3), name
            assert all(width <= augmentation.largest(name) for name in names)
    augmentation.open_({})
    closed = augmentation.magnitudes()
    assert max(closed[name] for names in openings for name in names) < 2e-3


def test_ranges_of_all_axes_open_together():
    assert set(AffineImage().openings()) == {
        ("x_translation", "y_translation"),
        ("rotation",),
        ("x_scale", "y_scale"),
        ("shear",),
    }
    assert set(AffineImage(learn=("rotation", "x_scale")).openings()) == {
        ("rotation",),
        ("x_scale",),
    }
    rotations = ("x_rotation", "y_rotation", "z_rotation")
    assert rotations in AffinePoints(3).openings()


def test_a_constraint_is_a_limit():
    bounded = AffineImage(constraint="tanh")
    assert bounded.largest("shear") == pytest.approx(0.95)
    assert bounded.largest("rotation") == pytest.approx(0.95 * math.pi)
    near = {"shear": 0.98, "rotation": 3.1}  # nearer than a search starts, as when learnt
    bounded.open_(near)
    found = bounded.magnitudes()
    assert {name: found[name] for name in near} == pytest.approx(near, rel=1e-4)


def test_what_is_not_learnt_stays():
    augmentation = AffineImage(init={"rotation": 0.7}, learn="x_scale")
    augmentation.open_({"x_scale": 0.4})
    assert augmentation.magnitudes()["rotation"] == pytest.approx(0.7)
    assert augmentation.frozen().openings() == {}


def test_parts_that_are_frozen_stay():
    fixed, learnt = AffineImage(init={"shear": 0.3}).frozen(), AffineImage(learn="rotation")
    both = Compose(fixed, learnt)
    both.open_({"1.rotation": 0.5})
    assert fixed.magnitudes()["shear"] == pytest.approx(0.3)
    assert learnt.magnitudes()["rotation"] == pytest.approx(0.5)


def test_sets_of_elements_are_groups():
    found = set(FiniteGroup("all").openings())
    assert ("quarter_turn", "half_turn", "three_quarter_turn") in found
    assert ("horizontal_flip",) in found
    assert ("quarter_turn",) not in found  # without the other turns it is none
    assert set(FiniteGroup("flips").openings()) == {
        ("horizontal_flip",),
        ("vertical_flip",),
        ("half_turn",),
        ("horizontal_flip", "vertical_flip", "half_turn"),
    }


def test_a_name_that_two_parts_have_says_which():
    both = Compose(AffineImage(), AffineImage(learn="rotation"))
    both.open_({"1.rotation": 0.5})
    assert [part.magnitudes()["rotation"] for part in both.parts] == [0.0, 0.5]
    assert both.largest("1.rotation") == pytest.approx(math.pi)


BAD = {
    "beyond its limit": (AffineImage, {"rotation": 4.0}, "between 0 and 3.14"),
    "negative": (AffineImage, {"shear": -0.1}, "between 0 and inf"),
    "unknown": (AffineImage, {"twist": 0.1}, "learns no range 'twist'"),
    "not learnt": (lambda: AffineImage(learn="shear"), {"rotation": 0.1}, "it learns shear"),
    "too heavy": (FiniteGroup, {"half_turn": 1.5}, "between 0 and 1"),
    "no element": (FiniteGroup, {"flip": 1.0}, "no element 'flip'"),
    "no part": (lambda: Compose(Colour()), {"rotation": 1.0}, "no part has a range"),
    "own": (Blur, {"blur": 1.0}, "it learns width"),
}


@pytest.mark.parametrize(("make", "widths", "message"), BAD.values(), ids=BAD)
def test_wrong_ranges_are_refused(make, widths, message):
    with pytest.raises(ValueError, match=message):
        make().open_(widths)
