"""Units in which ranges are drawn and written."""

import math

import pytest

import laplace_invariance as li
from laplace_invariance import plots

MAGNITUDES = {
    "rotation": (math.pi / 2, "± degrees", 90),
    "parts.0.hue": (math.pi, "± degrees", 180),
    "x_scale": (math.log(2), "factor, up to", 2),
    "shear": (0.0, "factor, up to", 1),
    "y_translation": (0.5, "± half-widths of the image", 0.5),
    "strange": (0.5, "± (no unit)", 0.5),
}


@pytest.mark.parametrize("name", MAGNITUDES)
def test_magnitudes_have_units(name):
    magnitude, label, value = MAGNITUDES[name]
    assert plots.unit_of(name).label == label
    assert plots.in_unit(name, magnitude) == pytest.approx(value)


def test_pixels_are_those_that_words_have():
    """The outermost pixels are at -1 and 1: half of a picture of nine pixels is four."""
    assert plots.in_unit("x_translation", 0.5, (5, 9)) == 2
    assert plots.in_unit("y_translation", 0.5, (5, 9)) == 1
    assert plots.in_unit("rotation", 0.5, (5, 9)) == plots.in_unit("rotation", 0.5)


def test_every_range_of_an_image_has_a_unit_of_three():
    assert list(plots.by_unit(li.AffineImage().names).values()) == [
        ["x_translation", "y_translation"],
        ["rotation"],
        ["x_scale", "y_scale", "shear"],
    ]


def test_equal_axes_are_named_together():
    both = {"x_scale": 0.25, "y_scale": 0.25, "rotation": 1.0}
    assert plots.short_words(both) == "scale \u00d71.28, rotation ±57°"
    one = {"x_translation": 0.25, "y_translation": 0.5}
    assert plots.short_words(one) == "x translation ±0.25, y translation ±0.50"
    assert plots.short_words(one, (9, 9)) == "x translation ±1.0 pixels, y translation ±2.0 pixels"
    assert plots.short_words({}) == "nothing"
