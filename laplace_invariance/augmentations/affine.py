"""Affine transformations of images and of coordinates."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from laplace_invariance.augmentations.box import Init, Names, as_factor, in_degrees
from laplace_invariance.augmentations.lie import LieGroup

__all__ = ["AffineImage", "AffinePoints"]


def affine_generators(dimensions: int) -> tuple[list[str], Tensor, list[float]]:
    """Return names, matrices ``[k, d + 1, d + 1]`` in homogeneous coordinates, and limits, of the affine Lie algebra.

    Translations, rotations (counter-clockwise where x points right and y points up), scalings and shears, in this order.
    """
    d = dimensions
    axes = "xyz"[:d]
    pairs = list(combinations(range(d), 2))
    entries: list[tuple[str, list[tuple[int, int, float]], float]] = []
    entries += [(f"{a}_translation", [(i, d, 1.0)], math.inf) for i, a in enumerate(axes)]
    if d == 2:
        entries.append(("rotation", [(1, 0, 1.0), (0, 1, -1.0)], math.pi))
    else:  # about each axis: the other two in cyclic order
        for i, a in enumerate(axes):
            j, k = (i + 1) % 3, (i + 2) % 3
            entries.append((f"{a}_rotation", [(k, j, 1.0), (j, k, -1.0)], math.pi))
    entries += [(f"{a}_scale", [(i, i, 1.0)], math.inf) for i, a in enumerate(axes)]
    shears = ["shear"] if d == 2 else [f"{axes[i]}{axes[j]}_shear" for i, j in pairs]
    entries += [
        (name, [(i, j, 1.0), (j, i, 1.0)], math.inf)
        for name, (i, j) in zip(shears, pairs, strict=True)
    ]
    generators = torch.zeros(len(entries), d + 1, d + 1)
    for index, (_, cells, _) in enumerate(entries):
        for i, j, value in cells:
            generators[index, i, j] = value
    return [name for name, _, _ in entries], generators, [limit for _, _, limit in entries]


def _in_words(name: str, magnitude: float, half_size: str) -> str:
    if name.endswith("rotation"):
        return in_degrees(magnitude)
    if name.endswith("scale"):
        return as_factor(magnitude)
    return f"±{magnitude:.3f}{half_size if name.endswith('translation') else ''}"


class AffineImage(LieGroup):
    """Affine transformations of images ``[n, channels, height, width]``, by bilinear interpolation, zero outside.

    Six generators: x_translation, y_translation, rotation, x_scale, y_scale, shear. Translations are in units of half the
    image (1 moves the centre to the border), rotations in radians (``pi`` is all of them), scalings are logarithms of
    factors. A transformation says where each output pixel reads its input, in coordinates with x to the right and y *down*:
    a positive rotation turns the picture counter-clockwise, a positive x_translation moves it to the left, a positive
    x_scale makes it narrower. With bilinear interpolation the result is piecewise smooth in the hyperparameters.

    Args: as for :class:`~laplace_invariance.augmentations.BoxAugmentation`.
    """

    input_ndims = (3,)

    def __init__(
        self,
        init: Init = 0.0,
        learn: Names = "all",
        constraint: str | None = None,
        correlated: bool = False,
        draws: str = "independent",
    ) -> None:
        super().__init__(*affine_generators(2), init, learn, constraint, correlated, draws)

    def act(self, x: Tensor, matrices: Tensor) -> Tensor:
        if x.ndim != 4:
            raise ValueError(
                f"AffineImage transforms images [n, channels, height, width], got shape {list(x.shape)}"
            )
        if not x.is_floating_point():
            raise TypeError(
                f"AffineImage interpolates, so images must be floating point, got {x.dtype}; divide by 255 first"
            )
        n, channels, height, width = x.shape
        n_samples = matrices.shape[1]
        # The samples of one image are stacked along the height of one grid, which spares copies of the image; and the
        # grid is one matrix product, which is about ten times faster than F.affine_grid.
        maps = matrices[..., :2, :].to(x.dtype).expand(n, -1, -1, -1)
        ys = torch.linspace(-1, 1, height, device=x.device, dtype=x.dtype)
        xs = torch.linspace(-1, 1, width, device=x.device, dtype=x.dtype)
        pixels = torch.stack(
            [xs.repeat(height), ys.repeat_interleave(width), torch.ones_like(xs).repeat(height)]
        )
        grid = (
            (maps.transpose(1, 2).reshape(-1, 3) @ pixels)
            .view(n, 2, n_samples * height, width)
            .movedim(1, -1)
        )
        samples = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=True)
        return samples.view(n, channels, n_samples, height, width).transpose(1, 2)

    def ranges(self) -> dict[str, str]:
        return {
            name: _in_words(name, value, " half-widths")
            for name, value in self.magnitudes().items()
        }


class AffinePoints(LieGroup):
    """Affine transformations of coordinates ``[n, d]`` or point sets ``[n, points, d]``, ``d`` = 2 or 3.

    In two dimensions the generators of :class:`AffineImage`; in three x_, y_, z_translation, rotations about the three
    axes (x_rotation, ...), x_, y_, z_scale, and xy_, xz_, yz_shear. Smooth in the hyperparameters. Rotations are
    counter-clockwise and translations are in the units of the coordinates.

    Args:
        dimensions: 2 or 3.
        **kwargs: as for :class:`~laplace_invariance.augmentations.BoxAugmentation`.
    """

    input_ndims = (1, 2)

    def __init__(
        self,
        dimensions: int = 2,
        init: Init = 0.0,
        learn: Names = "all",
        **kwargs: Any,
    ) -> None:
        if dimensions not in (2, 3):
            raise ValueError(
                f"AffinePoints transforms points in 2 or 3 dimensions, got {dimensions}"
            )
        super().__init__(*affine_generators(dimensions), init, learn, **kwargs)
        self.dimensions = dimensions

    def act(self, x: Tensor, matrices: Tensor) -> Tensor:
        d = self.dimensions
        if x.ndim not in (2, 3) or x.shape[-1] != d:
            raise ValueError(
                f"AffinePoints(dimensions={d}) transforms [n, {d}] or [n, points, {d}], got shape {list(x.shape)}"
            )
        matrices = matrices.to(x.dtype)
        points = x.view(len(x), 1, -1, d) @ matrices[..., :d, :d].mT + matrices[
            ..., :d, d
        ].unsqueeze(-2)
        return points if x.ndim == 3 else points.squeeze(2)

    def ranges(self) -> dict[str, str]:
        return {name: _in_words(name, value, "") for name, value in self.magnitudes().items()}
