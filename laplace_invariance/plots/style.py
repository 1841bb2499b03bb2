"""Colours, figures and ornaments of all pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "colour", "figure", "hide_spines", "legend_beside"]

# matplotlib's cycle without its grey, and a dark blue
COLOURS = [f"C{i}" for i in range(10) if i != 7] + ["navy"]


def colour(index: int) -> str:
    """Return a colour by its number, from the start again after the last."""
    return COLOURS[index % len(COLOURS)]


def figure(size: tuple[float, float]) -> Figure:
    """Return a figure that can be saved without a display, and without matplotlib's global state.

    Args:
        size: Width and height in inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(made)
    return made


def legend_beside(ax: Axes) -> Axes:
    """Put the legend to the right of the axes."""
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small", frameon=False)
    return ax


def hide_spines(ax: Axes, *sides: str) -> None:
    """Hide the lines around the axes at some sides, or at all."""
    for side in sides or ax.spines:
        ax.spines[side].set_visible(False)
