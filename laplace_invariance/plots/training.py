"""Ranges, evidence, errors and spectra over epochs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from laplace_invariance.plots.style import COLOURS, colour, legend_beside

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
    ax: Axes,
) -> Axes:
    """Plot the ranges of several transformations over epochs, each with its true value dashed.

    Those that the data do not have, by ``truth`` zero or absent, are thin.

    Args:
        epochs: Epochs at which the values were taken.
        values: Magnitudes by name, one per epoch.
        truth: True magnitudes by name; None if they are not known.
        ax: Axes to draw on.
    """
    wanted = [name for name in values if truth is None or truth.get(name)]
    others = [name for name in values if name not in wanted]
    colours = {name: colour(i) for i, name in enumerate(values)}
    thick: dict[str, Any] = {"lw": 2}
    thin: dict[str, Any] = {"lw": 1, "alpha": 0.65, "zorder": 1}
    for names, style in ((wanted, thick), (others, thin)):
        for name in names:
            label = name.replace("_", " ")
            ax.plot(epochs, values[name], color=colours[name], label=label, **style)
    if truth is not None and wanted:
        _dash({name: truth[name] for name in wanted}, colours, ax)
    ax.set(
        xlabel="epoch",
        ylabel="range: rotation in radians, translation\nin half-widths, scale in log factors",
    )
    ax.set_ylim(bottom=0)
    return legend_beside(ax)


def _dash(truth: Mapping[str, float], colours: Mapping[str, str], ax: Axes) -> None:
    """Dash true values; one that several share is dashed in their colours by turns."""
    for name, value in truth.items():
        sharing = [other for other in truth if truth[other] == value]
        start = 8 * sharing.index(name)
        drawn, left_out = 6, 8 * len(sharing) - 6
        ax.axhline(value, color=colours[name], ls=(start, (drawn, left_out)), lw=1.2, zorder=1)
    ax.plot([], [], color="k", ls="--", lw=1.2, label="true value")


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


def evidence_terms(epochs: Sequence[float], terms: Mapping[str, Sequence[float]], ax: Axes) -> Axes:
    """Plot the log evidence per datum over epochs, and the terms of which it is the sum.

    Args:
        epochs: Epochs at which the values were taken.
        terms: Values by name: the log evidence first, then log likelihood, minus half the log
            determinant ratio, minus half the scatter.
        ax: Axes to draw on.
    """
    (first, total), *others = terms.items()
    ax.plot(epochs, total, label=first, color="k", lw=2.2)
    for i, (name, values) in enumerate(others):
        ax.plot(epochs, values, label=name, color=colour(i), lw=1.4)
    ax.axhline(0, color="0.8", lw=0.8, zorder=0)
    ax.set(xlabel="epoch", ylabel="nats per datum")
    return legend_beside(ax)


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


def search_trials(losses: Mapping[str, float], steps: Mapping[str, int], ax: Axes) -> Axes:
    """Plot by how much the candidates of a search lost, in the colour of how long they trained.

    Args:
        losses: Evidence below that of the best after as many steps, by candidate in words.
        steps: Number of steps of each on the weights.
        ax: Axes to draw on.
    """
    lengths = sorted(set(steps.values()), reverse=True)
    for i, name in enumerate(losses):
        index = lengths.index(steps[name])
        first = steps[name] not in [steps[other] for other in list(losses)[:i]]
        label = f"{steps[name]} steps" if first else None
        ax.plot([0, losses[name]], [i, i], color=colour(index), lw=1)
        ax.plot(losses[name], i, "o", color=colour(index), ms=5, label=label)
    names = [name.replace("_", " ") for name in losses]
    ax.set_yticks(range(len(losses)), [textwrap.shorten(n, 60, placeholder=" ...") for n in names])
    ax.axvline(0, color="k", lw=1)
    ax.invert_yaxis()
    ax.set_xlabel("evidence lost to the best, nats per image")
    return legend_beside(ax)
