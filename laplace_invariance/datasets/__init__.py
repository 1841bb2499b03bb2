"""Data whose invariance is known, and images to make it from.

``load`` reads images, ``transformed`` transforms each by a draw of its own; the others make data of
their own. What a learnt range should be is in ``true_ranges``. All images are floating point
``[n, channels, height, width]`` in [0, 1] with black = 0, so that what comes in from outside of a
transformed image is background; networks standardise for themselves.
"""

from laplace_invariance.datasets.images import (
    QUADRANT_TASKS,
    TRANSFORM_KINDS,
    check_images,
    fitted,
    framed,
    hue_rotated,
    quadrants,
    transformed,
    true_ranges,
    warp,
)
from laplace_invariance.datasets.readers import IMAGE_SOURCES, Split, load
from laplace_invariance.datasets.synthetic import (
    FOURIER_CODES,
    PAIR_TASKS,
    HiddenShifts,
    fourier_code,
    labelled_points,
    rotate,
    rotated_shapes,
    rotation_regression,
    waves,
)

__all__ = [
    "FOURIER_CODES",
    "IMAGE_SOURCES",
    "PAIR_TASKS",
    "QUADRANT_TASKS",
    "TRANSFORM_KINDS",
    "HiddenShifts",
    "Split",
    "check_images",
    "fitted",
    "fourier_code",
    "framed",
    "hue_rotated",
    "labelled_points",
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
