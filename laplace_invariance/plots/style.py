"""Colours, figures and ornaments of all pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "ACCENT",
    "COLOURS",
    "FAINT",
    "INK",
    "colour",
    "figure",
    "hide_spines",
    "legend_above",
    "legend_beside",
    "mark_epochs",
    "tidy",
]

INK, ACCENT, FAINT = "#22303c", "#c8452d", "#9aa5ad"

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


def legend_above(ax: Axes) -> Axes:
    """Put the legend on a line above the axes, in the place of a title."""
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=4,
        fontsize="small",
        frameon=False,
        borderaxespad=0.1,
        handlelength=1.6,
        columnspacing=1.4,
        borderpad=0.2,
    )
    return ax


def tidy(ax: Axes, grid: Literal["x", "y", "both"] = "y") -> Axes:
    """Leave two spines and a faint grid, behind what is drawn.

    Args:
        ax: Axes to change.
        grid: Axis whose ticks have lines of the grid: ``"x"``, ``"y"`` or ``"both"``.
    """
    hide_spines(ax, "top", "right")
    for side in ("left", "bottom"):
        ax.spines[side].set_color(FAINT)
    ax.tick_params(color=FAINT, labelcolor=INK, labelsize="small")
    ax.grid(axis=grid, color="0.92", lw=0.8)
    ax.set_axisbelow(True)
    return ax


def mark_epochs(ax: Axes, best: int | None, settled: int | None, last: float) -> Axes:
    """Mark the epoch that is kept, and those in which only weights are learnt.

    Args:
        ax: Axes over epochs.
        best: Epoch that the model is of; None marks none.
        settled: Epoch after which only weights are learnt; None, or the last, marks none.
        last: Last epoch.
    """
    small: dict[str, Any] = {"fontsize": "x-small", "color": INK, "va": "top"}
    top = ax.get_xaxis_transform()  # epochs, and heights from 0 to 1
    if settled is not None and settled < last:
        ax.axvspan(settled, last, color="0.5", alpha=0.1, lw=0, zorder=0)
        middle = (settled + last) / 2
        ax.text(middle, 0.6, "only\nweights", transform=top, ha="center", alpha=0.7, **small)
    if best is not None:
        ax.axvline(best, color=INK, ls=":", lw=1.2, zorder=1)
        ax.text(best, 0.99, f"kept: {best} ", transform=top, ha="right", **small)
    return ax
