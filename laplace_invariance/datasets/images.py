"""Images whose invariance is known: moved, put into quadrants, framed.

All images are floating point ``[n, channels, height, width]`` in [0, 1] with black = 0, so that what comes in from outside of a
moved image is background; networks standardise for themselves.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "KINDS",
    "QUADRANT_TASKS",
    "check_images",
    "framed",
    "hue_rotated",
    "quadrants",
    "transformed",
    "true_ranges",
    "warp",
]

# kind -> ranges of the generators of AffineImage that are not zero
_RANGES: dict[str, dict[str, float]] = {
    "fully_rotated": {"rotation": math.pi},
    "partially_rotated": {"rotation": math.pi / 2},
    "translated": {"x_translation": 4 / 7, "y_translation": 4 / 7},
    "scaled": {"x_scale": math.log(2), "y_scale": math.log(2)},
    "original": {},
}
KINDS = tuple(_RANGES)
_GENERATORS = ("x_translation", "y_translation", "rotation", "x_scale", "y_scale", "shear")
_WARPED_AT_ONCE = 4096  # images; a grid of coordinates is twice as large as a grey image


def true_ranges(kind: str) -> dict[str, float]:
    """Return how far images of a kind are moved along each generator of ``AffineImage``, by its name.

    Rotation is in radians, translation in half-widths, scale in logarithms of factors.
    """
    name = kind.replace("-", "_")
    if name not in _RANGES:
        raise ValueError(f"unknown kind {kind!r}; choose from {', '.join(KINDS)}")
    return {generator: _RANGES[name].get(generator, 0.0) for generator in _GENERATORS}


def transformed(images: Tensor, kind: str, generator: torch.Generator | None = None) -> Tensor:
    """Move each image by a draw of its own, bilinearly, with zeros outside.

    Draws are uniform within plus or minus :func:`true_ranges`. An image is "fully_rotated" by up to 180 degrees to either
    side, "partially_rotated" by up to 90, "translated" by up to 4/7 of its half-width and, independently, of its half-height
    (8 pixels at 28 x 28), "scaled" by a factor between 1/2 and 2, the same for both axes, or left as it is ("original").

    Args:
        images: ``[n, channels, height, width]`` in [0, 1].
        kind: one of ``KINDS``; hyphens may stand for underscores.
        generator: source of the draws; None is torch's default generator.

    Returns:
        Images of the same shape.
    """
    ranges = true_ranges(kind)
    check_images(images)
    if not any(ranges.values()):
        return images
    angle, log_factor, x, y = _uniform((len(images), 4), generator, images).unbind(-1)
    angle = angle * ranges["rotation"]
    factor = (log_factor * ranges["x_scale"]).exp()
    cos, sin = factor * angle.cos(), factor * angle.sin()
    rows = [cos, -sin, x * ranges["x_translation"], sin, cos, y * ranges["y_translation"]]
    return warp(images, torch.stack(rows, -1).view(-1, 2, 3))


def warp(images: Tensor, maps: Tensor) -> Tensor:
    """Let each pixel read its image where an affine map sends it, as ``AffineImage`` does.

    Args:
        images: ``[n, channels, height, width]``.
        maps: ``[n, 2, 3]``, in coordinates that are -1 and 1 at the outermost pixels, x to the right and y down.
    """
    if maps.shape != (len(images), 2, 3):
        raise ValueError(
            f"{len(images)} images need maps of shape [{len(images)}, 2, 3], got {list(maps.shape)}"
        )
    height, width = images.shape[-2:]
    ys = torch.linspace(-1, 1, height, device=images.device, dtype=images.dtype)
    xs = torch.linspace(-1, 1, width, device=images.device, dtype=images.dtype)
    pixels = torch.stack(
        [xs.repeat(height), ys.repeat_interleave(width), torch.ones_like(xs).repeat(height)]
    )
    parts = []
    for part, part_maps in zip(
        images.split(_WARPED_AT_ONCE), maps.to(images).split(_WARPED_AT_ONCE), strict=True
    ):
        # one matrix product, about ten times faster than F.affine_grid
        grid = (part_maps.reshape(-1, 3) @ pixels).view(-1, 2, height, width).movedim(1, -1)
        parts.append(
            F.grid_sample(part, grid, mode="bilinear", padding_mode="zeros", align_corners=True)
        )
    return torch.cat(parts)


def hue_rotated(
    images: Tensor, max_angle: float, generator: torch.Generator | None = None
) -> Tensor:
    """Turn the colours of each RGB image about the grey axis, by one angle per image.

    A rotation of colour space itself, undone by the opposite angle: it keeps greys, and the mean of the three channels, and
    may take saturated colours out of [0, 1].

    Args:
        images: ``[n, 3, height, width]`` in [0, 1].
        max_angle: in radians, to either side.
        generator: source of the angles; None is torch's default generator.

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
    angles = (max_angle * _uniform((len(images),), generator, images)).view(-1, 1, 1)
    # Rodrigues: exp(t K) = 1 + sin(t) K + (1 - cos(t)) K^2, K the cross product with the unit vector along (1, 1, 1)
    cross = torch.tensor([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]).to(images) / 3**0.5
    matrices = torch.eye(3).to(images) + angles.sin() * cross + (1 - angles.cos()) * (cross @ cross)
    return (matrices @ images.flatten(2)).view_as(images)


def _uniform(shape: tuple[int, ...], generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Return draws from [-1, 1] with the type and device of ``like``."""
    device = like.device if generator is None else generator.device
    return (2 * torch.rand(shape, generator=generator, device=device, dtype=like.dtype) - 1).to(
        like.device
    )


def check_images(images: Tensor) -> None:
    """Refuse what is not floating point ``[n, channels, height, width]`` in [0, 1]."""
    if images.ndim != 4:
        raise ValueError(
            f"images must be [n, channels, height, width], got shape {list(images.shape)}"
        )
    if not images.is_floating_point():
        raise ValueError(
            f"images must be floating point in [0, 1], got {images.dtype}; divide by the largest value"
        )
    if len(images) and not (images.min() >= 0 and images.max() <= 1):
        raise ValueError(
            f"images must be in [0, 1] with black = 0, got values from {images.min():.3g} to {images.max():.3g}; "
            "standardise in the network (layers.Standardise), not here"
        )


QUADRANT_TASKS = {
    "digit": "labelled by what is in the image",
    "both": "labelled by what is in the image and by its quadrant",
}


def quadrants(
    images: Tensor,
    labels: Tensor,
    task: str,
    generator: torch.Generator | None = None,
    size: int = 32,
) -> tuple[Tensor, Tensor]:
    """Shrink or enlarge images to half of ``size``, and put each into a random quadrant of a black image.

    Sizes change by bilinear interpolation, when shrinking over as many pixels as become one.

    Args:
        images: ``[n, channels, height, width]`` in [0, 1].
        labels: ``[n]``, integers from 0 on.
        task: ``"digit"`` keeps the labels, ``"both"`` makes them ``4 * label + quadrant``, with quadrants 0 and 1 above, 2 and 3
            below, from left to right.
        generator: source of the quadrants; None is torch's default generator.
        size: height and width of the result, even.

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
    if labels.shape != images.shape[:1] or labels.is_floating_point():
        raise ValueError(
            f"{len(images)} images need labels [{len(images)}] of integers, got shape {list(labels.shape)} of {labels.dtype}"
        )
    device = images.device if generator is None else generator.device
    places = torch.randint(4, (len(images),), generator=generator, device=device).to(images.device)
    half = size // 2
    tiles = images.new_zeros(len(images), images.shape[1], 2, half, 2, half)
    tiles[torch.arange(len(images), device=images.device), :, places // 2, :, places % 2] = (
        _resized(images, (half, half))
    )
    return tiles.flatten(4, 5).flatten(2, 3), 4 * labels + places.to(
        labels.device
    ) if task == "both" else labels


def framed(images: Tensor, size: int = 32) -> Tensor:
    """Bring images to ``size`` x ``size``: enlarge by the largest whole factor that fits, and pad with black on all sides.

    28 x 28 gets a margin of 2 to become 32 x 32, 8 x 8 is enlarged by 4, 10 x 10 by 3 with a margin of 1. Images that are larger
    are shrunk until their longer side fits.

    Args:
        images: ``[n, channels, height, width]`` in [0, 1].
        size: height and width of the result.

    Returns:
        Images ``[n, channels, size, size]``.
    """
    check_images(images)
    if size < 1:
        raise ValueError(f"size must be positive, got {size}")
    longer = max(images.shape[-2:])
    factor = size // longer if longer <= size else size / longer
    height, width = (max(1, round(factor * side)) for side in images.shape[-2:])
    above, left = (size - height) // 2, (size - width) // 2
    margins = (left, size - width - left, above, size - height - above)
    return F.pad(_resized(images, (height, width)), margins)


def _resized(images: Tensor, shape: tuple[int, int]) -> Tensor:
    if images.shape[-2:] == shape:
        return images
    return F.interpolate(images, shape, mode="bilinear", align_corners=False, antialias=True).clamp(
        0, 1
    )
