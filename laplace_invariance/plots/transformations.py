"""Examples and weights under transformations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor

from laplace_invariance.augmentations import AffinePoints, Augmentation, LieGroup
from laplace_invariance.plots.style import FAINT, INK, colour, hide_spines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["filter_bank", "flow", "samples", "shapes"]

# Points of which a flow is drawn, at four distances from the centre and in four directions
POINTS = [
    (radius * math.cos(angle), radius * math.sin(angle))
    for radius, angle in ((0.3, 0.6), (0.58, 3.0), (0.86, 5.4), (1.14, 2.2))
]
VISIBLE = 0.02  # half-widths by which a range must move a point to be drawn


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
def flow(
    augmentation: LieGroup, ax: Axes, image: Tensor | None = None, *, n_samples: int = 250
) -> Axes:
    """Draw where a few points of the plane go: clouds of samples, and an arc per open range.

    An arc is the way under one range alone, ``exp(t G)`` for t from minus to plus its width. A
    cloud is that of samples of all ranges together. Points have different distances from the
    centre, so that full rotations do not meet. The square is the image. For images these are the
    positions that a pixel reads; as draws are symmetric, what is seen there is transformed alike.

    Args:
        augmentation: An ``AffineImage``, ``AffinePoints`` in two dimensions, or another group
            of 3 x 3 matrices.
        ax: Axes to draw on.
        image: Image ``[channels, height, width]`` in [0, 1] that is drawn faintly behind.
        n_samples: Number of samples in a cloud.

    Raises:
        ValueError: If the augmentation is not an affine group of the plane.
    """
    generators = _planar_generators(augmentation)
    points = torch.tensor(POINTS).to(generators)
    if image is not None:
        _draw_behind(image, ax)
    draws = augmentation.sample(1, n_samples, torch.Generator().manual_seed(0))[0]
    coefficients = augmentation.coefficients(draws)
    clouds = _moved(torch.einsum("ck,kij->cij", coefficients, generators), points).cpu()
    if (clouds - points.cpu()).norm(dim=-1).max() > VISIBLE:
        ax.plot(*clouds.flatten(0, 1).T, ".", color=INK, ms=3.5, alpha=0.22, mew=0, zorder=3)
    for i, (name, width) in enumerate(augmentation.magnitudes().items()):
        times = torch.linspace(-width, width, 129).to(generators)
        ways = _moved(times.view(-1, 1, 1) * generators[i], points).cpu()
        if (ways - points.cpu()).norm(dim=-1).max() <= VISIBLE:
            continue
        label = f"{name.replace('_', ' ')} {augmentation.in_words(name, width)}"
        ax.plot(*ways.unbind(-1), color=colour(i), lw=2.6, solid_capstyle="round", zorder=4)
        ax.plot(*ways[[0, -1]].flatten(0, 1).T, "o", color=colour(i), ms=5, mew=0, zorder=4)
        ax.plot([], [], color=colour(i), lw=2.6, label=label)
    ax.plot(*points.cpu().T, "o", color="w", mec=INK, mew=1.6, ms=7, zorder=5, label="points")
    ax.plot([-1, 1, 1, -1, -1], [-1, -1, 1, 1, -1], color=INK, lw=1, zorder=2)
    return _finish_flow(augmentation, ax)


def _finish_flow(augmentation: LieGroup, ax: Axes) -> Axes:
    """Set limits, labels and the direction of y."""
    ax.set(xlabel="x (half-widths)", ylabel="y (half-widths)")
    low = min(-1.35, *ax.dataLim.min)
    high = max(1.35, *ax.dataLim.max)
    side = min(max(-low, high), 3.0) + 0.05
    ax.set(xlim=(-side, side), ylim=(-side, side), xticks=[-1, 0, 1], yticks=[-1, 0, 1])
    ax.set_aspect("equal")
    if isinstance(augmentation, AffinePoints):
        ax.set(xlabel="x", ylabel="y")
    elif not ax.yaxis_inverted():
        ax.invert_yaxis()
    hide_spines(ax)
    ax.tick_params(color=FAINT, labelcolor=INK, labelsize="small")
    ax.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.1),
        ncols=2,
        fontsize="small",
        frameon=False,
    )
    return ax


def _draw_behind(image: Tensor, ax: Axes) -> None:
    """Show an image faintly, with the centres of its outermost pixels at -1 and 1."""
    _, height, width = image.shape
    x, y = (1 + 1 / max(side - 1, 1) for side in (width, height))
    shown = rearrange(image, "c h w -> h w c").clamp(0, 1).squeeze(-1).cpu()
    extent = (-x, x, y, -y)
    style: dict[str, Any] = {"vmin": 0, "vmax": 2.5, "interpolation": "bilinear", "alpha": 0.6}
    ax.imshow(shown, cmap="Greys", extent=extent, zorder=0, **style)


def _planar_generators(augmentation: Augmentation) -> Tensor:
    generators = getattr(augmentation, "generators", None)
    if generators is not None and generators.shape[-1] == 3:
        return generators
    found = type(augmentation).__name__
    if generators is not None:
        found = f"matrices {list(generators.shape[-2:])}"
    raise ValueError(f"flow draws affine groups of the plane, matrices [3, 3], got {found}")


def _moved(exponents: Tensor, points: Tensor) -> Tensor:
    """Return ``exp(A) p`` as ``[n, points, 2]`` for matrices ``A`` ``[n, 3, 3]``."""
    maps = torch.linalg.matrix_exp(exponents)[..., :2, :]
    homogeneous = torch.cat([points, torch.ones_like(points[:, :1])], dim=1)
    return torch.einsum("cij,pj->cpi", maps, homogeneous)


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
