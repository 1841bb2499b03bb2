"""Paths of layers: how much of each is in use, and their prior precisions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from laplace_invariance.plots.style import COLOURS, legend_beside

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from laplace_invariance.metrics.layers import LayerReport

__all__ = ["KINDS", "layer_precisions", "layer_shares"]

# of kinds of layers, the same in all pictures
KINDS = {"GCONV": "C2", "CONV": "C0", "S-CONV": "C9", "F-FC": "C1", "S-FC": "C6", "FC": "C3"}


def layer_shares(report: LayerReport, ax: Axes) -> Axes:
    """Draw how much of each path of a layer is in use, as bars that add up to 100 percent, coloured by kind of path.

    A share is the path's effective parameters over its parameters, relative to the other paths of the layer.

    Args:
        report: of ``metrics.layers.layer_report``.
        ax: to draw on.
    """
    colours = _kind_colours(report)
    for x, paths in enumerate(report.places.values()):
        bottom = 0.0
        for row in paths:
            share = 100 * (row.relative or 0.0)  # none where paths cannot be compared
            bars = ax.bar(x, share, 0.8, bottom, color=colours[row.kind], edgecolor="w")
            if share >= 8:
                ax.bar_label(
                    bars,
                    [f"{share:.0f}"],
                    label_type="center",
                    fontsize="small",
                    color="w",
                    fontweight="bold",
                )
            bottom += share
    ax.set(ylabel="effective parameters per parameter,\nshare of the layer (%)", ylim=(0, 100))
    return _over_layers(report, colours, ax, "s")


def layer_precisions(report: LayerReport, ax: Axes) -> Axes:
    """Plot the prior precision of each path over layers, on a logarithmic scale, coloured by kind of path.

    Of a path with several weight tensors it is the largest; faint dots are those of the others.

    Args:
        report: of ``metrics.layers.layer_report``.
        ax: to draw on.
    """
    colours = _kind_colours(report)
    places = list(report.places)
    for path in dict.fromkeys((row.path, row.kind) for row in report.rows):
        rows = [row for row in report.rows if (row.path, row.kind) == path]
        colour = colours[path[1]]
        xs = [places.index(row.place) for row in rows]
        ax.plot(
            xs,
            [math.nan if row.precision is None else row.precision for row in rows],
            "o-",
            color=colour,
            lw=1.8,
            ms=6,
        )
        dots = [
            (x, value)
            for x, row in zip(xs, rows, strict=True)
            for name, value in row.precisions.items()
            if not name.endswith("bias")
        ]
        ax.plot(
            [x for x, _ in dots],
            [value for _, value in dots],
            ".",
            color=colour,
            alpha=0.45,
            ms=6,
            zorder=1,
        )
    ax.set(ylabel="prior precision\n(large: the path is switched off)", yscale="log")
    ax.grid(axis="y", color="0.9")
    ax.set_axisbelow(True)
    return _over_layers(report, colours, ax, "o")


def _kind_colours(report: LayerReport) -> dict[str, str]:
    kinds = dict.fromkeys(row.kind for row in report.rows)
    others = [kind for kind in kinds if kind not in KINDS]
    spare = [colour for colour in COLOURS if colour not in KINDS.values()]
    return {
        kind: KINDS[kind] if kind in KINDS else spare[others.index(kind) % len(spare)]
        for kind in kinds
    }


def _over_layers(report: LayerReport, colours: Mapping[str, str], ax: Axes, marker: str) -> Axes:
    """Name the layers below, and the kinds of paths beside."""
    names = [place or "model" for place in report.places]
    crowded = sum(map(len, names)) > 80
    ax.set_xticks(
        range(len(names)), names, rotation=45 if crowded else 0, ha="right" if crowded else "center"
    )
    ax.set_xlim(-0.6, len(names) - 0.4)
    for kind, colour in reversed(colours.items()):  # the last is on top of the bars
        ax.plot([], [], marker, color=colour, ms=8, label=kind)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return legend_beside(ax)
