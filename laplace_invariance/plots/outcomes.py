"""What trained networks do, and how well."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from laplace_invariance.plots.style import COLOURS, legend_beside

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from laplace_invariance.metrics import InvarianceReport

__all__ = ["accuracies", "bound_by_range", "invariances", "orbit_codes", "probability_by_angle"]


def accuracies(table: Mapping[str, Mapping[str, float]], ax: Axes) -> Axes:
    """Draw accuracies as bars, methods side by side within each kind of data.

    The axis starts below the smallest value, at a multiple of ten percent, so heights are not proportional to accuracies.

    Args:
        table: by kind of data and method, in [0, 1]; a kind may lack a method.
        ax: to draw on.
    """
    values = [value for row in table.values() for value in row.values()]
    if not values or not all(0 <= value <= 1 for value in values):
        raise ValueError(f"accuracies must be between 0 and 1, and at least one, got {values}")
    methods = list(dict.fromkeys(method for row in table.values() for method in row))
    bottom = max(0, 10 * math.floor(10 * min(values) - 0.5))
    width = 0.8 / len(methods)
    for i, method in enumerate(methods):
        places = [
            (k + (i + 0.5) * width - 0.4, 100 * row[method])
            for k, row in enumerate(table.values())
            if method in row
        ]
        xs, heights = zip(*places, strict=True)
        bars = ax.bar(
            xs, heights, width=0.92 * width, color=COLOURS[i % len(COLOURS)], label=method
        )
        ax.bar_label(bars, fmt="%.1f", fontsize="small", padding=1)
    ax.set_xticks(range(len(table)), [kind.replace("_", " ") for kind in table])
    ax.tick_params(axis="x", length=0)
    ax.set(ylabel="test accuracy (%)", ylim=(bottom, min(104, 1.04 * 100 * max(values) + 1)))
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return legend_beside(ax)


def probability_by_angle(
    degrees: Tensor, probabilities: Tensor, names: Sequence[str], true_degrees: float, ax: Axes
) -> Axes:
    """Plot predicted probabilities ``[angles, names]`` against the angle by which an example was turned."""
    for name, values in zip(names, probabilities.T, strict=True):
        ax.plot(degrees, values, label=name)
    for sign in (-1, 1):
        ax.axvline(
            sign * true_degrees, color="k", ls="--", lw=1, label="true range" if sign > 0 else None
        )
    ax.set(
        xlabel="turned by (degrees)",
        ylabel="mean predicted probability",
        xlim=(-180, 180),
        ylim=(0, 1.35),
    )
    ax.set_xticks(range(-180, 181, 60))
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.legend(loc="upper center", fontsize="small")
    return ax


def bound_by_range(
    bounds: Mapping[str, Sequence[tuple[float, float]]], truth: float, ax: Axes
) -> Axes:
    """Plot lower bounds on the evidence against ranges: of those that were fixed as a line, of learnt ones as dots.

    Args:
        bounds: by "fixed" and "learnt", pairs of a range in degrees and the bound per datum.
        truth: the true range, dashed.
        ax: to draw on.
    """
    for method, style, colour in (("fixed", "s-", "C1"), ("learnt", "o", "C0")):
        pairs = sorted(bounds.get(method, ()))
        ax.plot([x for x, _ in pairs], [y for _, y in pairs], style, color=colour, label=method)
    ax.axvline(truth, color="k", ls="--", lw=1, label="true")
    ax.set(
        xlabel="rotation, ± degrees",
        ylabel="ELBO per datum",
        xlim=(-4, 184),
        xticks=range(0, 181, 45),
    )
    ax.legend(loc="best", fontsize="small")
    return ax


def invariances(
    report: InvarianceReport, axes: Sequence[Axes], floor: float = 1e-6
) -> Sequence[Axes]:
    """Draw the three measures of invariance on logarithmic scales, saliency as 1 - similarity, one mark per data set.

    Args:
        report: of ``metrics.invariance_report``.
        axes: three to draw on.
        floor: what is smaller is drawn there.
    """
    names = list(report.rows)
    kinds = dict.fromkeys(where for found in report.rows.values() for where in found)
    for ax, measure, title in zip(
        axes,
        ("predictive", "logit", "saliency"),
        ("predictive", "logit", "1 - saliency"),
        strict=True,
    ):
        for i, where in enumerate(kinds):
            places = [
                (x, report.rows[name][where])
                for x, name in enumerate(names)
                if where in report.rows[name]
            ]
            values = [getattr(one, measure) for _, one in places]
            values = [max(1 - value if measure == "saliency" else value, floor) for value in values]
            xs = [x + 0.16 * (i - (len(kinds) - 1) / 2) for x, _ in places]
            ax.plot(xs, values, "osD^v"[i % 5], color=COLOURS[i % len(COLOURS)], ms=8, label=where)
        ax.set_xticks(range(len(names)), names, rotation=30, ha="right")
        ax.set(yscale="log", title=title, xlim=(-0.5, len(names) - 0.5), ylim=(floor / 3, 10))
        ax.grid(axis="y", color="0.9")
    legend_beside(axes[-1])
    return axes


def orbit_codes(codes: Sequence[Sequence[float]], ax: Axes) -> Axes:
    """Plot each entry of the codes of one thing, ``[transformations, entries]``, as a line over its transformations."""
    ax.plot(codes, ".-", lw=1, ms=4)
    ax.set(xlabel="transformation", ylabel="entries of the code")
    return ax
