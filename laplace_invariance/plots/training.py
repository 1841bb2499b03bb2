"""What changes over epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from laplace_invariance.plots.style import COLOURS, legend_beside

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
    "spectra",
]


def learnt_range(
    epochs: Sequence[float], values: Tensor, truth: float | None, ax: Axes, ylabel: str = "range"
) -> Axes:
    """Plot magnitudes of one hyperparameter over epochs, with the true one dashed."""
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
    """Plot the ranges of several transformations over epochs, each with its true value dashed in the same colour.

    Those that the data do not have, by ``truth`` zero or absent, are thin.

    Args:
        epochs: where the values were taken.
        values: magnitudes by name, each as long as ``epochs``.
        truth: true magnitudes by name; None if they are not known.
        ax: to draw on.
    """
    wanted = list(values) if truth is None else [name for name in values if truth.get(name)]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(values)}
    for name in [*wanted, *(name for name in values if name not in wanted)]:
        style: dict[str, Any] = (
            {"lw": 2} if name in wanted else {"lw": 1, "alpha": 0.65, "zorder": 1}
        )
        ax.plot(epochs, values[name], color=colours[name], label=name.replace("_", " "), **style)
    if truth is not None and wanted:
        _dash({name: truth[name] for name in wanted}, colours, ax)
    ax.set(
        xlabel="epoch",
        ylabel="range: rotation in radians, translation\nin half-widths, scale in log factors",
    )
    ax.set_ylim(bottom=0)
    return legend_beside(ax)


def _dash(truth: Mapping[str, float], colours: Mapping[str, str], ax: Axes) -> None:
    """Dash true values; one that several share is dashed in their colours in turn."""
    for name, value in truth.items():
        sharing = [other for other in truth if truth[other] == value]
        dashes = (
            8 * sharing.index(name),
            (6, 8 * len(sharing) - 6),
        )  # where to start, (drawn, left out)
        ax.axhline(value, color=colours[name], ls=dashes, lw=1.2, zorder=1)
    ax.plot([], [], color="k", ls="--", lw=1.2, label="true value")


def ranges_from_starts(
    curves: Mapping[str, Sequence[Sequence[float]]], truth: float, ax: Axes
) -> Axes:
    """Plot a range over epochs, from several starts, with the true one dashed.

    Args:
        curves: in degrees, by method, one from every start, which is its first value.
        truth: the true range.
        ax: to draw on.
    """
    for i, (method, runs) in enumerate(curves.items()):
        for k, values in enumerate(runs):
            ax.plot(
                range(len(values)),
                values,
                color=COLOURS[i],
                ls=("-", ":")[i % 2],
                label=None if k else method,
            )
    ax.axhline(truth, color="k", ls="--", lw=1, label="true")
    ax.set(xlabel="epoch", ylabel="rotation, ± degrees", ylim=(-4, 184), yticks=range(0, 181, 45))
    ax.legend(loc="best", fontsize="small")
    return ax


def evidence(epochs: Sequence[float], curves: dict[str, Sequence[float]], ax: Axes) -> Axes:
    """Plot log marginal likelihoods per datum over epochs."""
    for name, values in curves.items():
        ax.plot(epochs, values, label=name)
    ax.set(xlabel="epoch", ylabel="log evidence per datum")
    ax.legend(loc="lower right", fontsize="small")
    return ax


def evidence_terms(epochs: Sequence[float], terms: Mapping[str, Sequence[float]], ax: Axes) -> Axes:
    """Plot the log evidence per datum over epochs, and what it is the sum of.

    Args:
        epochs: where the values were taken.
        terms: values by name: the log evidence first, then log likelihood, minus half the log determinant ratio, minus half
            the scatter.
        ax: to draw on.
    """
    for i, (name, values) in enumerate(terms.items()):
        style: dict[str, Any] = (
            {"color": "k", "lw": 2.2}
            if i == 0
            else {"color": COLOURS[(i - 1) % len(COLOURS)], "lw": 1.4}
        )
        ax.plot(epochs, values, label=name, **style)
    ax.axhline(0, color="0.8", lw=0.8, zorder=0)
    ax.set(xlabel="epoch", ylabel="nats per datum")
    return legend_beside(ax)


def errors(curves: Mapping[str, Sequence[float]], label: str, ax: Axes) -> Axes:
    """Plot errors over epochs, the first after one epoch, on a logarithmic scale.

    Args:
        curves: positive values by name, one per epoch.
        label: what kind of error it is.
        ax: to draw on.
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
    """Plot singular values of the input-output Jacobian over epochs, and the reaction along orbits, which is 0 if invariant.

    Args:
        epochs: where the spectra were taken.
        found: of ``metrics.SpectrumRecorder``.
        ax: to draw on.
        floor: what is smaller is drawn there.
    """
    for i, values in enumerate(zip(*(one.singular_values for one in found), strict=True)):
        label = None if i else "singular values"
        ax.plot(
            epochs,
            [max(value, floor) for value in values],
            color=COLOURS[0],
            lw=1,
            alpha=0.6,
            label=label,
        )
    orbit = [max(one.orbit, floor) for one in found]
    ax.plot(epochs, orbit, color=COLOURS[1], lw=2.2, ls="--", label="along orbits")
    ax.set(xlabel="epoch", ylabel="change of output over change of input", yscale="log")
    ax.legend(loc="best", fontsize="small")
    return ax
