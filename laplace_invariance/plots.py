"""Pictures. Functions take and return matplotlib Axes; matplotlib is needed only when one is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# matplotlib's cycle without its grey, and a dark blue
COLOURS = [f"C{i}" for i in range(10) if i != 7] + ["navy"]

__all__ = ["evidence", "learnt_range", "probability_by_angle", "shapes"]


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


def probability_by_angle(
    degrees: Tensor, probabilities: Tensor, names: Sequence[str], true_degrees: float, ax: Axes
) -> Axes:
    """Plot predicted probabilities ``[angles, names]`` against the angle by which an example was turned."""
    for name, values in zip(names, probabilities.T, strict=True):
        ax.plot(degrees, values, label=name)
    for sign in (-1, 1):
        ax.axvline(sign * true_degrees, color="k", ls="--", lw=1, label="true range" if sign > 0 else None)
    ax.set(xlabel="turned by (degrees)", ylabel="mean predicted probability", xlim=(-180, 180), ylim=(0, 1.35))
    ax.set_xticks(range(-180, 181, 60))
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.legend(loc="upper center", fontsize="small")
    return ax


def learnt_range(epochs: Sequence[float], values: Tensor, truth: float | None, ax: Axes, ylabel: str = "range") -> Axes:
    """Plot magnitudes of one hyperparameter over epochs, with the true one dashed."""
    ax.plot(epochs, values, label="learnt")
    if truth is not None:
        ax.axhline(truth, color="k", ls="--", lw=1, label="true")
    ax.set(xlabel="epoch", ylabel=ylabel, ylim=(0, None))
    ax.legend(loc="lower right", fontsize="small")
    return ax


def evidence(epochs: Sequence[float], curves: dict[str, Sequence[float]], ax: Axes) -> Axes:
    """Plot log marginal likelihoods per datum over epochs."""
    for name, values in curves.items():
        ax.plot(epochs, values, label=name)
    ax.set(xlabel="epoch", ylabel="log evidence per datum")
    ax.legend(loc="lower right", fontsize="small")
    return ax
