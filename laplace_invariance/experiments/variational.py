"""Recover from images how far they were turned, from several starts; what ``laplace-invariance variational`` runs.

A shallow network with invariant weights (``variational.ShallowNetwork``) is trained several times on the same images: with a
range that the ELBO learns, with ranges that are fixed, and with a range that the likelihood alone may move.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from laplace_invariance import datasets, plots
from laplace_invariance.augmentations import AffineImage
from laplace_invariance.experiments.base import claim
from laplace_invariance.files import read_json, write_json
from laplace_invariance.variational import ShallowNetwork, fit

__all__ = ["METHODS", "TRANSFORMS", "Recovery", "RecoveryExperiment", "Run", "recover"]

METHODS = {
    "learnt": "range learnt by the ELBO",
    "fixed": "range fixed, all else learnt by the ELBO",
    "point": "range learnt by the likelihood at a point estimate",
}
TRANSFORMS = ("fully_rotated", "partially_rotated", "original")
EVALUATED_AT_ONCE, OUTPUTS_DRAWN = 100, 32


@dataclass(frozen=True)
class RecoveryExperiment:
    """What is learnt from what.

    Attributes:
        data: source of the images, as for ``datasets.load``.
        transform: how they are turned, one of ``TRANSFORMS``.
        learnt: starts of ranges of rotations, in degrees, each of a run in which the ELBO learns it.
        fixed: ranges, each of a run in which it stays.
        point: starts, each of a run with a point estimate.
        activation, n_features, n_samples, length_scale, output_scale, blur: as for ``variational.ShallowNetwork``.
        draws: of transformations, as for ``AffineImage``; "grid" is deterministic. The mean over independent ones is the noisier
            the wider their range, so that no range is learnt that is wider than need be.
        n_epochs, batch_size, lr, lr_mean, lr_hyper, n_epochs_burnin: as for ``variational.fit``.
        n_train: training images; None is all.
        n_test: test images; None is all.
        seed: of subset, rotations, weights and draws.
        root: directory of torchvision's data sets.
        download: fetch them.
    """

    data: str = "digits"
    transform: str = "fully_rotated"
    learnt: tuple[float, ...] = (5.0,)
    fixed: tuple[float, ...] = ()
    point: tuple[float, ...] = ()
    activation: str = "cosine"
    n_features: int = 256
    n_samples: int = 16
    length_scale: float = 3.0
    output_scale: float = 8.0
    blur: float = 0.1
    draws: str = "independent"
    n_epochs: int = 15
    batch_size: int = 128
    lr: float = 0.02
    lr_mean: float = 0.3
    lr_hyper: float = 0.1
    n_epochs_burnin: int = 1
    n_train: int | None = None
    n_test: int | None = None
    seed: int = 0
    root: str = "data"
    download: bool = False

    def __post_init__(self) -> None:
        if self.transform not in TRANSFORMS:
            raise ValueError(
                f"unknown transform {self.transform!r}; choose from {', '.join(TRANSFORMS)}"
            )
        for method in METHODS:
            starts = tuple(map(float, getattr(self, method)))  # lists, if read from JSON
            object.__setattr__(self, method, starts)
            if not all(0 <= start <= 180 for start in starts):
                raise ValueError(
                    f"ranges of {method} must be between 0 and 180 degrees, got {starts}"
                )
        if not self.plan:
            raise ValueError(f"there is nothing to run; give at least one of {', '.join(METHODS)}")
        for name in ("n_epochs", "batch_size", "lr", "lr_mean", "lr_hyper"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.n_epochs <= self.n_epochs_burnin:
            raise ValueError(
                f"n_epochs must be above the {self.n_epochs_burnin} of burn-in, in which ranges stay, got {self.n_epochs}"
            )

    @property
    def plan(self) -> list[tuple[str, float]]:
        """Method and start of every run."""
        return [
            (method, start) for method in METHODS for start in dict.fromkeys(getattr(self, method))
        ]


@dataclass(frozen=True)
class Run:
    """What one run found: ranges are in degrees, bound and log likelihood per training image; a point estimate has no bound."""

    method: str
    start: float
    range: float
    elbo: float | None
    log_likelihood: float
    accuracy: float
    seconds: float
    ranges: list[float]


@dataclass(frozen=True)
class Recovery:
    """What all runs found."""

    experiment: RecoveryExperiment
    runs: list[Run]

    def best(self, method: str) -> Run | None:
        """Return the run of a method with the highest bound, if there is one."""
        found = [run for run in self.runs if run.method == method and run.elbo is not None]
        return max(found, key=lambda run: run.elbo, default=None)

    def __str__(self) -> str:
        e = self.experiment
        truth = math.degrees(datasets.true_ranges(e.transform)["rotation"])
        lines = [
            f"{e.data}, {e.transform.replace('_', ' ')} (true range ±{truth:.0f} degrees), seed {e.seed}",
            "",
            "method   start   range   ELBO per image   log likelihood   test accuracy   time",
        ]
        for run in self.runs:
            elbo = "-" if run.elbo is None else f"{run.elbo:.3f}"
            lines.append(
                f"{run.method:<8} {run.start:5.1f}   {run.range:5.1f} {elbo:>16} {run.log_likelihood:16.3f} "
                f"{run.accuracy:15.1%} {run.seconds:4.0f} s"
            )
        learnt, fixed = self.best("learnt"), self.best("fixed")
        if learnt is not None and fixed is not None:
            lines += [
                "",
                f"best bound: {learnt.elbo:.3f} learnt, {fixed.elbo:.3f} fixed (at ±{fixed.range:.0f} degrees)",
            ]
        return "\n".join(lines)


def recover(
    experiment: RecoveryExperiment,
    out: str | Path | None = None,
    resume: bool = False,
    progress_bar: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Recovery:
    """Run an experiment.

    Args:
        experiment: what to run.
        out: directory for ``result.json``, written after every run, and figures, where matplotlib is installed: ``ranges.png``,
            ranges over epochs and the bound over ranges, and ``filters.png``, rows of the first layer under the transformations
            that were learnt last; None keeps nothing.
        resume: go on with what is in ``out``, run by run.
        progress_bar: show one for every run.
        say: prints in words what is run.
    """
    out = None if out is None else Path(out)
    runs: list[Run] = []
    if out is not None:
        claim(out, experiment, resume)
        if (out / "result.json").exists():
            runs = [Run(**run) for run in read_json(out / "result.json")]
    if len(runs) == len(experiment.plan):
        return Recovery(experiment, runs)
    data = _data(experiment)
    with torch.random.fork_rng(devices=[]):
        _model(
            experiment, *experiment.plan[0], data
        )  # refuses what cannot be, before anything is written
    if out is not None:
        write_json(out / "experiment.json", asdict(experiment))
    for method, start in experiment.plan[len(runs) :]:
        say(f"{METHODS[method]}, from ±{start:g} degrees")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(experiment.seed)
            run, model = _run(experiment, method, start, data, progress_bar)
        runs.append(run)
        if out is not None:
            write_json(out / "result.json", [asdict(run) for run in runs])
            _draw(Recovery(experiment, runs), model, out)
    return Recovery(experiment, runs)


def _data(experiment: RecoveryExperiment) -> datasets.Split:
    split = datasets.load(
        experiment.data,
        root=experiment.root,
        download=experiment.download,
        n_train=experiment.n_train,
        n_test=experiment.n_test,
        seed=experiment.seed,
    )
    generator = torch.Generator().manual_seed(experiment.seed)
    turned = {
        name: datasets.transformed(getattr(split, name), experiment.transform, generator)
        for name in ("x_train", "x_test")
    }
    return datasets.Split(**vars(split) | turned)


def _model(
    e: RecoveryExperiment, method: str, start: float, data: datasets.Split
) -> ShallowNetwork:
    augmentation = AffineImage(
        init={"rotation": math.radians(start)}, learn="rotation", draws=e.draws
    )
    return ShallowNetwork(
        augmentation.frozen() if method == "fixed" else augmentation,
        data.in_shape,
        data.n_classes,
        e.n_features,
        activation=e.activation,
        n_samples=e.n_samples,
        length_scale=e.length_scale,
        output_scale=e.output_scale,
        blur=e.blur,
    )


def _run(
    e: RecoveryExperiment, method: str, start: float, data: datasets.Split, progress_bar: bool
) -> tuple[Run, ShallowNetwork]:
    model = _model(e, method, start, data)
    began = time.perf_counter()
    history = fit(
        model,
        data.x_train,
        data.y_train,
        objective="point" if method == "point" else "elbo",
        n_epochs=e.n_epochs,
        batch_size=e.batch_size,
        lr=e.lr,
        lr_mean=e.lr_mean,
        lr_hyper=e.lr_hyper,
        n_epochs_burnin=e.n_epochs_burnin,
        progress_bar=progress_bar,
    )
    seconds = time.perf_counter() - began
    ranges = [start, *(math.degrees(record["ranges"]["rotation"]) for record in history)]
    expected, accuracy = _evaluated(model, data, method)
    elbo = None if method == "point" else expected - model.kl().item() / len(data.y_train)
    return Run(method, start, ranges[-1], elbo, expected, accuracy, seconds, ranges), model


def _evaluated(model: ShallowNetwork, data: datasets.Split, method: str) -> tuple[float, float]:
    """Return the (expected) log likelihood per training image and the test accuracy.

    The former is that of training, with draws for every part of the images; predictions have their fixed draws.
    """

    def log_likelihood(x: Tensor, y: Tensor) -> Tensor:
        if method == "point":
            return model.log_likelihood(model(x), y)
        return model.expected_log_likelihood(x, y, OUTPUTS_DRAWN)

    parts = zip(
        data.x_train.split(EVALUATED_AT_ONCE), data.y_train.split(EVALUATED_AT_ONCE), strict=True
    )
    expected = sum(log_likelihood(x, y).sum().item() for x, y in parts) / len(data.y_train)
    with torch.no_grad():
        predicted = torch.cat([model(x).argmax(-1) for x in data.x_test.split(EVALUATED_AT_ONCE)])
    return expected, (predicted == data.y_test).double().mean().item()


def _draw(found: Recovery, model: ShallowNetwork, out: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        return
    e, last = found.experiment, found.runs[-1]
    title = f"{Path(e.data).stem}, {e.transform.replace('_', ' ')}"
    truth = math.degrees(datasets.true_ranges(e.transform)["rotation"])
    curves = {
        method: [run.ranges for run in found.runs if run.method == method]
        for method in ("learnt", "point")
    }
    figure = plots.figure((10, 4.5))
    left, right = figure.subplots(1, 2)
    plots.ranges_from_starts(curves, truth, left)
    bounds = {
        m: [(run.range, run.elbo) for run in found.runs if run.method == m]
        for m in ("fixed", "learnt")
    }
    plots.bound_by_range(bounds, truth, right)
    figure.suptitle(title)
    figure.savefig(out / "ranges.png", dpi=120)
    if last.method == "learnt":
        figure = plots.figure((8, 4.5))
        plots.filter_bank(model.filter_bank(4), figure.subplots()).set_title(
            f"{title}: ±{last.range:.0f} degrees"
        )
        figure.savefig(out / "filters.png", dpi=120)
