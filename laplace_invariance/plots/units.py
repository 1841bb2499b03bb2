"""Units in which ranges are drawn and written: degrees, pixels, factors.

Hyperparameters are radians, half-widths of an image and logarithms of factors, which add up but
which nobody reads. Ranges of different units never share an axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Unit", "by_unit", "in_unit", "short_words", "unit_of"]


@dataclass(frozen=True)
class Unit:
    """A unit of ranges, and how an axis of it looks.

    Attributes:
        label: Name of the unit, for an axis.
        closed: Value of a range that is closed, where the axis begins.
        least: Value that the axis reaches at least, so that noise does not fill it.
        ticks: Distance of ticks, if the unit has its own.
        most: Largest value there is.
    """

    label: str
    closed: float
    least: float
    ticks: tuple[float, ...] = ()
    most: float = math.inf


DEGREES = Unit("± degrees", 0.0, 30.0, (15.0, 30.0, 45.0), 180.0)
FACTOR = Unit("factor, up to", 1.0, 1.2)
PIXELS = Unit("± pixels", 0.0, 1.0)
HALF_WIDTHS = Unit("± half-widths of the image", 0.0, 0.2)
NUMBER = Unit("± (no unit)", 0.0, 0.2)

KINDS = {
    "rotation": DEGREES,
    "hue": DEGREES,
    "scale": FACTOR,
    "shear": FACTOR,  # it stretches one diagonal and shrinks the other
    "brightness": FACTOR,
    "contrast": FACTOR,
    "translation": HALF_WIDTHS,
}


def _kind(name: str) -> str:
    """Return the last word of a name: that of ``augmentation.x_scale`` is ``scale``."""
    return name.rpartition(".")[2].rpartition("_")[2]


def unit_of(name: str, size: tuple[int, int] | None = None) -> Unit:
    """Return the unit in which a range is drawn.

    Args:
        name: Name of the range, such as ``x_translation``.
        size: Height and width of the images, for translations in pixels; None has them in
            half-widths.
    """
    unit = KINDS.get(_kind(name), NUMBER)
    if unit is HALF_WIDTHS and size is not None:
        return PIXELS
    return unit


def in_unit(name: str, magnitude: float, size: tuple[int, int] | None = None) -> float:
    """Return a magnitude in the unit of its range.

    Args:
        name: Name of the range.
        magnitude: Magnitude as the augmentation has it: radians, half-widths, log factors.
        size: Height and width of the images, as for :func:`unit_of`.
    """
    unit = unit_of(name, size)
    if unit is DEGREES:
        return math.degrees(magnitude)
    if unit is FACTOR:
        return math.exp(magnitude)
    if unit is PIXELS and size is not None:
        height, width = size
        side = height if name.rpartition(".")[2].startswith("y") else width
        return magnitude * (side - 1) / 2  # coordinates are -1 and 1 at the outermost pixels
    return magnitude


def by_unit(names: Iterable[str], size: tuple[int, int] | None = None) -> dict[Unit, list[str]]:
    """Return names of ranges by their units, in the order of the first of each.

    Args:
        names: Names of ranges.
        size: Height and width of the images, as for :func:`unit_of`.
    """
    found: dict[Unit, list[str]] = {}
    for name in names:
        found.setdefault(unit_of(name, size), []).append(name)
    return found


def short_words(ranges: Mapping[str, float], size: tuple[int, int] | None = None) -> str:
    """Return ranges in a few words, such as ``rotation ±90°, scale ×1.28``.

    Axes that are equally far open are named together.

    Args:
        ranges: Magnitudes by name.
        size: Height and width of the images, as for :func:`unit_of`.
    """
    parts: dict[str, list[str]] = {}
    for name, magnitude in ranges.items():
        parts.setdefault(f"{_plain(name)} {_short(name, magnitude, size)}", []).append(name)
    words = []
    for text, names in parts.items():
        axis, _, rest = names[0].partition("_")
        if len(names) == 1 and rest and len(axis) == 1:
            text = f"{axis} {text}"
        words.append(text)
    return ", ".join(words) or "nothing"


def _plain(name: str) -> str:
    """Return the name of a range without the axis: that of ``x_scale`` is ``scale``."""
    axis, _, rest = name.partition("_")
    if len(axis) == 1 and rest:
        return rest.replace("_", " ")
    return name.replace("_", " ")


def _short(name: str, magnitude: float, size: tuple[int, int] | None) -> str:
    value, unit = in_unit(name, magnitude, size), unit_of(name, size)
    if unit is DEGREES:
        return f"±{value:.0f}°"
    if unit is FACTOR:
        return f"\u00d7{value:.2f}"  # a multiplication sign
    if unit is PIXELS:
        return f"±{value:.1f} pixels"
    return f"±{value:.2f}"
