"""Pictures. Functions take and return matplotlib Axes; matplotlib is needed only when one is called."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace_invariance.augmentations import AffinePoints, Augmentation, LieGroup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from laplace_invariance.metrics import InvarianceReport, JacobianSpectrum
    from laplace_invariance.metrics.layers import LayerReport

# matplotlib's cycle without its grey, and a dark blue
COLOURS = [f"C{i}" for i in range(10) if i != 7] + ["navy"]
# of kinds of layers, the same in all pictures
KINDS = {"GCONV": "C2", "CONV": "C0", "S-CONV": "C9", "F-FC": "C1", "S-FC": "C6", "FC": "C3"}

__all__ = [
    "accuracies",
    "bound_by_range",
    "errors",
    "evidence",
    "evidence_terms",
    "figure",
    "filter_bank",
    "flow",
    "invariances",
    "layer_precisions",
    "layer_shares",
    "learnt_range",
    "orbit_codes",
    "probability_by_angle",
    "ranges_from_starts",
    "ranges_over_epochs",
    "samples",
    "shapes",
    "spectra",
]


def figure(size: tuple[float, float]) -> Figure:
    """Return a figure of so many inches that can be saved without a display, and without matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(made)
    return made


def shapes(points: Tensor, labels: Tensor, ax: Axes, columns: int = 6) -> Axes:
    """Draw point sets ``[n, n_points, 2]`` as closed polygons on a grid, coloured by label; grey is label 0."""
    rows = -(-len(points) // columns)
    for i, (polygon, label) in enumerate(zip(points, labels.tolist(), strict=True)):
        centre = torch.tensor([i % columns, rows - 1 - i // columns], dtype=polygon.dtype)
        line = polygon / 7 + centre
        colour = "0.6" if label == 0 else COLOURS[(label - 1) % len(COLOURS)]
        ax.fill(line[:, 0], line[:, 1], facecolor=colour, alpha=0.25)
        ax.plot(*torch.cat([line, line[:1]]).T, color=colour, lw=1)
        ax.plot(line[0, 0], line[0, 1], "o", color=colour, ms=3)
    ax.set(xticks=[], yticks=[], xlim=(-0.6, columns - 0.4), ylim=(-0.6, rows - 0.4))
    ax.set_aspect("equal")
    return ax


def probability_by_angle(
    degrees: Tensor, probabilities: Tensor, names: Sequence[str], true_degrees: float, ax: Axes
) -> Axes:
    """Plot predicted probabilities ``[angles, names]`` against the angle by which an example was turned."""
    for name, values in zip(names, probabilities.T, strict=True):
        ax.plot(degrees, values, label=name)
    for sign in (-1, 1):
        ax.axvline(sign * true_degrees, color="k", ls="--", lw=1, label="true range" if sign > 0 else None)
    ax.set(xlabel="turned by (degrees)", ylabel="mean predicted probability", xlim=(-180, 180), ylim=(0, 1.35))
    ax.set_xticks(range(-180, 181, 60))
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.legend(loc="upper center", fontsize="small")
    return ax


def learnt_range(epochs: Sequence[float], values: Tensor, truth: float | None, ax: Axes, ylabel: str = "range") -> Axes:
    """Plot magnitudes of one hyperparameter over epochs, with the true one dashed."""
    ax.plot(epochs, values, label="learnt")
    if truth is not None:
        ax.axhline(truth, color="k", ls="--", lw=1, label="true")
    ax.set(xlabel="epoch", ylabel=ylabel, ylim=(0, None))
    ax.legend(loc="lower right", fontsize="small")
    return ax


def evidence(epochs: Sequence[float], curves: dict[str, Sequence[float]], ax: Axes) -> Axes:
    """Plot log marginal likelihoods per datum over epochs."""
    for name, values in curves.items():
        ax.plot(epochs, values, label=name)
    ax.set(xlabel="epoch", ylabel="log evidence per datum")
    ax.legend(loc="lower right", fontsize="small")
    return ax


def ranges_over_epochs(
    epochs: Sequence[float], values: Mapping[str, Sequence[float]], truth: Mapping[str, float] | None, ax: Axes
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
        style: dict[str, Any] = {"lw": 2} if name in wanted else {"lw": 1, "alpha": 0.65, "zorder": 1}
        ax.plot(epochs, values[name], color=colours[name], label=name.replace("_", " "), **style)
    if truth is not None and wanted:
        _dash({name: truth[name] for name in wanted}, colours, ax)
    ax.set(xlabel="epoch", ylabel="range: rotation in radians, translation\nin half-widths, scale in log factors")
    ax.set_ylim(bottom=0)
    return _legend_beside(ax)


def _dash(truth: Mapping[str, float], colours: Mapping[str, str], ax: Axes) -> None:
    """Dash true values; one that several share is dashed in their colours in turn."""
    for name, value in truth.items():
        sharing = [other for other in truth if truth[other] == value]
        dashes = (8 * sharing.index(name), (6, 8 * len(sharing) - 6))  # where to start, (drawn, left out)
        ax.axhline(value, color=colours[name], ls=dashes, lw=1.2, zorder=1)
    ax.plot([], [], color="k", ls="--", lw=1.2, label="true value")


def _legend_beside(ax: Axes) -> Axes:
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small", frameon=False)
    return ax


@torch.no_grad()
def samples(
    augmentation: Augmentation, images: Tensor, n_samples: int, ax: Axes, title: str = "", *, seed: int = 0
) -> Axes:
    """Draw images, one per row, and beside each some samples of it under the augmentation.

    Args:
        augmentation: what to sample from.
        images: ``[n, channels, height, width]`` in [0, 1], grey or RGB.
        n_samples: samples per image.
        ax: to draw on.
        title: of the picture.
        seed: of the draws, so that pictures can be repeated.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"samples draws images [n, 1 or 3, height, width], got shape {list(images.shape)}")
    draws = augmentation.sample(len(images), n_samples, torch.Generator().manual_seed(seed))
    tiles = torch.cat([images.unsqueeze(1), augmentation.apply(images, draws)], dim=1)
    rows, columns, _, height, width = tiles.shape
    mosaic = tiles.permute(0, 3, 1, 4, 2).reshape(rows * height, columns * width, -1).clamp(0, 1)
    ax.imshow(mosaic.squeeze(-1).cpu(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    for i in range(1, columns):
        ax.axvline(i * width - 0.5, color="w", lw=5 if i == 1 else 1)
    for i in range(1, rows):
        ax.axhline(i * height - 0.5, color="w", lw=1)
    below: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center", "va": "top"}
    for text, centre in (("original", 0.5), ("samples", (columns + 1) / 2)):
        ax.annotate(text, (centre / columns, 0), (0, -4), fontsize="small", **below)
    ax.set(xticks=[], yticks=[], title=title)
    for spine in ax.spines.values():
        spine.set_visible(False)
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
            {"color": "k", "lw": 2.2} if i == 0 else {"color": COLOURS[(i - 1) % len(COLOURS)], "lw": 1.4}
        )
        ax.plot(epochs, values, label=name, **style)
    ax.axhline(0, color="0.8", lw=0.8, zorder=0)
    ax.set(xlabel="epoch", ylabel="nats per datum")
    return _legend_beside(ax)


def invariances(report: InvarianceReport, axes: Sequence[Axes], floor: float = 1e-6) -> Sequence[Axes]:
    """Draw the three measures of invariance on logarithmic scales, saliency as 1 - similarity, one mark per data set.

    Args:
        report: of ``metrics.invariance_report``.
        axes: three to draw on.
        floor: what is smaller is drawn there.
    """
    names = list(report.rows)
    kinds = dict.fromkeys(where for found in report.rows.values() for where in found)
    for ax, measure, title in zip(
        axes, ("predictive", "logit", "saliency"), ("predictive", "logit", "1 - saliency"), strict=True
    ):
        for i, where in enumerate(kinds):
            places = [(x, report.rows[name][where]) for x, name in enumerate(names) if where in report.rows[name]]
            values = [getattr(one, measure) for _, one in places]
            values = [max(1 - value if measure == "saliency" else value, floor) for value in values]
            xs = [x + 0.16 * (i - (len(kinds) - 1) / 2) for x, _ in places]
            ax.plot(xs, values, "osD^v"[i % 5], color=COLOURS[i % len(COLOURS)], ms=8, label=where)
        ax.set_xticks(range(len(names)), names, rotation=30, ha="right")
        ax.set(yscale="log", title=title, xlim=(-0.5, len(names) - 0.5), ylim=(floor / 3, 10))
        ax.grid(axis="y", color="0.9")
    _legend_beside(axes[-1])
    return axes


def spectra(epochs: Sequence[float], found: Sequence[JacobianSpectrum], ax: Axes, floor: float = 1e-3) -> Axes:
    """Plot singular values of the input-output Jacobian over epochs, and the reaction along orbits, which is 0 if invariant.

    Args:
        epochs: where the spectra were taken.
        found: of ``metrics.SpectrumRecorder``.
        ax: to draw on.
        floor: what is smaller is drawn there.
    """
    for i, values in enumerate(zip(*(one.singular_values for one in found), strict=True)):
        label = None if i else "singular values"
        ax.plot(epochs, [max(value, floor) for value in values], color=COLOURS[0], lw=1, alpha=0.6, label=label)
    orbit = [max(one.orbit, floor) for one in found]
    ax.plot(epochs, orbit, color=COLOURS[1], lw=2.2, ls="--", label="along orbits")
    ax.set(xlabel="epoch", ylabel="change of output over change of input", yscale="log")
    ax.legend(loc="best", fontsize="small")
    return ax


@torch.no_grad()
def flow(augmentation: LieGroup, ax: Axes, n_paths: int = 24, n_points: int = 5) -> Axes:
    """Draw where transformations of the plane take a grid of points on their way, ``exp(t c.G)`` for t from 0 to 1.

    Each point has a colour, and one faint line per draw ``c``: where few of them arrive they are pale. The square is the
    image. For images these are the positions that a pixel reads; as draws are symmetric, what is seen there moves alike.

    Args:
        augmentation: an ``AffineImage``, ``AffinePoints`` in two dimensions, or another group of 3 x 3 matrices.
        ax: to draw on.
        n_paths: number of draws.
        n_points: points along each side of the grid.
    """
    generators = getattr(augmentation, "generators", None)
    if generators is None or generators.shape[-1] != 3:
        found = type(augmentation).__name__ if generators is None else f"matrices {list(generators.shape[-2:])}"
        raise ValueError(f"flow draws affine groups of the plane, matrices [3, 3], got {found}")
    coefficients = augmentation.coefficients(augmentation.fixed(n_paths)[0])
    # a little off the centre, so that a rotation takes no point to another, and how far each goes is seen
    grid = torch.cartesian_prod(torch.linspace(-1, 0.85, n_points), torch.linspace(-0.9, 0.95, n_points))
    grid = grid.to(coefficients)
    paths = _paths(coefficients, generators, grid).cpu()
    for (x, y), lines in zip(grid.tolist(), paths, strict=True):
        colour = colorsys.hsv_to_rgb(math.atan2(y, x) / (2 * math.pi) % 1, 1.0, 0.75)
        ax.plot(lines[..., 0], lines[..., 1], color=colour, lw=1.5, alpha=0.2, solid_capstyle="butt")
        ax.plot(x, y, "o", color=colour, mec="k", mew=0.8, ms=5, zorder=4)
    ax.plot([-1, 1, 1, -1, -1], [-1, -1, 1, 1, -1], color="k", lw=1, zorder=3)
    ax.set(xlabel="x (half-widths)", ylabel="y (half-widths)")
    ax.set_aspect("equal")
    if isinstance(augmentation, AffinePoints):
        ax.set(xlabel="x", ylabel="y")
    elif not ax.yaxis_inverted():
        ax.invert_yaxis()
    return ax


def _paths(coefficients: Tensor, generators: Tensor, points: Tensor, n_times: int = 33) -> Tensor:
    """Return ``exp(t c.G) p`` as ``[points, times, paths, 2]`` for coefficients ``[paths, k]`` and points ``[points, 2]``."""
    times = torch.linspace(0, 1, n_times).to(coefficients)
    maps = torch.linalg.matrix_exp(torch.einsum("t,ck,kij->tcij", times, coefficients, generators))[..., :2, :]
    return torch.einsum("tcij,pj->ptci", maps, torch.cat([points, torch.ones_like(points[:, :1])], dim=1))


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
            (k + (i + 0.5) * width - 0.4, 100 * row[method]) for k, row in enumerate(table.values()) if method in row
        ]
        xs, heights = zip(*places, strict=True)
        bars = ax.bar(xs, heights, width=0.92 * width, color=COLOURS[i % len(COLOURS)], label=method)
        ax.bar_label(bars, fmt="%.1f", fontsize="small", padding=1)
    ax.set_xticks(range(len(table)), [kind.replace("_", " ") for kind in table])
    ax.tick_params(axis="x", length=0)
    ax.set(ylabel="test accuracy (%)", ylim=(bottom, min(104, 1.04 * 100 * max(values) + 1)))
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return _legend_beside(ax)


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
                    bars, [f"{share:.0f}"], label_type="center", fontsize="small", color="w", fontweight="bold"
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
            xs, [math.nan if row.precision is None else row.precision for row in rows], "o-", color=colour, lw=1.8, ms=6
        )
        dots = [
            (x, value)
            for x, row in zip(xs, rows, strict=True)
            for name, value in row.precisions.items()
            if not name.endswith("bias")
        ]
        ax.plot([x for x, _ in dots], [value for _, value in dots], ".", color=colour, alpha=0.45, ms=6, zorder=1)
    ax.set(ylabel="prior precision\n(large: the path is switched off)", yscale="log")
    ax.grid(axis="y", color="0.9")
    ax.set_axisbelow(True)
    return _over_layers(report, colours, ax, "o")


def _kind_colours(report: LayerReport) -> dict[str, str]:
    kinds = dict.fromkeys(row.kind for row in report.rows)
    others = [kind for kind in kinds if kind not in KINDS]
    spare = [colour for colour in COLOURS if colour not in KINDS.values()]
    return {kind: KINDS[kind] if kind in KINDS else spare[others.index(kind) % len(spare)] for kind in kinds}


def _over_layers(report: LayerReport, colours: Mapping[str, str], ax: Axes, marker: str) -> Axes:
    """Name the layers below, and the kinds of paths beside."""
    names = [place or "model" for place in report.places]
    crowded = sum(map(len, names)) > 80
    ax.set_xticks(range(len(names)), names, rotation=45 if crowded else 0, ha="right" if crowded else "center")
    ax.set_xlim(-0.6, len(names) - 0.4)
    for kind, colour in reversed(colours.items()):  # the last is on top of the bars
        ax.plot([], [], marker, color=colour, ms=8, label=kind)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return _legend_beside(ax)


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


def orbit_codes(codes: Sequence[Sequence[float]], ax: Axes) -> Axes:
    """Plot each entry of the codes of one thing, ``[transformations, entries]``, as a line over its transformations."""
    ax.plot(codes, ".-", lw=1, ms=4)
    ax.set(xlabel="transformation", ylabel="entries of the code")
    return ax


def ranges_from_starts(curves: Mapping[str, Sequence[Sequence[float]]], truth: float, ax: Axes) -> Axes:
    """Plot a range over epochs, from several starts, with the true one dashed.

    Args:
        curves: in degrees, by method, one from every start, which is its first value.
        truth: the true range.
        ax: to draw on.
    """
    for i, (method, runs) in enumerate(curves.items()):
        for k, values in enumerate(runs):
            ax.plot(range(len(values)), values, color=COLOURS[i], ls=("-", ":")[i % 2], label=None if k else method)
    ax.axhline(truth, color="k", ls="--", lw=1, label="true")
    ax.set(xlabel="epoch", ylabel="rotation, ± degrees", ylim=(-4, 184), yticks=range(0, 181, 45))
    ax.legend(loc="best", fontsize="small")
    return ax


def bound_by_range(bounds: Mapping[str, Sequence[tuple[float, float]]], truth: float, ax: Axes) -> Axes:
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
    ax.set(xlabel="rotation, ± degrees", ylabel="ELBO per datum", xlim=(-4, 184), xticks=range(0, 181, 45))
    ax.legend(loc="best", fontsize="small")
    return ax


def filter_bank(filters: Tensor, ax: Axes) -> Axes:
    """Draw rows of a first layer under transformations, one row each; blue is negative, red positive.

    Args:
        filters: ``[rows, samples, channels, height, width]``, of ``variational.ShallowNetwork.filter_bank``; channels are
            averaged.
        ax: to draw on.
    """
    if filters.ndim != 5:
        raise ValueError(f"filter_bank draws [rows, samples, channels, height, width], got shape {list(filters.shape)}")
    tiles = torch.nn.functional.pad(filters.mean(2), (1, 1, 1, 1), value=math.nan).cpu()
    size = filters.abs().max().item()
    mosaic = tiles.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    ax.imshow(mosaic, cmap="coolwarm", vmin=-size, vmax=size, interpolation="nearest")
    ax.set(xticks=[], yticks=[], xlabel="transformations", ylabel="features")
    for spine in ax.spines.values():
        spine.set_visible(False)
    return ax
