"""Images whose invariance is known: transformed, put into quadrants, framed.

All images are floating point ``[n, channels, height, width]`` in [0, 1] with black = 0, so that
what comes in from outside of a transformed image is background; networks standardise them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from laplace_invariance.augmentations.affine import warp_images
from laplace_invariance.augmentations.colour import hue_rotations
from laplace_invariance.draws import uniform

__all__ = [
    "QUADRANT_TASKS",
    "TRANSFORM_KINDS",
    "check_images",
    "fitted",
    "framed",
    "hue_rotated",
    "quadrants",
    "sample_maps",
    "transformed",
    "true_ranges",
    "warp",
]

# kind -> ranges of the generators of AffineImage that are not zero
_RANGES: dict[str, dict[str, float]] = {
    "fully_rotated": {"rotation": math.pi},
    "partially_rotated": {"rotation": math.pi / 2},
    "translated": {},  # depends on the size
    "scaled": {"x_scale": math.log(2), "y_scale": math.log(2)},
    "original": {},
}
# two of these at once
_COMBINED: dict[str, tuple[str, str]] = {
    "rotated_translated": ("fully_rotated", "translated"),
    "rotated_scaled": ("fully_rotated", "scaled"),
    "translated_scaled": ("translated", "scaled"),
}
_PIXELS_MOVED = 8  # by which an image is translated at most, or
_SHARE_MOVED = 2 / 7  # of its width, if that is less: the same at 28 x 28
_GENERATORS = ("x_translation", "y_translation", "rotation", "x_scale", "y_scale", "shear")
_WARPED_AT_ONCE = 4096  # images; a grid of coordinates is twice as large as a grey image

TRANSFORM_KINDS = (*_RANGES, *_COMBINED)
QUADRANT_TASKS = {
    "digit": "labelled by what is in the image",
    "both": "labelled by what is in the image and by its quadrant",
}


def true_ranges(
    kind: str | Mapping[str, float], shape: Sequence[int] = (28, 28)
) -> dict[str, float]:
    """Return how far images of a kind are transformed along each generator of ``AffineImage``.

    Args:
        kind: One of ``TRANSFORM_KINDS``; hyphens may stand for underscores. Or ranges by name, of
            rotation, translations, and one for both scales.
        shape: Shape of the images, of which the last two are height and width.

    Returns:
        Ranges by name: rotation in radians, translation in half-widths, scale in logarithms of
        factors.
    """
    if isinstance(kind, Mapping):
        ranges = dict(kind)
        possible = [name for name in _GENERATORS if name != "shear"]
        if not set(ranges) <= set(possible):
            raise ValueError(f"images are transformed by {', '.join(possible)}, got {ranges}")
        if ranges.get("x_scale", 0.0) != ranges.get("y_scale", 0.0):
            raise ValueError(f"both axes are scaled by one factor, got {ranges}")
    else:
        name = kind.replace("-", "_")
        if name not in TRANSFORM_KINDS:
            raise ValueError(f"unknown kind {kind!r}; choose from {', '.join(TRANSFORM_KINDS)}")
        ranges = {}
        for part in _COMBINED.get(name, (name,)):
            ranges |= _RANGES[part]
            if part == "translated":
                y, x = (_moved(size) for size in shape[-2:])
                ranges |= {"x_translation": x, "y_translation": y}
    return {generator: ranges.get(generator, 0.0) for generator in _GENERATORS}


def _moved(size: int) -> float:
    """Return a translation in half-widths, which are those between the outermost pixels."""
    return 2 * min(_PIXELS_MOVED, _SHARE_MOVED * size) / max(size - 1, 1)


def transformed(
    images: Tensor, kind: str | Mapping[str, float], generator: torch.Generator | None = None
) -> Tensor:
    """Transform each image by a draw of its own, bilinearly, with zeros outside.

    Draws are uniform within plus or minus :func:`true_ranges`. An image is "fully_rotated" by up to
    180 degrees to either side, "partially_rotated" by up to 90, "translated" by up to 8 pixels
    along each axis, independently (2/7 of the size if that is less, as below 28 x 28), "scaled" by
    a factor between 1/2 and 2, the same for both axes, or left as it is ("original"). It is
    "rotated_translated", "rotated_scaled" or "translated_scaled" if two of these happen to it, and
    the rotation is a full one.

    Args:
        images: Images ``[n, channels, height, width]`` in [0, 1].
        kind: One of ``TRANSFORM_KINDS``, or ranges by name, as for :func:`true_ranges`.
        generator: Source of the draws; None is torch's default generator.

    Returns:
        Images of the same shape.
    """
    check_images(images)
    ranges = true_ranges(kind, images.shape)
    if not any(ranges.values()):
        return images
    return warp(images, sample_maps(images, kind, generator))


def sample_maps(
    images: Tensor, kind: str | Mapping[str, float], generator: torch.Generator | None = None
) -> Tensor:
    """Draw the affine maps ``[n, 2, 3]`` by which :func:`transformed` warps ``n`` images."""
    ranges = true_ranges(kind, images.shape)
    angle, log_factor, x, y = uniform((len(images), 4), images, generator).unbind(-1)
    angle = angle * ranges["rotation"]
    factor = (log_factor * ranges["x_scale"]).exp()
    cos, sin = factor * angle.cos(), factor * angle.sin()
    entries = [cos, -sin, x * ranges["x_translation"], sin, cos, y * ranges["y_translation"]]
    return rearrange(entries, "(i j) n -> n i j", i=2)


def warp(images: Tensor, maps: Tensor) -> Tensor:
    """Let each pixel read its image where an affine map sends it, as ``AffineImage`` does.

    Args:
        images: Images ``[n, channels, height, width]``.
        maps: Affine maps ``[n, 2, 3]``, in coordinates that are -1 and 1 at the outermost pixels,
            with x to the right and y down.

    Returns:
        Images of the same shape.
    """
    if maps.shape != (len(images), 2, 3):
        raise ValueError(
            f"{len(images)} images need maps of shape [{len(images)}, 2, 3], got {list(maps.shape)}"
        )
    all_maps = maps.to(images).unsqueeze(1).split(_WARPED_AT_ONCE)
    parts = [
        warp_images(part, part_maps).squeeze(1)
        for part, part_maps in zip(images.split(_WARPED_AT_ONCE), all_maps, strict=True)
    ]
    return torch.cat(parts)


def hue_rotated(
    images: Tensor, max_angle: float, generator: torch.Generator | None = None
) -> Tensor:
    """Rotate the colours of each RGB image about the grey axis, by one angle per image.

    A rotation of colour space itself, inverted by the opposite angle: it keeps greys and the mean
    of the three channels, and may take saturated colours out of [0, 1].

    Args:
        images: Images ``[n, 3, height, width]`` in [0, 1].
        max_angle: Largest angle to either side, in radians.
        generator: Source of the angles; None is torch's default generator.

    Returns:
        Images of the same shape.
    """
    check_images(images)
    if images.shape[1] != 3:
        raise ValueError(
            f"hue is a property of RGB images [n, 3, height, width], got shape {list(images.shape)}"
        )
    if not 0 <= max_angle <= math.pi:
        raise ValueError(f"max_angle must be between 0 and pi, got {max_angle}")
    rotations = hue_rotations(max_angle * uniform((len(images),), images, generator))
    return (rotations @ images.flatten(2)).view_as(images)


def check_images(images: Tensor) -> None:
    """Raise ``ValueError`` unless images are floating point ``[n, c, h, w]`` in [0, 1]."""
    if images.ndim != 4:
        raise ValueError(
            f"images must be [n, channels, height, width], got shape {list(images.shape)}"
        )
    if not images.is_floating_point():
        raise ValueError(
            f"images must be floating point in [0, 1], got {images.dtype}; "
            "divide by the largest value"
        )
    if len(images) and not (images.min() >= 0 and images.max() <= 1):
        raise ValueError(
            f"images must be in [0, 1] with black = 0, got values from {images.min():.3g} to "
            f"{images.max():.3g}; standardise in the network (layers.Standardise), not here"
        )


def quadrants(
    images: Tensor,
    labels: Tensor,
    task: str,
    generator: torch.Generator | None = None,
    size: int = 32,
) -> tuple[Tensor, Tensor]:
    """Resize images to half of ``size``, and put each into a random quadrant of a black image.

    Sizes change by bilinear interpolation, when shrinking over as many pixels as become one.

    Args:
        images: Images ``[n, channels, height, width]`` in [0, 1].
        labels: Labels ``[n]``, integers from 0 on.
        task: ``"digit"`` keeps the labels, ``"both"`` makes them ``4 * label + quadrant``, with
            quadrants 0 and 1 above, 2 and 3 below, from left to right.
        generator: Source of the quadrants; None is torch's default generator.
        size: Height and width of the result, an even number.

    Returns:
        Images ``[n, channels, size, size]`` and labels ``[n]``.
    """
    if task not in QUADRANT_TASKS:
        raise ValueError(f"unknown task {task!r}; choose from {', '.join(QUADRANT_TASKS)}")
    if size < 2 or size % 2:
        raise ValueError(
            f"size must be even and positive, for quadrants of whole pixels, got {size}"
        )
    check_images(images)
    n, channels = images.shape[:2]
    if labels.shape != (n,) or labels.is_floating_point():
        raise ValueError(
            f"{n} images need labels [{n}] of integers, got shape {list(labels.shape)} "
            f"of {labels.dtype}"
        )
    device = images.device if generator is None else generator.device
    places = torch.randint(4, (n,), generator=generator, device=device).to(images.device)
    half = size // 2
    tiles = images.new_zeros(n, channels, 2, half, 2, half)
    index = torch.arange(n, device=images.device)
    tiles[index, :, places // 2, :, places % 2] = _resized(images, (half, half))
    if task == "both":
        labels = 4 * labels + places.to(labels.device)
    return rearrange(tiles, "n c i h j w -> n c (i h) (j w)"), labels


def framed(images: Tensor, size: int = 32) -> Tensor:
    """Bring images to ``size`` x ``size``, enlarged by a whole factor and padded with black.

    The factor is the largest that fits, and the margins are equal on all sides: 28 x 28 gets a
    margin of 2 to become 32 x 32, 8 x 8 is enlarged by 4, 10 x 10 by 3 with a margin of 1. Larger
    images are shrunk until their longer side fits.

    Args:
        images: Images ``[n, channels, height, width]`` in [0, 1].
        size: Height and width of the result.

    Returns:
        Images ``[n, channels, size, size]``.
    """
    check_images(images)
    if size < 1:
        raise ValueError(f"size must be positive, got {size}")
    longer = max(images.shape[-2:])
    factor = size / longer
    if longer <= size:
        factor = size // longer
    height, width = (max(1, round(factor * side)) for side in images.shape[-2:])
    above, left = (size - height) // 2, (size - width) // 2
    margins = (left, size - width - left, above, size - height - above)
    return F.pad(_resized(images, (height, width)), margins)


def fitted(images: Tensor, size: int) -> Tensor:
    """Cut the middle square out of images, and resize it.

    Args:
        images: Images ``[n, channels, height, width]`` in [0, 1].
        size: Height and width of the result.

    Returns:
        Images ``[n, channels, size, size]``.
    """
    check_images(images)
    height, width = images.shape[-2:]
    side = min(height, width)
    above, left = (height - side) // 2, (width - side) // 2
    return _resized(images[..., above : above + side, left : left + side], (size, size))


def _resized(images: Tensor, shape: tuple[int, int]) -> Tensor:
    if images.shape[-2:] == shape:
        return images
    resized = F.interpolate(images, shape, mode="bilinear", align_corners=False, antialias=True)
    return resized.clamp(0, 1)
