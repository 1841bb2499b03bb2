"""Images of one size for networks that need it, and a task that convolutions alone cannot solve.

A small image in one quadrant of a larger black one: which image it is does not depend on where it is, so that a network which
ignores shifts is right; which quadrant it is in does, and no such network can tell.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from laplace_invariance.datasets import check_images

__all__ = ["TASKS", "framed", "quadrants"]

TASKS = {
    "digit": "labelled by what is in the image",
    "both": "labelled by what is in the image and by its quadrant",
}


def quadrants(
    images: Tensor, labels: Tensor, task: str, generator: torch.Generator | None = None, size: int = 32
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
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; choose from {', '.join(TASKS)}")
    if size < 2 or size % 2:
        raise ValueError(f"size must be even and positive, for quadrants of whole pixels, got {size}")
    check_images(images)
    if labels.shape != images.shape[:1] or labels.is_floating_point():
        raise ValueError(
            f"{len(images)} images need labels [{len(images)}] of integers, got shape {list(labels.shape)} of {labels.dtype}"
        )
    device = images.device if generator is None else generator.device
    places = torch.randint(4, (len(images),), generator=generator, device=device).to(images.device)
    half = size // 2
    tiles = images.new_zeros(len(images), images.shape[1], 2, half, 2, half)
    tiles[torch.arange(len(images), device=images.device), :, places // 2, :, places % 2] = _resized(
        images, (half, half)
    )
    return tiles.flatten(4, 5).flatten(2, 3), 4 * labels + places.to(labels.device) if task == "both" else labels


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
    return F.interpolate(images, shape, mode="bilinear", align_corners=False, antialias=True).clamp(0, 1)
