"""Figures of whole tables: values against numbers, and predictions over the plane."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from laplace_invariance.plots.style import INK, colour, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["against", "predictive"]


def against(
    values: Mapping[str, Mapping[float, Sequence[float]]],
    ax: Axes,
    *,
    x: str,
    y: str,
    log_y: bool = False,
) -> Axes:
    """Plot means over runs against a number on a logarithmic scale, and single runs as dots.

    Args:
        values: Values of runs by name of the line, and by number.
        ax: Axes to draw on.
        x: What the number is.
        y: What the values are.
        log_y: Whether values are on a logarithmic scale, too.
    """
    numbers = sorted({number for line in values.values() for number in line})
    for i, (name, line) in enumerate(values.items()):
        xs = sorted(line)
        means = [statistics.fmean(line[number]) for number in xs]
        ax.plot(xs, means, "o-", color=colour(i), ms=5, lw=1.8, label=name)
        for number in xs:
            if len(line[number]) > 1:
                dots = [number] * len(line[number])
                ax.plot(dots, line[number], ".", color=colour(i), alpha=0.5)
    ax.set(xlabel=x, ylabel=y, xscale="log", yscale="log" if log_y else "linear")
    ax.set_xticks(numbers, [f"{number:g}" for number in numbers])
    ax.minorticks_off()
    tidy(ax).legend(loc="best", fontsize="small", frameon=False)
    return ax


def predictive(picture: Mapping[str, Any], ax: Axes) -> Axes:
    """Draw the probability of a class over a square of the plane, and the examples in it.

    Args:
        picture: ``probabilities`` as rows from the bottom to the top, ``reach`` of the square to
            either side of the origin, and, by name of the class, ``points`` with their coordinates.
        ax: Axes to draw on.
    """
    reach = picture["reach"]
    ax.imshow(
        picture["probabilities"],
        origin="lower",
        extent=(-reach, reach, -reach, reach),
        cmap="RdBu",
        vmin=0,
        vmax=1,
        interpolation="bilinear",
    )
    for points, marker in zip(picture["points"].values(), "xo", strict=False):
        xs, ys = zip(*points, strict=True)
        ax.plot(xs, ys, marker, color=INK, mfc="none", ms=4, mew=0.9, ls="")
    ax.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], yticks=[])
    return ax
