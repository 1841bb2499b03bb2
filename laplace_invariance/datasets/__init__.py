"""Data whose invariance is known, and images to make it from.

``load`` reads images, ``transformed`` moves each by a draw of its own; the others make data of their own. What a learnt range
should be is in ``true_ranges``. All images are floating point ``[n, channels, height, width]`` in [0, 1] with black = 0, so
that what comes in from outside of a moved image is background; networks standardise for themselves.
"""

from laplace_invariance.datasets.images import (
    KINDS,
    QUADRANT_TASKS,
    check_images,
    framed,
    hue_rotated,
    quadrants,
    transformed,
    true_ranges,
    warp,
)
from laplace_invariance.datasets.readers import SOURCES, Split, load
from laplace_invariance.datasets.synthetic import (
    HiddenShifts,
    fourier_code,
    rotate,
    rotated_shapes,
    rotation_regression,
    waves,
)

__all__ = [
    "KINDS",
    "QUADRANT_TASKS",
    "SOURCES",
    "HiddenShifts",
    "Split",
    "check_images",
    "fourier_code",
    "framed",
    "hue_rotated",
    "load",
    "quadrants",
    "rotate",
    "rotated_shapes",
    "rotation_regression",
    "transformed",
    "true_ranges",
    "warp",
    "waves",
]
