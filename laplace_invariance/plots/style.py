"""What all pictures have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "figure", "legend_beside"]

# matplotlib's cycle without its grey, and a dark blue
COLOURS = [f"C{i}" for i in range(10) if i != 7] + ["navy"]


def figure(size: tuple[float, float]) -> Figure:
    """Return a figure of so many inches that can be saved without a display, and without matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(made)
    return made


def legend_beside(ax: Axes) -> Axes:
    """Put the legend to the right of the axes."""
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small", frameon=False)
    return ax
