"""Learn a range of rotations by a lower bound on the evidence, from several starts.

A shallow network with invariant weights (``variational.ShallowNetwork``) is trained several times
on the same images: with a range that the ELBO learns, with ranges that are fixed, and with a range
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
        method: How the range was learnt.
        start: Range at the start, in degrees.
        range: Range at the end, in degrees.
        elbo: Lower bound on the log evidence per training image; None for a point estimate.
        log_likelihood: Log likelihood per training image, expected unless of a point estimate.
        accuracy: Accuracy on the test images.
        seconds: Duration of training.
        ranges: Range at the start and after every epoch, in degrees.
    """

    method: VariationalMethod
    start: float
    range: float
    elbo: float | None
    log_likelihood: float
    accuracy: float
    seconds: float
    ranges: list[float]


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
        if config.transform != "original":  # only then is a truth known
            words += f" (true range ±{_true_degrees(config):.0f} degrees)"
        head = f"{config.data}, {words}, seed {config.seed}"
        rows = [_row(run) for run in self.runs]
        cells = [list(rows[0]), *(list(row.values()) for row in rows)]
        parts = [head, table(cells, right=range(1, 7), gap=3)]
        learnt, fixed = self.best("learnt"), self.best("fixed")
        if learnt is not None and fixed is not None:
            parts.append(
                f"best bound: {learnt.elbo:.3f} learnt, {fixed.elbo:.3f} fixed "
                f"(at ±{fixed.range:.0f} degrees)"
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
        "range": f"{run.range:.1f}",
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
    """Train a shallow network from several starts, and learn how far images were rotated.

    Args:
        config: Images, starts of the range, network and training.
        out: Directory for ``summary.json``, written after every run, and figures: ``ranges.png``,
            ranges over epochs and the bound over ranges, and ``filters.png``, rows of the first
            layer under the rotations that were learnt last; None keeps nothing.
        resume: Whether to continue in ``out``, run by run.
        progress_bar: Whether to show progress.

    Returns:
        Range, bound and accuracy of every run.
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


def _true_degrees(config: VariationalConfig) -> float:
    return math.degrees(datasets.true_ranges(config.transform)["rotation"])


def _model(
    config: VariationalConfig, method: VariationalMethod, start: float, split: datasets.Split
) -> ShallowNetwork:
    augmentation = AffineImage(
        init={"rotation": math.radians(start)}, learn="rotation", draws=config.draws
    )
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
    ranges = [start, *(math.degrees(record["ranges"]["rotation"]) for record in history)]
    log_likelihood = _log_likelihood(model, split, method)
    elbo = None
    if method != "point":
        elbo = log_likelihood - model.kl().item() / len(split.y_train)
    test = TensorDataset(split.x_test, split.y_test)
    return VariationalRun(
        method=method,
        start=start,
        range=ranges[-1],
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


def _bounds(runs: list[VariationalRun]) -> list[tuple[float, float]]:
    return [(run.range, run.elbo) for run in runs if run.elbo is not None]


def _draw(directory: RunDirectory, result: VariationalResult, model: ShallowNetwork) -> None:
    config, last = result.config, result.runs[-1]
    title = f"{Path(config.data).stem}, {config.transform.replace('_', ' ')}"
    truth = _true_degrees(config)

    def ranges(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        curves = {
            "learnt": [run.ranges for run in result.of("learnt")],
            "point": [run.ranges for run in result.of("point")],
        }
        bounds = {"fixed": _bounds(result.of("fixed")), "learnt": _bounds(result.of("learnt"))}
        plots.ranges_from_starts(curves, truth, left)
        plots.bound_by_range(bounds, truth, right)
        figure.suptitle(title)

    def filters(figure: Figure) -> None:
        ax = plots.filter_bank(model.filter_bank(4), figure.subplots())
        ax.set_title(f"{title}: ±{last.range:.0f} degrees")

    directory.figure("ranges.png", (10, 4.5), ranges)
    if last.method == "learnt":
        directory.figure("filters.png", (8, 4.5), filters)
