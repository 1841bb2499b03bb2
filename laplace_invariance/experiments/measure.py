"""Train networks that became invariant in different ways, and measure how far they are; what ``laplace-invariance measure`` runs.

The same network is trained on images as they are, on turned ones, with the invariance error as a penalty, averaged over the
group, and averaged with weights or ranges that the evidence learns. All are then measured on test images of the same kind and,
as invariance that was learnt from images need not hold for others, on images of another kind.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from laplace_invariance import datasets, plots
from laplace_invariance.augmentations import AffineImage, Augmentation, FiniteGroup
from laplace_invariance.experiments.base import claim
from laplace_invariance.experiments.learn import BATCH, MARGLIK_BATCH, TEST_BATCH, accuracy
from laplace_invariance.files import read_json, write_json
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.layers import Standardise, cnn
from laplace_invariance.marglik import MAP, Evidence, Objective, Regularised, marglik_training
from laplace_invariance.metrics import (
    Invariance,
    InvarianceError,
    InvarianceReport,
    JacobianSpectrum,
    SpectrumRecorder,
    invariance_report,
)

__all__ = [
    "GROUPS",
    "METHODS",
    "MeasuredNetwork",
    "Measurement",
    "MeasurementExperiment",
    "measure",
]

METHODS = {
    "plain": "trained on images as they are",
    "augmented": "every image turned afresh in every epoch",
    "regularised": "the same, and the invariance error added to the loss",
    "tied": "averaged over the group, so invariant by construction",
    "evidence": "averaged with weights or a range learnt by evidence, from images that were turned once",
}
# by name: all of the group, and where the evidence starts to learn it
GROUPS: dict[str, tuple[Callable[[], Augmentation], Callable[[], Augmentation]]] = {
    "quarter-turns": (
        lambda: FiniteGroup("quarter_turns", init=1.0).frozen(),
        lambda: FiniteGroup("quarter_turns", init=0.1),
    ),
    "rotations": (
        lambda: AffineImage(init={"rotation": math.pi}, draws="sobol").frozen(),
        lambda: AffineImage(init={"rotation": 0.1}, learn="rotation", draws="sobol"),
    ),
}
N_MEASURED = 22  # rotations to measure by: not a multiple of those that a network is averaged over, where it does best
N_SPECTRUM, N_SPECTRA = (
    64,
    20,
)  # test images that spectra are of, and how many are taken over training


@dataclass(frozen=True)
class MeasurementExperiment:
    """What is trained on what.

    Attributes:
        data: source of the images, as for ``datasets.load``.
        shifted: source of images of another kind, of the same size, whose test images are used; None are negatives of the
            test images.
        group: one of ``GROUPS``.
        n_samples: samples of networks averaged over rotations; also the rotations that they are measured with.
        n_epochs: epochs of training.
        n_train: training images; None is all.
        n_test: test images of either kind; None is all.
        strength: of the invariance error as a penalty.
        seed: of subsets, turns, weights and draws.
        root: directory of torchvision's data sets.
        download: fetch them.
    """

    data: str = "digits"
    shifted: str | None = None
    group: str = "quarter-turns"
    n_samples: int = 8
    n_epochs: int = 40
    n_train: int | None = None
    n_test: int | None = None
    strength: float = 0.1
    seed: int = 0
    root: str = "data"
    download: bool = False

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ValueError(f"unknown group {self.group!r}; choose from {', '.join(GROUPS)}")
        Regularised(InvarianceError("p4", self.n_samples), self.strength)
        if self.n_epochs < 1:
            raise ValueError(f"n_epochs must be positive, got {self.n_epochs}")


@dataclass(frozen=True)
class MeasuredNetwork:
    """One network, trained and measured.

    Attributes:
        accuracy: on test images as they are.
        accuracy_turned: on test images, each moved by a random element of the group.
        invariance: by data set.
        epochs: at which spectra were taken.
        spectra: of the Jacobian, as many.
        ranges: what was learnt by evidence, in words; empty for others.
        seconds: that training took.
    """

    accuracy: float
    accuracy_turned: float
    invariance: dict[str, Invariance]
    epochs: list[int]
    spectra: list[JacobianSpectrum]
    ranges: dict[str, str]
    seconds: float

    @classmethod
    def read(cls, path: Path) -> MeasuredNetwork:
        """Read what was written as JSON."""
        found = read_json(path)
        found["invariance"] = {
            where: Invariance(**one) for where, one in found["invariance"].items()
        }
        found["spectra"] = [
            JacobianSpectrum(tuple(one["singular_values"]), one["orbit"])
            for one in found["spectra"]
        ]
        return cls(**found)


@dataclass(frozen=True)
class Measurement:
    """All networks of an experiment, by method; prints as tables."""

    experiment: MeasurementExperiment
    networks: dict[str, MeasuredNetwork]

    @property
    def report(self) -> InvarianceReport:
        """The three measures, by method and data set."""
        return InvarianceReport(
            {method: network.invariance for method, network in self.networks.items()}
        )

    def __str__(self) -> str:
        e = self.experiment
        lines = [f"{Path(e.data).stem}, {e.group}, seed {e.seed}", "", str(self.report), ""]
        lines.append(
            f"{'network':<12} accuracy  turned  singular values  along orbits  relative  time"
        )
        for method, network in self.networks.items():
            last = network.spectra[-1]
            values = f"{last.singular_values[0]:.2f} to {last.singular_values[-1]:.2g}"
            lines.append(
                f"{method:<12} {network.accuracy:>8.1%}  {network.accuracy_turned:>6.1%}  {values:>15}  {last.orbit:>12.2g}  "
                f"{last.relative:>8.2g}  {network.seconds:.0f} s"
            )
            if network.ranges:
                lines.append(
                    f"{'':<12} learnt {', '.join(f'{name}: {words}' for name, words in network.ranges.items())}"
                )
        return "\n".join(lines)


def measure(
    experiment: MeasurementExperiment,
    methods: Sequence[str] = tuple(METHODS),
    out: str | Path | None = None,
    resume: bool = False,
    progress_bar: bool = False,
    say: Callable[[str], None] | None = None,
) -> Measurement:
    """Train networks and measure how invariant they are.

    Args:
        experiment: what to train on what.
        methods: some of ``METHODS``; all start with the same weights.
        out: directory for one JSON file per network, the tables (``report.txt``) and, where matplotlib is installed, the figures
            ``invariance.png`` and ``spectra.png``; None keeps nothing.
        resume: read networks that are finished in ``out``, and go on with the others.
        progress_bar: show one per network.
        say: told what is trained.
    """
    unknown = [method for method in methods if method not in METHODS]
    if unknown or not methods:
        raise ValueError(f"methods must be some of {', '.join(METHODS)}, got {unknown or 'none'}")
    out = None if out is None else Path(out)
    if out is not None:
        claim(out, experiment, resume)
    split, shifted = _data(experiment)
    whole = GROUPS[experiment.group][0]()
    whole.transform(split.x_test[:1], whole.fixed(1))  # refuses images that it cannot move
    if out is not None:
        write_json(out / "experiment.json", asdict(experiment))
    networks: dict[str, MeasuredNetwork] = {}
    finished = [
        method for method in METHODS if out is not None and (out / f"{method}.json").exists()
    ]
    for method in [method for method in METHODS if method in methods or method in finished]:
        path = None if out is None else out / f"{method}.json"
        if path is not None and path.exists():
            networks[method] = MeasuredNetwork.read(path)
            continue
        if say is not None:
            say(f"{method}: {METHODS[method]}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(experiment.seed)
            networks[method] = _measure(experiment, method, split, shifted, progress_bar)
        if path is not None:
            write_json(path, asdict(networks[method]))
    measurement = Measurement(experiment, networks)
    if out is not None:
        (out / "report.txt").write_text(f"{measurement}\n")
        _draw(measurement, out)
    return measurement


def _data(experiment: MeasurementExperiment) -> tuple[datasets.Split, dict[str, Tensor]]:
    """Return the images, and those to measure on, by name."""
    e = experiment
    options: dict[str, Any] = {
        "root": e.root,
        "download": e.download,
        "n_test": e.n_test,
        "seed": e.seed,
    }
    split = datasets.load(e.data, n_train=e.n_train, **options)
    if e.shifted is None:
        return split, {split.name: split.x_test, "negatives": 1 - split.x_test}
    other = datasets.load(e.shifted, **options)
    if other.name == split.name:
        raise ValueError(
            f"images and shifted images are both called {other.name!r}; give others, or rename a file"
        )
    if other.in_shape != split.in_shape:
        raise ValueError(
            f"images of {other.name} are {list(other.in_shape)}, and those of {split.name} {list(split.in_shape)}; the network "
            "needs one size"
        )
    return split, {split.name: split.x_test, other.name: other.x_test}


def _measure(
    experiment: MeasurementExperiment,
    method: str,
    split: datasets.Split,
    data: Mapping[str, Tensor],
    progress_bar: bool,
) -> MeasuredNetwork:
    whole, start = (make() for make in GROUPS[experiment.group])
    model: nn.Module = nn.Sequential(
        Standardise.of(split.x_train), *cnn(split.in_shape, split.n_classes)
    )
    if method in ("tied", "evidence"):
        model = InvariantModel(model, whole if method == "tied" else start, experiment.n_samples)
    turned = whole(split.x_test, torch.Generator().manual_seed(experiment.seed))
    recorder = SpectrumRecorder(
        split.x_test[:N_SPECTRUM],
        whole,
        n_samples=N_MEASURED,
        every=max(experiment.n_epochs // N_SPECTRA, 1),
    )
    result = marglik_training(
        model,
        callbacks=[recorder],
        objective=_objective(experiment, method, whole),
        progress_bar=progress_bar,
        **_loaders(method, whole, split),
        **_recipe(experiment, len(split.x_train)),
    )
    return MeasuredNetwork(
        *(
            accuracy(model, DataLoader(TensorDataset(x, split.y_test), TEST_BATCH))
            for x in (split.x_test, turned)
        ),
        invariance=invariance_report({method: model}, data, whole, n_samples=N_MEASURED).rows[
            method
        ],
        epochs=recorder.epochs,
        spectra=recorder.spectra,
        ranges=_learnt(start) if method == "evidence" else {},
        seconds=sum(sum(record["seconds"].values()) for record in result.history),
    )


def _learnt(augmentation: Augmentation) -> dict[str, str]:
    reach = augmentation.magnitudes()
    return {name: words for name, words in augmentation.ranges().items() if reach[name] > 0}


def _objective(experiment: MeasurementExperiment, method: str, group: Augmentation) -> Objective:
    if method == "regularised":
        return Regularised(InvarianceError(group), experiment.strength, MAP())
    return Evidence() if method == "evidence" else MAP()


def _loaders(method: str, group: Augmentation, split: datasets.Split) -> dict[str, DataLoader]:
    """Return the loaders of training and of the evidence."""

    def turn(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        x, y = default_collate(examples)
        return group(x), y

    images = TensorDataset(
        group(split.x_train) if method == "evidence" else split.x_train, split.y_train
    )
    collate = turn if method in ("augmented", "regularised") else None
    return {
        "train_loader": DataLoader(images, BATCH, shuffle=True, collate_fn=collate),
        "marglik_loader": DataLoader(images, MARGLIK_BATCH),
    }


def _recipe(experiment: MeasurementExperiment, n_train: int) -> dict[str, Any]:
    """Return the settings of training, the same for all methods."""
    return {
        "n_epochs": experiment.n_epochs,
        "optimizer_kwargs": {"lr": 5e-3},
        "scheduler_cls": torch.optim.lr_scheduler.CosineAnnealingLR,
        "scheduler_kwargs": {
            "T_max": experiment.n_epochs * math.ceil(n_train / BATCH),
            "eta_min": 5e-5,
        },
        "n_epochs_burnin": min(4, experiment.n_epochs - 1),
        "marglik_frequency": 2 if experiment.n_epochs > 4 else 1,
        "n_hypersteps": 4,
        "backend_kwargs": {"output_rank": 3},
    }


def _draw(measurement: Measurement, out: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        return
    e = measurement.experiment
    title = f"{Path(e.data).stem}, {e.group.replace('-', ' ')}"
    figure = plots.figure((12, 4))
    plots.invariances(measurement.report, figure.subplots(1, 3))
    figure.suptitle(f"{title}: 0 is invariant")
    figure.savefig(out / "invariance.png", dpi=120)
    figure = plots.figure((1 + 3 * len(measurement.networks), 4))
    panels = figure.subplots(1, len(measurement.networks), sharey=True, squeeze=False)[0]
    for ax, (method, network) in zip(panels, measurement.networks.items(), strict=True):
        plots.spectra(network.epochs, network.spectra, ax).set_title(method)
        ax.label_outer()
    figure.suptitle(f"{title}: reactions to small changes, and along orbits")
    figure.savefig(out / "spectra.png", dpi=120)
