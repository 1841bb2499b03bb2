"""Examples and weights under transformations."""

from __future__ import annotations

import colorsys
import math
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor

from laplace_invariance.augmentations import AffinePoints, Augmentation, LieGroup
from laplace_invariance.plots.style import colour, hide_spines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["filter_bank", "flow", "samples", "shapes"]


def shapes(points: Tensor, labels: Tensor, ax: Axes, columns: int = 6) -> Axes:
    """Draw point sets as closed polygons on a grid, coloured by label; grey is label 0.

    Args:
        points: Point sets ``[n, n_points, 2]``.
        labels: Labels ``[n]``.
        ax: Axes to draw on.
        columns: Number of polygons in a row.
    """
    rows = -(-len(points) // columns)
    for i, (polygon, label) in enumerate(zip(points, labels.tolist(), strict=True)):
        centre = torch.tensor([i % columns, rows - 1 - i // columns], dtype=polygon.dtype)
        line = polygon / 7 + centre
        color = "0.6" if label == 0 else colour(label - 1)
        ax.fill(line[:, 0], line[:, 1], facecolor=color, alpha=0.25)
        ax.plot(*torch.cat([line, line[:1]]).T, color=color, lw=1)
        ax.plot(line[0, 0], line[0, 1], "o", color=color, ms=3)
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
        augmentation: Augmentation to sample from.
        images: Images ``[n, channels, height, width]`` in [0, 1], grey or RGB.
        n_samples: Number of samples per image.
        ax: Axes to draw on.
        title: Title of the picture.
        seed: Seed of the draws, so that pictures can be repeated.

    Raises:
        ValueError: If images are neither grey nor RGB.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            f"samples draws images [n, 1 or 3, height, width], got shape {list(images.shape)}"
        )
    draws = augmentation.sample(len(images), n_samples, torch.Generator().manual_seed(seed))
    tiles = torch.cat([images.unsqueeze(1), augmentation.transform(images, draws)], dim=1)
    rows, columns, _, height, width = tiles.shape
    mosaic = rearrange(tiles, "r s c h w -> (r h) (s w) c").clamp(0, 1)
    ax.imshow(mosaic.squeeze(-1).cpu(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    ax.axvline(width - 0.5, color="w", lw=5)  # between the originals and their samples
    for i in range(2, columns):
        ax.axvline(i * width - 0.5, color="w", lw=1)
    for i in range(1, rows):
        ax.axhline(i * height - 0.5, color="w", lw=1)
    for text, centre in (("original", 0.5), ("samples", (columns + 1) / 2)):
        ax.annotate(
            text,
            (centre / columns, 0),
            (0, -4),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize="small",
        )
    ax.set(xticks=[], yticks=[], title=title)
    hide_spines(ax)
    return ax


@torch.no_grad()
def flow(augmentation: LieGroup, ax: Axes, n_paths: int = 24, n_points: int = 5) -> Axes:
    """Draw the ways of a grid of points under transformations, ``exp(t c.G)`` for t in [0, 1].

    Each point has a colour, and one faint line per draw ``c``: where few of them arrive they
    are pale. The square is the image. For images these are the positions that a pixel reads; as
    draws are symmetric, what is seen there is transformed alike.

    Args:
        augmentation: An ``AffineImage``, ``AffinePoints`` in two dimensions, or another group
            of 3 x 3 matrices.
        ax: Axes to draw on.
        n_paths: Number of draws.
        n_points: Number of points along each side of the grid.

    Raises:
        ValueError: If the augmentation is not an affine group of the plane.
    """
    generators = _planar_generators(augmentation)
    coefficients = augmentation.coefficients(augmentation.fixed(n_paths)[0])
    # A little off the centre, so that no rotation takes one point to another: it can be seen how
    # far each goes.
    xs = torch.linspace(-1, 0.85, n_points)
    ys = torch.linspace(-0.9, 0.95, n_points)
    grid = torch.cartesian_prod(xs, ys).to(coefficients)
    paths = _paths(coefficients, generators, grid).cpu()
    for (x, y), lines in zip(grid.tolist(), paths, strict=True):
        color = colorsys.hsv_to_rgb(math.atan2(y, x) / (2 * math.pi) % 1, 1.0, 0.75)
        along = lines[..., 0], lines[..., 1]
        ax.plot(*along, color=color, lw=1.5, alpha=0.2, solid_capstyle="butt")
        ax.plot(x, y, "o", color=color, mec="k", mew=0.8, ms=5, zorder=4)
    ax.plot([-1, 1, 1, -1, -1], [-1, -1, 1, 1, -1], color="k", lw=1, zorder=3)
    ax.set(xlabel="x (half-widths)", ylabel="y (half-widths)")
    ax.set_aspect("equal")
    if isinstance(augmentation, AffinePoints):
        ax.set(xlabel="x", ylabel="y")
    elif not ax.yaxis_inverted():
        ax.invert_yaxis()
    return ax


def _planar_generators(augmentation: Augmentation) -> Tensor:
    generators = getattr(augmentation, "generators", None)
    if generators is not None and generators.shape[-1] == 3:
        return generators
    found = type(augmentation).__name__
    if generators is not None:
        found = f"matrices {list(generators.shape[-2:])}"
    raise ValueError(f"flow draws affine groups of the plane, matrices [3, 3], got {found}")


def _paths(coefficients: Tensor, generators: Tensor, points: Tensor, n_times: int = 33) -> Tensor:
    """Return ``exp(t c.G) p`` as ``[points, times, paths, 2]`` for ``c`` ``[paths, k]``."""
    times = torch.linspace(0, 1, n_times).to(coefficients)
    exponents = torch.einsum("t,ck,kij->tcij", times, coefficients, generators)
    maps = torch.linalg.matrix_exp(exponents)[..., :2, :]
    homogeneous = torch.cat([points, torch.ones_like(points[:, :1])], dim=1)
    return torch.einsum("tcij,pj->ptci", maps, homogeneous)


def filter_bank(filters: Tensor, ax: Axes) -> Axes:
    """Draw rows of a first layer under transformations; blue is negative, red is positive.

    Args:
        filters: Filters ``[rows, samples, channels, height, width]`` of
            ``variational.ShallowNetwork.filter_bank``; channels are averaged.
        ax: Axes to draw on.
    """
    if filters.ndim != 5:
        raise ValueError(
            "filter_bank draws [rows, samples, channels, height, width], "
            f"got shape {list(filters.shape)}"
        )
    tiles = torch.nn.functional.pad(filters.mean(2), (1, 1, 1, 1), value=math.nan).cpu()
    size = filters.abs().max().item()
    mosaic = rearrange(tiles, "r s h w -> (r h) (s w)")
    ax.imshow(mosaic, cmap="coolwarm", vmin=-size, vmax=size, interpolation="nearest")
    ax.set(xticks=[], yticks=[], xlabel="transformations", ylabel="features")
    hide_spines(ax)
    return ax
