"""Examples and weights, and where transformations take them."""

from __future__ import annotations

import colorsys
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace_invariance.augmentations import AffinePoints, Augmentation, LieGroup
from laplace_invariance.plots.style import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["filter_bank", "flow", "samples", "shapes"]


def shapes(points: Tensor, labels: Tensor, ax: Axes, columns: int = 6) -> Axes:
    """Draw point sets ``[n, n_points, 2]`` as closed polygons on a grid, coloured by label; grey is label 0."""
    rows = -(-len(points) // columns)
    for i, (polygon, label) in enumerate(zip(points, labels.tolist(), strict=True)):
        centre = torch.tensor([i % columns, rows - 1 - i // columns], dtype=polygon.dtype)
        line = polygon / 7 + centre
        colour = "0.6" if label == 0 else COLOURS[(label - 1) % len(COLOURS)]
        ax.fill(line[:, 0], line[:, 1], facecolor=colour, alpha=0.25)
        ax.plot(*torch.cat([line, line[:1]]).T, color=colour, lw=1)
        ax.plot(line[0, 0], line[0, 1], "o", color=colour, ms=3)
    ax.set(xticks=[], yticks=[], xlim=(-0.6, columns - 0.4), ylim=(-0.6, rows - 0.4))
    ax.set_aspect("equal")
    return ax


@torch.no_grad()
def samples(
    augmentation: Augmentation,
    images: Tensor,
    n_samples: int,
    ax: Axes,
    title: str = "",
    *,
    seed: int = 0,
) -> Axes:
    """Draw images, one per row, and beside each some samples of it under the augmentation.

    Args:
        augmentation: what to sample from.
        images: ``[n, channels, height, width]`` in [0, 1], grey or RGB.
        n_samples: samples per image.
        ax: to draw on.
        title: of the picture.
        seed: of the draws, so that pictures can be repeated.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            f"samples draws images [n, 1 or 3, height, width], got shape {list(images.shape)}"
        )
    draws = augmentation.sample(len(images), n_samples, torch.Generator().manual_seed(seed))
    tiles = torch.cat([images.unsqueeze(1), augmentation.transform(images, draws)], dim=1)
    rows, columns, _, height, width = tiles.shape
    mosaic = tiles.permute(0, 3, 1, 4, 2).reshape(rows * height, columns * width, -1).clamp(0, 1)
    ax.imshow(mosaic.squeeze(-1).cpu(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    for i in range(1, columns):
        ax.axvline(i * width - 0.5, color="w", lw=5 if i == 1 else 1)
    for i in range(1, rows):
        ax.axhline(i * height - 0.5, color="w", lw=1)
    below: dict[str, Any] = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "ha": "center",
        "va": "top",
    }
    for text, centre in (("original", 0.5), ("samples", (columns + 1) / 2)):
        ax.annotate(text, (centre / columns, 0), (0, -4), fontsize="small", **below)
    ax.set(xticks=[], yticks=[], title=title)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return ax


@torch.no_grad()
def flow(augmentation: LieGroup, ax: Axes, n_paths: int = 24, n_points: int = 5) -> Axes:
    """Draw where transformations of the plane take a grid of points on their way, ``exp(t c.G)`` for t from 0 to 1.

    Each point has a colour, and one faint line per draw ``c``: where few of them arrive they are pale. The square is the
    image. For images these are the positions that a pixel reads; as draws are symmetric, what is seen there moves alike.

    Args:
        augmentation: an ``AffineImage``, ``AffinePoints`` in two dimensions, or another group of 3 x 3 matrices.
        ax: to draw on.
        n_paths: number of draws.
        n_points: points along each side of the grid.
    """
    generators = getattr(augmentation, "generators", None)
    if generators is None or generators.shape[-1] != 3:
        found = (
            type(augmentation).__name__
            if generators is None
            else f"matrices {list(generators.shape[-2:])}"
        )
        raise ValueError(f"flow draws affine groups of the plane, matrices [3, 3], got {found}")
    coefficients = augmentation.coefficients(augmentation.fixed(n_paths)[0])
    # a little off the centre, so that a rotation takes no point to another, and how far each goes is seen
    grid = torch.cartesian_prod(
        torch.linspace(-1, 0.85, n_points), torch.linspace(-0.9, 0.95, n_points)
    )
    grid = grid.to(coefficients)
    paths = _paths(coefficients, generators, grid).cpu()
    for (x, y), lines in zip(grid.tolist(), paths, strict=True):
        colour = colorsys.hsv_to_rgb(math.atan2(y, x) / (2 * math.pi) % 1, 1.0, 0.75)
        ax.plot(
            lines[..., 0], lines[..., 1], color=colour, lw=1.5, alpha=0.2, solid_capstyle="butt"
        )
        ax.plot(x, y, "o", color=colour, mec="k", mew=0.8, ms=5, zorder=4)
    ax.plot([-1, 1, 1, -1, -1], [-1, -1, 1, 1, -1], color="k", lw=1, zorder=3)
    ax.set(xlabel="x (half-widths)", ylabel="y (half-widths)")
    ax.set_aspect("equal")
    if isinstance(augmentation, AffinePoints):
        ax.set(xlabel="x", ylabel="y")
    elif not ax.yaxis_inverted():
        ax.invert_yaxis()
    return ax


def _paths(coefficients: Tensor, generators: Tensor, points: Tensor, n_times: int = 33) -> Tensor:
    """Return ``exp(t c.G) p`` as ``[points, times, paths, 2]`` for coefficients ``[paths, k]`` and points ``[points, 2]``."""
    times = torch.linspace(0, 1, n_times).to(coefficients)
    maps = torch.linalg.matrix_exp(torch.einsum("t,ck,kij->tcij", times, coefficients, generators))[
        ..., :2, :
    ]
    return torch.einsum(
        "tcij,pj->ptci", maps, torch.cat([points, torch.ones_like(points[:, :1])], dim=1)
    )


def filter_bank(filters: Tensor, ax: Axes) -> Axes:
    """Draw rows of a first layer under transformations, one row each; blue is negative, red positive.

    Args:
        filters: ``[rows, samples, channels, height, width]``, of ``variational.ShallowNetwork.filter_bank``; channels are
            averaged.
        ax: to draw on.
    """
    if filters.ndim != 5:
        raise ValueError(
            f"filter_bank draws [rows, samples, channels, height, width], got shape {list(filters.shape)}"
        )
    tiles = torch.nn.functional.pad(filters.mean(2), (1, 1, 1, 1), value=math.nan).cpu()
    size = filters.abs().max().item()
    mosaic = tiles.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    ax.imshow(mosaic, cmap="coolwarm", vmin=-size, vmax=size, interpolation="nearest")
    ax.set(xticks=[], yticks=[], xlabel="transformations", ylabel="features")
    for spine in ax.spines.values():
        spine.set_visible(False)
    return ax
