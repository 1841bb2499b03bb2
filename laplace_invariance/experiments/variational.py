"""Learn ranges of transformations by a lower bound on the evidence, from several starts.

A shallow network with invariant weights (``variational.ShallowNetwork``) is trained several times
on the same images: with ranges that the ELBO learns, with ranges that are fixed, and with ranges
that the likelihood alone may change.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import TensorDataset

from laplace_invariance import datasets, plots
from laplace_invariance.augmentations import AffineImage
from laplace_invariance.experiments.base import (
    accuracy,
    load_transformed,
    say,
    seeded,
)
from laplace_invariance.experiments.choices import VARIATIONAL_METHODS, VariationalMethod
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.options import VariationalConfig
from laplace_invariance.experiments.results import transform_words
from laplace_invariance.tables import table
from laplace_invariance.variational import ShallowNetwork, fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["VariationalConfig", "VariationalResult", "VariationalRun", "variational"]

EVALUATION_BATCH = 100  # images at a time when the network is evaluated
N_OUTPUTS_DRAWN = 32  # draws of outputs in the expected log likelihood


@dataclass(frozen=True)
class VariationalRun:
    """One run, from one start.

    Attributes:
        method: How the ranges were learnt.
        start: Ranges at the start, in degrees.
        elbo: Lower bound on the log evidence per training image; None for a point estimate.
        log_likelihood: Log likelihood per training image, expected unless of a point estimate.
        accuracy: Accuracy on the test images.
        seconds: Duration of training.
        ranges: Ranges at the start and after every epoch, by name: radians, half-widths of the
            image, logarithms of factors.
    """

    method: VariationalMethod
    start: float
    elbo: float | None
    log_likelihood: float
    accuracy: float
    seconds: float
    ranges: dict[str, list[float]]

    @property
    def magnitudes(self) -> dict[str, float]:
        """Ranges at the end, by name."""
        return {name: values[-1] for name, values in self.ranges.items()}


@dataclass(frozen=True)
class VariationalResult:
    """All runs of an experiment; prints as a table.

    Attributes:
        config: Configuration of the experiment.
        runs: Runs in the order of ``config.plan``.
    """

    config: VariationalConfig
    runs: list[VariationalRun]

    def best(self, method: VariationalMethod) -> VariationalRun | None:
        """Return the run with the highest bound; None if no run has one.

        Args:
            method: Method of the run.
        """
        bounds = {run.elbo: run for run in self.of(method) if run.elbo is not None}
        if not bounds:
            return None
        return bounds[max(bounds)]

    def of(self, method: VariationalMethod) -> list[VariationalRun]:
        """Return the runs of a method.

        Args:
            method: Method of the runs.
        """
        return [run for run in self.runs if run.method == method]

    def summary(self) -> dict[str, Any]:
        """Return configuration and runs, for JSON."""
        return {"experiment": asdict(self.config), "runs": [asdict(run) for run in self.runs]}

    def __str__(self) -> str:
        config = self.config
        words = transform_words(config.transform)
        true = {name: value for name, value in _truth(config).items() if value}
        if true:  # of images as they are, no truth is known
            words += f" (true: {plots.short_words(true)})"
        head = f"{config.data}, {words}, seed {config.seed}"
        rows = [_row(run) for run in self.runs]
        cells = [list(rows[0]), *(list(row.values()) for row in rows)]
        parts = [head, table(cells, right=(1, 3, 4, 5, 6), gap=3)]
        learnt, fixed = self.best("learnt"), self.best("fixed")
        if learnt is not None and fixed is not None:
            parts.append(
                f"best bound: {learnt.elbo:.3f} learnt, {fixed.elbo:.3f} fixed "
                f"(at {plots.short_words(fixed.magnitudes)})"
            )
        return "\n\n".join(parts)


def _row(run: VariationalRun) -> dict[str, str]:
    """Return the cells of a run, by the names of their columns."""
    elbo = "-"
    if run.elbo is not None:
        elbo = f"{run.elbo:.3f}"
    return {
        "method": run.method,
        "start": f"{run.start:.1f}",
        "ranges": plots.short_words(run.magnitudes),
        "ELBO per image": elbo,
        "log likelihood": f"{run.log_likelihood:.3f}",
        "test accuracy": f"{run.accuracy:.1%}",
        "time": f"{run.seconds:.0f} s",
    }


def variational(
    config: VariationalConfig,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    progress_bar: bool = False,
) -> VariationalResult:
    """Train a shallow network from several starts, and learn how far images were transformed.

    Args:
        config: Images, ranges and their starts, network and training.
        out: Directory for ``summary.json``, written after every run, and figures: ``ranges.png``,
            ranges over epochs and, of rotations, the bound over ranges, and ``filters.png``, rows
            of the first layer under the transformations that were learnt last; None keeps nothing.
        resume: Whether to continue in ``out``, run by run.
        progress_bar: Whether to show progress.

    Returns:
        Ranges, bound and accuracy of every run.
    """
    with RunDirectory(out, config, resume) as directory:
        runs = _read_runs(directory)
        if len(runs) == len(config.plan):
            return VariationalResult(config, runs)
        split = load_transformed(config, config.transform, config.seed)
        with seeded(config.seed):  # what cannot be built raises before anything is written
            _model(config, *config.plan[0], split)
        directory.begin()
        result = VariationalResult(config, _read_runs(directory))
        for method, start in config.plan[len(result.runs) :]:
            say(f"{VARIATIONAL_METHODS[method]}, from ±{start:g} degrees", progress_bar)
            with seeded(config.seed):
                model = _model(config, method, start, split)
                result.runs.append(_run(config, method, start, model, split, progress_bar))
            directory.save("summary.json", result.summary())
            _draw(directory, result, model)
    return result


def _read_runs(directory: RunDirectory) -> list[VariationalRun]:
    summary = directory.finished() or {"runs": []}
    return [VariationalRun(**run) for run in summary["runs"]]


def _truth(config: VariationalConfig) -> dict[str, float]:
    return datasets.true_ranges(config.transform)


def _model(
    config: VariationalConfig, method: VariationalMethod, start: float, split: datasets.Split
) -> ShallowNetwork:
    augmentation = AffineImage(init=math.radians(start), learn=config.learn, draws=config.draws)
    if method == "fixed":
        augmentation = augmentation.frozen()
    return ShallowNetwork(
        augmentation,
        split.in_shape,
        split.n_classes,
        config.n_features,
        activation=config.activation,
        n_samples=config.n_samples,
        length_scale=config.length_scale,
        output_scale=config.output_scale,
        blur=config.blur,
    )


def _run(
    config: VariationalConfig,
    method: VariationalMethod,
    start: float,
    model: ShallowNetwork,
    split: datasets.Split,
    progress_bar: bool,
) -> VariationalRun:
    began = time.perf_counter()
    history = fit(
        model,
        split.x_train,
        split.y_train,
        objective="point" if method == "point" else "elbo",
        n_epochs=config.n_epochs,
        batch_size=config.batch_size,
        lr=config.lr,
        lr_mean=config.lr_mean,
        lr_hyper=config.lr_hyper,
        n_epochs_burnin=config.n_epochs_burnin,
        progress_bar=progress_bar,
    )
    seconds = time.perf_counter() - began
    ranges: dict[str, list[float]] = {
        name: [math.radians(start), *(record["ranges"][name] for record in history)]
        for name in config.learn
    }
    log_likelihood = _log_likelihood(model, split, method)
    elbo = None
    if method != "point":
        elbo = log_likelihood - model.kl().item() / len(split.y_train)
    test = TensorDataset(split.x_test, split.y_test)
    return VariationalRun(
        method=method,
        start=start,
        elbo=elbo,
        log_likelihood=log_likelihood,
        accuracy=accuracy(model, test, EVALUATION_BATCH),
        seconds=seconds,
        ranges=ranges,
    )


def _log_likelihood(
    model: ShallowNetwork, split: datasets.Split, method: VariationalMethod
) -> float:
    """Return the log likelihood per training image as in training, with draws for every batch."""

    def of_batch(x: Tensor, y: Tensor) -> Tensor:
        if method == "point":
            return model.log_likelihood(model(x), y)
        return model.expected_log_likelihood(x, y, N_OUTPUTS_DRAWN)

    total = 0.0
    inputs = split.x_train.split(EVALUATION_BATCH)
    labels = split.y_train.split(EVALUATION_BATCH)
    for x, y in zip(inputs, labels, strict=True):
        total += of_batch(x, y).sum().item()
    return total / len(split.y_train)


def _degrees(runs: list[VariationalRun]) -> list[list[float]]:
    """Return the ranges of rotations of runs, in degrees."""
    return [[math.degrees(value) for value in run.ranges["rotation"]] for run in runs]


def _bounds(runs: list[VariationalRun]) -> list[tuple[float, float]]:
    """Return the last ranges of rotations, in degrees, and the bounds that runs have."""
    pairs = zip(_degrees(runs), (run.elbo for run in runs), strict=True)
    return [(degrees[-1], elbo) for degrees, elbo in pairs if elbo is not None]


def _draw(directory: RunDirectory, result: VariationalResult, model: ShallowNetwork) -> None:
    config, last = result.config, result.runs[-1]
    title = f"{Path(config.data).stem}, {config.transform.replace('_', ' ')}"
    truth = _truth(config)

    def rotations(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        curves = {method: _degrees(result.of(method)) for method in ("learnt", "point")}
        bounds = {method: _bounds(result.of(method)) for method in ("fixed", "learnt")}
        true_degrees = math.degrees(truth["rotation"])
        plots.ranges_from_starts(curves, true_degrees, left)
        plots.bound_by_range(bounds, true_degrees, right)
        figure.suptitle(title)

    def ranges(figure: Figure) -> None:
        axes = figure.subplots(1, len(plots.by_unit(config.learn)), squeeze=False)[0]
        epochs = range(config.n_epochs + 1)
        plots.ranges_over_epochs(epochs, last.ranges, truth, axes)
        figure.suptitle(title)

    def filters(figure: Figure) -> None:
        ax = plots.filter_bank(model.filter_bank(4), figure.subplots())
        ax.set_title(f"{title}: {plots.short_words(last.magnitudes)}")

    draw = rotations if config.learn == ("rotation",) else ranges
    directory.figure("ranges.png", (10, 4.5), draw)
    if last.method == "learnt":
        directory.figure("filters.png", (8, 4.5), filters)
