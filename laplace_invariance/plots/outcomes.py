"""Predictions, accuracies, bounds and invariances of trained networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from torch import Tensor

from laplace_invariance.plots.style import colour, hide_spines, legend_beside

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from laplace_invariance.marglik import Profile
    from laplace_invariance.metrics import Invariance, InvarianceReport

__all__ = [
    "accuracies",
    "bound_by_range",
    "evidence_by_range",
    "gains",
    "invariances",
    "orbit_codes",
    "probability_by_angle",
]

MEASURES = {"predictive": "predictive", "logit": "logit", "saliency": "1 - saliency"}  # and titles
UNITS = {"rotation": ", radians", "scale": ", logarithm of the factor"}


def accuracies(table: Mapping[str, Mapping[str, float]], ax: Axes) -> Axes:
    """Draw accuracies as bars, methods side by side within each kind of data.

    The axis starts below the smallest value, at a multiple of ten percent, so heights are not
    proportional to accuracies.

    Args:
        table: Accuracies in [0, 1] by kind of data and method; a kind may lack a method.
        ax: Axes to draw on.

    Raises:
        ValueError: If there are none, or they are not fractions.
    """
    values = list(chain.from_iterable(row.values() for row in table.values()))
    if not values or not all(0 <= value <= 1 for value in values):
        raise ValueError(f"accuracies must be between 0 and 1, and at least one, got {values}")
    methods = list(dict.fromkeys(chain.from_iterable(table.values())))
    width = 0.8 / len(methods)
    for i, method in enumerate(methods):
        with_method = [k for k, row in enumerate(table.values()) if method in row]
        xs = [k + (i + 0.5) * width - 0.4 for k in with_method]
        heights = [100 * row[method] for row in table.values() if method in row]
        bars = ax.bar(xs, heights, width=0.92 * width, color=colour(i), label=method)
        ax.bar_label(bars, fmt="%.1f", fontsize="small", padding=1)
    ax.set_xticks(range(len(table)), [kind.replace("_", " ") for kind in table])
    ax.tick_params(axis="x", length=0)
    bottom = max(0, 10 * math.floor(10 * min(values) - 0.5))
    top = min(104, 1.04 * 100 * max(values) + 1)
    ax.set(ylabel="test accuracy (%)", ylim=(bottom, top))
    hide_spines(ax, "top", "right")
    return legend_beside(ax)


def probability_by_angle(
    degrees: Tensor, probabilities: Tensor, names: Sequence[str], true_degrees: float, ax: Axes
) -> Axes:
    """Plot predicted probabilities against the angle by which an example was rotated.

    Args:
        degrees: Angles ``[angles]``.
        probabilities: Probabilities ``[angles, names]``.
        names: Names of the curves.
        true_degrees: True range, dashed on both sides.
        ax: Axes to draw on.
    """
    for name, values in zip(names, probabilities.T, strict=True):
        ax.plot(degrees, values, label=name)
    ax.axvline(-true_degrees, color="k", ls="--", lw=1)
    ax.axvline(true_degrees, color="k", ls="--", lw=1, label="true range")
    ax.set(xlabel="rotated by (degrees)", ylabel="mean predicted probability")
    ax.set(xlim=(-180, 180), ylim=(0, 1.35))
    ax.set_xticks(range(-180, 181, 60))
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.legend(loc="upper center", fontsize="small")
    return ax


def bound_by_range(
    bounds: Mapping[str, Sequence[tuple[float, float]]], truth: float, ax: Axes
) -> Axes:
    """Plot lower bounds on the evidence against ranges: fixed ones as a line, learnt ones as dots.

    Args:
        bounds: Pairs of a range in degrees and the bound per datum, by "fixed" and "learnt".
        truth: True range, dashed.
        ax: Axes to draw on.
    """
    for method, style, color in (("fixed", "s-", "C1"), ("learnt", "o", "C0")):
        pairs = sorted(bounds.get(method, ()))
        ax.plot([x for x, _ in pairs], [y for _, y in pairs], style, color=color, label=method)
    ax.axvline(truth, color="k", ls="--", lw=1, label="true")
    ax.set(xlabel="rotation, ± degrees", ylabel="ELBO per datum")
    ax.set(xlim=(-4, 184), xticks=range(0, 181, 45))
    ax.legend(loc="best", fontsize="small")
    return ax


def evidence_by_range(profile: Profile, truth: float | None, ax: Axes) -> Axes:
    """Plot the log evidence along a range, with the learnt value and the flat interval.

    Twice the standard error is shaded, if there is one, and so is the interval in which the
    evidence is nearly the best.

    Args:
        profile: Profile of ``li.profile``.
        truth: True width, dotted; None if it is not known.
        ax: Axes to draw on.
    """
    evidences = profile.evidences
    ax.axvspan(*profile.interval, color="C2", alpha=0.15, lw=0, label="nearly the best")
    if profile.errors is not None:
        pairs = list(zip(evidences, profile.errors, strict=True))
        low, high = ([one + sign * 2 * error for one, error in pairs] for sign in (-1, 1))
        ax.fill_between(profile.values, low, high, color="C0", alpha=0.25, lw=0)
    ax.plot(profile.values, evidences, "o-", color="C0", ms=4)
    words = profile.in_words(profile.learnt)
    ax.axvline(profile.learnt, color="k", ls="--", lw=1, label=f"learnt: {words}")
    if truth is not None:
        words = profile.in_words(truth)
        ax.axvline(truth, color="C3", ls=":", lw=1.5, label=f"true: {words}")
    unit = UNITS.get(profile.name.rpartition("_")[2].rpartition(".")[2], "")
    ax.set(xlabel=profile.name.replace("_", " ") + unit, ylabel="log evidence per example")
    ax.legend(loc="best", fontsize="small")
    return ax


def gains(
    names: Sequence[str],
    values: Sequence[float],
    errors: Sequence[float],
    are_clear: Sequence[bool],
    ax: Axes,
) -> Axes:
    """Draw gains in evidence as horizontal bars with their standard errors, the highest on top.

    Gains that are not clear are grey, others have the colour of their sign. A gain of minus
    infinity has no bar.

    Args:
        names: Names of the bars.
        values: Gains in log evidence per example.
        errors: Standard errors of the gains.
        are_clear: Whether the sign of each gain is clear.
        ax: Axes to draw on.
    """
    bars = sorted(zip(values, names, errors, are_clear, strict=True), reverse=True)
    for place, (value, _, error, is_clear) in enumerate(bars):
        if not math.isfinite(value):
            continue
        color = "0.75"
        if is_clear:
            color = colour(2 if value > 0 else 3)
        ax.barh(place, value, xerr=error, height=0.7, color=color, ecolor="0.2", capsize=2)
    ax.axvline(0, color="k", lw=1)
    ax.set_yticks(range(len(bars)), [name.replace("_", " ") for _, name, _, _ in bars])
    ax.set_ylim(len(bars) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("gain in log evidence per example (grey: not clear)")
    hide_spines(ax, "top", "right", "left")
    return ax


def invariances(
    report: InvarianceReport, axes: Sequence[Axes], floor: float = 1e-6
) -> Sequence[Axes]:
    """Draw the three measures of invariance on logarithmic scales, one mark per data set.

    Saliency is drawn as 1 - similarity.

    Args:
        report: Report of ``metrics.invariance_report``.
        axes: Three axes to draw on.
        floor: Smallest value that is drawn; smaller ones are drawn there.
    """
    names = list(report.rows)
    kinds = list(dict.fromkeys(where for found in report.rows.values() for where in found))
    for ax, (measure, title) in zip(axes, MEASURES.items(), strict=True):
        for i, where in enumerate(kinds):
            offset = 0.16 * (i - (len(kinds) - 1) / 2)
            rows = [
                (x, found[where]) for x, found in enumerate(report.rows.values()) if where in found
            ]
            xs = [x + offset for x, _ in rows]
            ys = [max(_error(one, measure), floor) for _, one in rows]
            ax.plot(xs, ys, "osD^v"[i % 5], color=colour(i), ms=8, label=where)
        ax.set_xticks(range(len(names)), names, rotation=30, ha="right")
        ax.set(yscale="log", title=title, xlim=(-0.5, len(names) - 0.5), ylim=(floor / 3, 10))
        ax.grid(axis="y", color="0.9")
    legend_beside(axes[-1])
    return axes


def _error(found: Invariance, measure: str) -> float:
    if measure == "saliency":
        return 1 - found.saliency
    return getattr(found, measure)


def orbit_codes(codes: Sequence[Sequence[float]], ax: Axes) -> Axes:
    """Plot the entries of the codes of one thing as lines over its transformations.

    Args:
        codes: Codes ``[transformations, entries]``.
        ax: Axes to draw on.
    """
    ax.plot(codes, ".-", lw=1, ms=4)
    ax.set(xlabel="transformation", ylabel="entries of the code")
    return ax
