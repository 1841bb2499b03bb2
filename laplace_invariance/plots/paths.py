"""Paths of layers: how much of each is in use, and their prior precisions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from laplace_invariance.layers.paths import PATHS
from laplace_invariance.plots.style import COLOURS, hide_spines, legend_beside

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from laplace_invariance.metrics import LayerReport

__all__ = ["layer_precisions", "layer_shares", "path_colours"]


def path_colours(report: LayerReport) -> dict[str, str]:
    """Return the colour of every kind of path in a report, the same in all pictures."""
    known = {kind.label: kind.colour for kind in PATHS.values()}
    spare = [colour for colour in COLOURS if colour not in known.values()]
    found: dict[str, str] = {}
    n_others = 0
    for row in report.rows:
        if row.kind in found:
            continue
        if row.kind in known:
            found[row.kind] = known[row.kind]
        else:
            found[row.kind] = spare[n_others % len(spare)]
            n_others += 1
    return found


def layer_shares(report: LayerReport, ax: Axes) -> Axes:
    """Draw how much of each path of a layer is in use, as bars that add up to 100 percent.

    A share is the path's effective parameters over its parameters, relative to the other paths
    of the layer. Colours are those of the kinds of paths.

    Args:
        report: Report of ``metrics.layer_report``.
        ax: Axes to draw on.
    """
    colours = path_colours(report)
    text = {"fontsize": "small", "color": "w", "fontweight": "bold"}
    for x, paths in enumerate(report.places.values()):
        bottom = 0.0
        for row in paths:
            share = 100 * (row.relative or 0.0)  # none where paths cannot be compared
            bars = ax.bar(x, share, 0.8, bottom, color=colours[row.kind], edgecolor="w")
            if share >= 8:
                ax.bar_label(bars, [f"{share:.0f}"], label_type="center", **text)
            bottom += share
    ax.set(ylabel="effective parameters per parameter,\nshare of the layer (%)", ylim=(0, 100))
    return _over_layers(report, colours, ax, "s")


def layer_precisions(report: LayerReport, ax: Axes) -> Axes:
    """Plot the prior precision of each path over layers, on a logarithmic scale.

    For a path with several weight tensors it is the largest; faint dots are those of the others.
    Colours are those of the kinds of paths.

    Args:
        report: Report of ``metrics.layer_report``.
        ax: Axes to draw on.
    """
    colours = path_colours(report)
    places = list(report.places)
    for path, kind in dict.fromkeys((row.path, row.kind) for row in report.rows):
        rows = [row for row in report.rows if (row.path, row.kind) == (path, kind)]
        xs = [places.index(row.place) for row in rows]
        largest = [math.nan if row.precision is None else row.precision for row in rows]
        ax.plot(xs, largest, "o-", color=colours[kind], lw=1.8, ms=6)
        dots: list[tuple[float, float]] = []
        for x, row in zip(xs, rows, strict=True):
            dots += [(x, y) for name, y in row.precisions.items() if not name.endswith("bias")]
        ax.plot(*_columns(dots), ".", color=colours[kind], alpha=0.45, ms=6, zorder=1)
    ax.set(ylabel="prior precision\n(large: the path is switched off)", yscale="log")
    ax.grid(axis="y", color="0.9")
    ax.set_axisbelow(True)
    return _over_layers(report, colours, ax, "o")


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _over_layers(report: LayerReport, colours: Mapping[str, str], ax: Axes, marker: str) -> Axes:
    """Name the layers below, and the kinds of paths beside."""
    names = [place or "model" for place in report.places]
    if sum(map(len, names)) > 80:
        ax.set_xticks(range(len(names)), names, rotation=45, ha="right")
    else:
        ax.set_xticks(range(len(names)), names, rotation=0, ha="center")
    ax.set_xlim(-0.6, len(names) - 0.4)
    for kind in reversed(list(colours)):  # the last is on top of the bars
        ax.plot([], [], marker, color=colours[kind], ms=8, label=kind)
    hide_spines(ax, "top", "right")
    return legend_beside(ax)
