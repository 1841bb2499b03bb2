"""Predictions, accuracies, bounds and invariances of trained networks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from laplace_invariance.plots.style import (
    ACCENT,
    FAINT,
    INK,
    colour,
    hide_spines,
    legend_beside,
    tidy,
)
from laplace_invariance.plots.units import in_unit, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from laplace_invariance.marglik import Profile
    from laplace_invariance.metrics import Invariance, InvarianceReport

__all__ = [
    "bound_by_range",
    "by_method",
    "evidence_by_range",
    "gains",
    "invariances",
    "orbit_codes",
    "probability_by_angle",
]

MEASURES = {"predictive": "predictive", "logit": "logit", "saliency": "1 - saliency"}  # and titles
RAISED, GREY = "#2f8f5b", "0.78"  # what clearly raises the evidence, and what is not clear


def by_method(values: Mapping[str, Sequence[float]], form: str, ax: Axes) -> Axes:
    """Draw what methods reach, a dot per run, and the mean with its spread if there are several.

    Args:
        values: Values by method, one per run, the first method on top.
        form: How a mean is written beside its mark, such as ``"{:.1f}"``.
        ax: Axes to draw on.

    Raises:
        ValueError: If there is nothing to draw, or a method has no value.
    """
    if not values or not all(values.values()):
        raise ValueError(f"every method needs a value, and there must be one, got {dict(values)}")
    for place, found in enumerate(values.values()):
        mean = statistics.fmean(found)
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        if spread:
            ax.plot([mean - spread, mean + spread], [place, place], color=INK, lw=1.6, zorder=2)
            ax.plot(found, [place] * len(found), "o", color=FAINT, ms=5, mew=0, zorder=1)
        ax.plot(mean, place, "o", color=ACCENT, mec="w", ms=9, zorder=3)
        ax.annotate(
            form.format(mean),
            (mean, place),
            (0, 7),
            textcoords="offset points",
            ha="center",
            fontsize="small",
            color=INK,
        )
    ax.set_yticks(range(len(values)), list(values))
    ax.set_ylim(len(values) - 0.4, -0.75)
    ax.margins(x=0.12)
    tidy(ax, "both").tick_params(axis="y", length=0)
    return ax


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


def evidence_by_range(
    profile: Profile, ax: Axes, truth: float | None = None, size: tuple[int, int] | None = None
) -> Axes:
    """Plot the log evidence along a range, with the learnt value and the flat interval.

    Twice the standard error of what it is below the best is shaded, and so is the interval where
    it is nearly the best. The axis has the unit of the range: degrees, factors.

    Args:
        profile: Profile of ``li.profile``.
        ax: Axes to draw on.
        truth: True width, dotted; None if it is not known.
        size: Height and width of the images, for translations in pixels.
    """
    evidences = profile.evidences

    def place(value: float) -> float:
        return in_unit(profile.name, value, size)

    places = [place(value) for value in profile.values]
    low, high = profile.interval
    ax.axvspan(place(low), place(high), color="C2", alpha=0.15, lw=0, label="nearly the best")
    if profile.errors is not None:
        pairs = list(zip(evidences, profile.errors, strict=True))
        below, above = ([one + sign * 2 * error for one, error in pairs] for sign in (-1, 1))
        ax.fill_between(places, below, above, color="C0", alpha=0.25, lw=0)
    ax.plot(places, evidences, "o-", color="C0", ms=4.5, lw=1.8)
    words = profile.in_words(profile.learnt)
    ax.axvline(place(profile.learnt), color=INK, ls="--", lw=1.2, label=f"learnt: {words}")
    if truth is not None:
        words = profile.in_words(truth)
        ax.axvline(place(truth), color=ACCENT, ls=":", lw=1.8, label=f"true: {words}")
    unit = unit_of(profile.name, size)
    name = profile.name.replace("_", " ")
    ax.set(xlabel=f"{name}, {unit.label}", ylabel="log evidence per example, nats")
    tidy(ax).legend(loc="best", fontsize="small", frameon=False)
    return ax


def gains(
    names: Sequence[str],
    values: Sequence[float],
    errors: Sequence[float],
    are_clear: Sequence[bool],
    ax: Axes,
) -> Axes:
    """Draw gains in evidence as bars from zero with their standard errors, the highest on top.

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
        color = GREY
        if is_clear:
            color = RAISED if value > 0 else ACCENT
        ax.barh(place, value, xerr=error, height=0.66, color=color, ecolor=INK, capsize=2)
        side = math.copysign(1, value)
        ax.annotate(
            f"{value:+.3f}",
            (value + side * error, place),
            (4 * side, 0),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            va="center",
            fontsize="small",
            color=INK,
        )
    ax.axvline(0, color=INK, lw=1)
    ax.set_yticks(range(len(bars)), [name.replace("_", " ") for _, name, _, _ in bars])
    ax.set_ylim(len(bars) - 0.4, -0.6)
    ax.margins(x=0.14)
    ax.set_xlabel("gain in log evidence, nats per example")
    tidy(ax, "x").tick_params(axis="y", length=0)
    hide_spines(ax, "left")
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
