"""Ranges, evidence, errors and spectra over epochs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from laplace_invariance.plots.style import (
    ACCENT,
    COLOURS,
    FAINT,
    INK,
    colour,
    legend_above,
    legend_beside,
    mark_epochs,
    tidy,
)
from laplace_invariance.plots.units import Unit, by_unit, in_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from laplace_invariance.metrics import JacobianSpectrum

__all__ = [
    "errors",
    "evidence",
    "evidence_terms",
    "learnt_range",
    "ranges_from_starts",
    "ranges_over_epochs",
    "search_trials",
    "spectra",
]


FEW = 12  # values of a curve up to which each has a mark


def learnt_range(
    epochs: Sequence[float], values: Tensor, truth: float | None, ax: Axes, ylabel: str = "range"
) -> Axes:
    """Plot magnitudes of one hyperparameter over epochs, with the true one dashed.

    Args:
        epochs: Epochs at which the values were taken.
        values: Magnitudes, one per epoch.
        truth: True magnitude; None if it is not known.
        ax: Axes to draw on.
        ylabel: Name of the hyperparameter.
    """
    ax.plot(epochs, values, label="learnt")
    if truth is not None:
        ax.axhline(truth, color="k", ls="--", lw=1, label="true")
    ax.set(xlabel="epoch", ylabel=ylabel, ylim=(0, None))
    ax.legend(loc="lower right", fontsize="small")
    return ax


def ranges_over_epochs(
    epochs: Sequence[float],
    values: Mapping[str, Sequence[float]],
    truth: Mapping[str, float] | None,
    axes: Sequence[Axes],
    *,
    size: tuple[int, int] | None = None,
    best_epoch: int | None = None,
    settled: int | None = None,
) -> Sequence[Axes]:
    """Plot ranges over epochs, those of each unit on axes of their own.

    Those that the data do not have, by ``truth`` zero or absent, are thin; of others the true value
    is dashed.

    Args:
        epochs: Epochs at which the values were taken.
        values: Magnitudes by name, one per epoch.
        truth: True magnitudes by name; None if they are not known.
        axes: Axes to draw on, as many as ``plots.by_unit(values, size)`` has units.
        size: Height and width of the images, for translations in pixels.
        best_epoch: Epoch whose ranges are kept, dotted.
        settled: Epoch after which ranges stay, shaded.
    """
    units = by_unit(values, size)
    for ax, (unit, names) in zip(axes, units.items(), strict=True):
        shown = {name: [in_unit(name, value, size) for value in values[name]] for name in names}
        true = {}
        for name in names:
            if truth is not None and truth.get(name):
                true[name] = in_unit(name, truth[name], size)
        _draw_ranges(epochs, shown, true, truth is None, ax)
        _limit(unit, [*true.values(), *(max(one) for one in shown.values())], ax)
        mark_epochs(ax, best_epoch, settled, epochs[-1])
        ax.set(xlabel="epoch", ylabel=unit.label)
        ax.locator_params(axis="x", integer=True)
        legend_above(tidy(ax))
    return axes


def _draw_ranges(
    epochs: Sequence[float],
    values: Mapping[str, Sequence[float]],
    truth: Mapping[str, float],
    all_thick: bool,
    ax: Axes,
) -> None:
    """Plot ranges of one unit, and dash what is true."""
    colours = {name: colour(i) for i, name in enumerate(values)}
    thick: dict[str, Any] = {"lw": 2.2}
    thin: dict[str, Any] = {"lw": 1.1, "alpha": 0.75}
    for name, curve in values.items():
        style = thick if all_thick or name in truth else thin
        label = name.replace("_", " ")
        marker = "o" if len(epochs) <= FEW else ""
        ax.plot(epochs, curve, marker=marker, ms=4, color=colours[name], label=label, **style)
    if truth:
        _dash(truth, colours, ax)


def _limit(unit: Unit, values: Sequence[float], ax: Axes) -> None:
    """Let an axis begin where ranges are closed, and end a little above the values."""
    top = max(unit.least, *values)
    room = 0.06 * (top - unit.closed)
    ax.set_ylim(unit.closed - room / 3, top + room)
    for step in unit.ticks:
        if top <= 4.5 * step:
            ax.set_yticks([step * i for i in range(int((top + room) / step) + 1)])
            return


def _dash(truth: Mapping[str, float], colours: Mapping[str, str], ax: Axes) -> None:
    """Dash true values: one that all share in ink, others in the colours of their ranges."""
    style: dict[str, Any] = {"ls": (0, (4, 3)), "lw": 1.3, "zorder": 4}
    if len(set(truth.values())) == 1:
        ax.axhline(next(iter(truth.values())), color=INK, label="true", **style)
        return
    for name, value in truth.items():
        ax.axhline(value, color=colours[name], label=f"true {name.replace('_', ' ')}", **style)


def ranges_from_starts(
    curves: Mapping[str, Sequence[Sequence[float]]], truth: float, ax: Axes
) -> Axes:
    """Plot a range over epochs, from several starts, with the true one dashed.

    Args:
        curves: Curves in degrees by method, one from every start, which is its first value.
        truth: True range.
        ax: Axes to draw on.
    """
    for i, (method, runs) in enumerate(curves.items()):
        line = ("-", ":")[i % 2]
        for k, values in enumerate(runs):
            label = None if k else method
            ax.plot(range(len(values)), values, color=COLOURS[i], ls=line, label=label)
    ax.axhline(truth, color="k", ls="--", lw=1, label="true")
    ax.set(xlabel="epoch", ylabel="rotation, ± degrees", ylim=(-4, 184), yticks=range(0, 181, 45))
    ax.legend(loc="best", fontsize="small")
    return ax


def evidence(epochs: Sequence[float], curves: dict[str, Sequence[float]], ax: Axes) -> Axes:
    """Plot log marginal likelihoods per datum over epochs.

    Args:
        epochs: Epochs at which the values were taken.
        curves: Values by name, one per epoch.
        ax: Axes to draw on.
    """
    for name, values in curves.items():
        ax.plot(epochs, values, label=name)
    ax.set(xlabel="epoch", ylabel="log evidence per datum")
    ax.legend(loc="lower right", fontsize="small")
    return ax


def evidence_terms(
    epochs: Sequence[float],
    terms: Mapping[str, Sequence[float]],
    ax: Axes,
    *,
    best_epoch: int | None = None,
    exact: float | None = None,
) -> Axes:
    """Plot the log evidence per datum over epochs, and the terms of which it is the sum.

    Args:
        epochs: Epochs at which the values were taken.
        terms: Values by name: the log evidence first, then log likelihood, minus half the log
            determinant ratio, minus half the scatter.
        ax: Axes to draw on.
        best_epoch: Epoch that the model is of, dotted.
        exact: Exact log evidence per datum at that epoch, a diamond.
    """
    (first, total), *others = terms.items()
    marker = "o" if len(epochs) <= FEW else ""
    for i, (name, values) in enumerate(others):
        ax.plot(epochs, values, marker=marker, ms=3.5, label=name, color=colour(i), lw=1.3)
    ax.plot(epochs, total, marker=marker, ms=4.5, label=first, color=INK, lw=2.4)
    if best_epoch is not None:
        mark_epochs(ax, best_epoch, None, best_epoch)
        if exact is not None:
            label = f"exact evidence: {exact:.3f}"
            ax.plot(best_epoch, exact, "D", color=ACCENT, mec="w", ms=8, label=label, zorder=5)
    ax.axhline(0, color=FAINT, lw=0.8, zorder=0)
    ax.set(xlabel="epoch", ylabel="nats per datum")
    ax.locator_params(axis="x", integer=True)
    return legend_beside(tidy(ax))


def errors(curves: Mapping[str, Sequence[float]], label: str, ax: Axes) -> Axes:
    """Plot errors over epochs, the first after one epoch, on a logarithmic scale.

    Args:
        curves: Positive values by name, one per epoch.
        label: Kind of error, for the axis.
        ax: Axes to draw on.
    """
    for name, values in curves.items():
        ax.plot(range(1, len(values) + 1), values, lw=1.8, label=name)
    ax.set(xlabel="epoch", ylabel=label, yscale="log")
    ax.grid(axis="y", color="0.9")
    ax.legend(fontsize="small")
    return ax


def spectra(
    epochs: Sequence[float], found: Sequence[JacobianSpectrum], ax: Axes, floor: float = 1e-3
) -> Axes:
    """Plot singular values of the Jacobian over epochs, and the sensitivity along orbits.

    The latter is 0 for an invariant network.

    Args:
        epochs: Epochs at which the spectra were taken.
        found: Spectra of ``metrics.SpectrumRecorder``.
        ax: Axes to draw on.
        floor: Smallest value that is drawn; smaller ones are drawn there.
    """
    label: str | None = "singular values"
    for values in zip(*(one.singular_values for one in found), strict=True):
        heights = [max(value, floor) for value in values]
        ax.plot(epochs, heights, color=COLOURS[0], lw=1, alpha=0.6, label=label)
        label = None  # once
    orbit = [max(one.orbit, floor) for one in found]
    ax.plot(epochs, orbit, color=COLOURS[1], lw=2.2, ls="--", label="along orbits")
    ax.set(xlabel="epoch", ylabel="change of output over change of input", yscale="log")
    ax.legend(loc="best", fontsize="small")
    return ax


def search_trials(
    names: Sequence[str],
    losses: Sequence[float],
    steps: Sequence[int],
    ax: Axes,
    best: int | None = None,
) -> Axes:
    """Draw by how much the candidates of a search lost, as bars from zero.

    Candidates that trained equally long are together, as only their evidences compare.

    Args:
        names: Candidates in words.
        losses: Evidence of each below that of the best after as many steps.
        steps: Number of steps of each on the weights.
        ax: Axes to draw on.
        best: Index of the candidate that training starts from.
    """
    order = sorted(range(len(names)), key=lambda i: (-steps[i], losses[i]))
    largest = max(max(losses), 1e-9)
    labels: dict[float, str] = {}
    headings: list[str] = []
    place = 0.0
    for i in order:
        heading = f"after {steps[i]} steps"
        if heading not in headings:
            place += 0.4 if headings else 0.0
            headings.append(heading)
            labels[place] = heading
            place += 1
        labels[place] = textwrap.shorten(names[i], 60, placeholder=" ...")
        ax.barh(place, losses[i], height=0.62, color=FAINT)
        text = f"{losses[i]:.3f}"
        color = INK
        if i == best:
            text, color = f"{text}  training starts here", ACCENT
            ax.plot(losses[i], place, "o", color=ACCENT, ms=6, clip_on=False)
        offset = losses[i] + 0.015 * largest
        ax.text(offset, place, text, fontsize="small", va="center", color=color)
        place += 1
    ax.set_yticks(list(labels), list(labels.values()))
    for label in ax.get_yticklabels():
        if label.get_text() in headings:
            label.set_fontweight("bold")
    ax.set(xlim=(0, 1.15 * largest), ylim=(place - 0.4, -0.6))
    ax.set_xlabel("evidence lost to the best after as many steps, nats per example")
    tidy(ax, "x").tick_params(axis="y", length=0)
    return ax
