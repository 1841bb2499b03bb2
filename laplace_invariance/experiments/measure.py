"""Measure how invariant networks are that became so in different ways.

The same network is trained on images as they are, on transformed ones, with the invariance error as
a penalty, with that of saliency maps as well, averaged over the group, and averaged with weights or
ranges that the evidence learns. All are measured on test images of the same kind and on images of
another kind, since invariance that was learnt from images need not hold for others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from laplace_invariance import datasets, plots
from laplace_invariance.augmentations import AffineImage, Augmentation, FiniteGroup
from laplace_invariance.experiments.base import (
    BATCH,
    MARGLIK_BATCH,
    Recipe,
    accuracy,
    cosine_recipe,
    image_model,
    load_images,
    say,
    seeded,
    training_seconds,
)
from laplace_invariance.experiments.choices import MEASURE_METHODS, MeasureMethod
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.options import MeasureConfig
from laplace_invariance.layers import cnn
from laplace_invariance.marglik import MAP, Evidence, Objective, Regularised, marglik_training
from laplace_invariance.metrics import (
    Invariance,
    InvarianceError,
    InvarianceReport,
    JacobianSpectrum,
    SpectrumRecorder,
    invariance_report,
)
from laplace_invariance.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["MeasureConfig", "MeasureResult", "MeasuredNetwork", "measure"]


# Number of rotations to measure with: not a multiple of the number that a network is averaged over,
# where it is trivially invariant.
N_MEASURED = 22
PENALISED = ("regularised", "regularised-saliency")
N_SPECTRUM = 64  # test images per spectrum of the Jacobian
N_SPECTRA = 20  # spectra over training, about


@dataclass(frozen=True)
class MeasuredNetwork:
    """One network, trained and measured.

    Attributes:
        accuracy: Accuracy on test images as they are.
        accuracy_transformed: Accuracy on test images, each under a random element of the group.
        invariance: Measures of invariance, by data set.
        epochs: Epochs at which spectra were taken.
        spectra: Spectra of the Jacobian, one per entry of ``epochs``.
        ranges: What was learnt by evidence, in words; empty for other methods.
        seconds: Duration of training.
    """

    accuracy: float
    accuracy_transformed: float
    invariance: dict[str, Invariance]
    epochs: list[int]
    spectra: list[JacobianSpectrum]
    ranges: dict[str, str]
    seconds: float


@dataclass(frozen=True)
class MeasureResult:
    """All networks of an experiment; prints as tables.

    Attributes:
        config: Configuration of the experiment.
        networks: Measured networks, by method.
    """

    config: MeasureConfig
    networks: dict[str, MeasuredNetwork]

    @property
    def report(self) -> InvarianceReport:
        """The three measures of invariance, by method and data set."""
        rows = {method: network.invariance for method, network in self.networks.items()}
        return InvarianceReport(rows)

    def summary(self) -> dict[str, Any]:
        """Return configuration and networks, for JSON."""
        networks = {method: asdict(network) for method, network in self.networks.items()}
        return {"experiment": asdict(self.config), "networks": networks}

    def __str__(self) -> str:
        config = self.config
        head = f"{Path(config.data).stem}, {config.group}, seed {config.seed}"
        return "\n\n".join([head, str(self.report), self._table()])

    def _table(self) -> str:
        """Return a row per network and, below it, what it learnt."""
        rows = [_row(method, network) for method, network in self.networks.items()]
        cells = [list(rows[0]), *(list(row.values()) for row in rows)]
        header, *lines = table(cells, right=range(1, 6)).splitlines()
        shown = [header]
        for line, network in zip(lines, self.networks.values(), strict=True):
            shown.append(line)
            if network.ranges:
                words = ", ".join(f"{name}: {text}" for name, text in network.ranges.items())
                shown.append(f"{'':<12} learnt {words}")
        return "\n".join(shown)


def _row(method: str, network: MeasuredNetwork) -> dict[str, str]:
    """Return the cells of a network, by the names of their columns."""
    last = network.spectra[-1]
    return {
        "network": method,
        "accuracy": f"{network.accuracy:.1%}",
        "transformed": f"{network.accuracy_transformed:.1%}",
        "singular values": f"{last.singular_values[0]:.2f} to {last.singular_values[-1]:.2g}",
        "along orbits": f"{last.orbit:.2g}",
        "relative": f"{last.relative:.2g}",
        "time": f"{network.seconds:.0f} s",
    }


def measure(
    config: MeasureConfig,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    progress_bar: bool = False,
) -> MeasureResult:
    """Train networks and measure how invariant they are.

    Args:
        config: Images, group and methods.
        out: Directory for ``summary.json``, written after each network, the tables
            (``report.txt``) and figures; None keeps nothing.
        resume: Whether to continue in ``out``: finished networks are read, also those of methods
            that are not asked for now, and the others are trained.
        progress_bar: Whether to show progress.

    Returns:
        All networks with their measures, by method.
    """
    with RunDirectory(out, config, resume) as directory:
        split, measured_on = _data(config)
        group = _group(config)
        group.transform(split.x_test[:1], group.fixed(1))  # raises if images do not fit the group
        directory.begin()
        networks = _read_networks(directory)
        for method in MEASURE_METHODS:
            if method in networks or method not in config.methods:
                continue
            say(f"{method}: {MEASURE_METHODS[method]}", progress_bar)
            with seeded(config.seed):
                networks[method] = _measure(config, method, split, measured_on, progress_bar)
            directory.save("summary.json", MeasureResult(config, networks).summary())
        ordered: dict[str, MeasuredNetwork] = {
            name: networks[name] for name in MEASURE_METHODS if name in networks
        }
        result = MeasureResult(config, ordered)
        directory.save("report.txt", str(result))
        _draw(directory, result)
    return result


def _read_networks(directory: RunDirectory) -> dict[str, MeasuredNetwork]:
    summary = directory.finished() or {"networks": {}}
    networks = {}
    for method, found in summary["networks"].items():
        measures = found["invariance"].items()
        found["invariance"] = {where: Invariance(**values) for where, values in measures}
        found["spectra"] = [
            JacobianSpectrum(tuple(spectrum["singular_values"]), spectrum["orbit"])
            for spectrum in found["spectra"]
        ]
        networks[method] = MeasuredNetwork(**found)
    return networks


def _data(config: MeasureConfig) -> tuple[datasets.Split, dict[str, Tensor]]:
    """Return the images, and those to measure on, by name."""
    split = load_images(config, config.seed)
    if config.shifted is None:
        return split, {split.name: split.x_test, "negatives": 1 - split.x_test}
    other = load_images(replace(config, data=config.shifted, n_train=None), config.seed)
    if other.name == split.name:
        raise ValueError(
            f"images and shifted images are both called {other.name!r}; give others, or rename a "
            "file"
        )
    if other.in_shape != split.in_shape:
        raise ValueError(
            f"images of {other.name} are {list(other.in_shape)}, and those of {split.name} "
            f"{list(split.in_shape)}; the network needs one size"
        )
    return split, {split.name: split.x_test, other.name: other.x_test}


def _measure(
    config: MeasureConfig,
    method: MeasureMethod,
    split: datasets.Split,
    measured_on: Mapping[str, Tensor],
    progress_bar: bool,
) -> MeasuredNetwork:
    group = _group(config)
    augmentation = _augmentation(config, method)
    net = cnn(split.in_shape, split.n_classes)
    model = image_model(net, split.x_train, augmentation, config.n_samples)
    transformed = group(split.x_test, torch.Generator().manual_seed(config.seed))
    recorder = SpectrumRecorder(
        split.x_test[:N_SPECTRUM],
        group,
        n_samples=N_MEASURED,
        every=max(config.n_epochs // N_SPECTRA, 1),
    )
    train_loader, marglik_loader = _loaders(method, group, split)
    training = marglik_training(
        model,
        train_loader,
        marglik_loader=marglik_loader,
        callbacks=[recorder],
        objective=_objective(config, method, group),
        progress_bar=progress_bar,
        **_recipe(config, len(split.x_train)),
    )
    report = invariance_report({method: model}, measured_on, group, n_samples=N_MEASURED)
    return MeasuredNetwork(
        accuracy=accuracy(model, TensorDataset(split.x_test, split.y_test)),
        accuracy_transformed=accuracy(model, TensorDataset(transformed, split.y_test)),
        invariance=report.rows[method],
        epochs=recorder.epochs,
        spectra=recorder.spectra,
        ranges=_learnt(method, augmentation),
        seconds=training_seconds(training.history),
    )


def _group(config: MeasureConfig) -> Augmentation:
    """Return an augmentation with all of the group."""
    if config.group == "quarter-turns":
        return FiniteGroup("quarter_turns", init=1.0).frozen()
    return AffineImage(init={"rotation": math.pi}).frozen()


def _augmentation(config: MeasureConfig, method: MeasureMethod) -> Augmentation | None:
    """Return what a network is averaged over, if it is; the evidence starts near the identity."""
    if method == "tied":
        return _group(config)
    if method != "evidence":
        return None
    if config.group == "quarter-turns":
        return FiniteGroup("quarter_turns", init=0.1)
    return AffineImage(init={"rotation": 0.1}, learn="rotation")


def _learnt(method: MeasureMethod, augmentation: Augmentation | None) -> dict[str, str]:
    """Return the ranges that the evidence opened, in words."""
    if augmentation is None or method != "evidence":
        return {}
    reach = augmentation.magnitudes()
    return {name: words for name, words in augmentation.ranges().items() if reach[name] > 0}


def _objective(config: MeasureConfig, method: MeasureMethod, group: Augmentation) -> Objective:
    if method in PENALISED:
        penalty = InvarianceError(group, saliency=float(method == "regularised-saliency"))
        return Regularised(penalty, config.strength, MAP())
    if method == "evidence":
        return Evidence()
    return MAP()


def _loaders(
    method: MeasureMethod, group: Augmentation, split: datasets.Split
) -> tuple[DataLoader, DataLoader]:
    """Return the loaders of training and of the evidence."""

    def transform(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        x, y = default_collate(examples)
        return group(x), y

    x_train = split.x_train
    if method == "evidence":
        x_train = group(x_train)
    images = TensorDataset(x_train, split.y_train)
    collate = None
    if method == "augmented" or method in PENALISED:
        collate = transform
    train_loader = DataLoader(images, BATCH, shuffle=True, collate_fn=collate)
    return train_loader, DataLoader(images, MARGLIK_BATCH)


def _recipe(config: MeasureConfig, n_train: int) -> Recipe:
    """Return the settings of training: at least one estimate after the burn-in, however short."""
    return cosine_recipe(
        config.n_epochs,
        math.ceil(n_train / BATCH),
        n_epochs_burnin=min(4, config.n_epochs - 1),
        marglik_frequency=2 if config.n_epochs > 4 else 1,
    )


def _draw(directory: RunDirectory, result: MeasureResult) -> None:
    config, networks = result.config, result.networks
    title = f"{Path(config.data).stem}, {config.group.replace('-', ' ')}"

    def invariances(figure: Figure) -> None:
        plots.invariances(result.report, figure.subplots(1, 3))
        figure.suptitle(f"{title}: 0 is invariant")

    def spectra(figure: Figure) -> None:
        panels = figure.subplots(1, len(networks), sharey=True, squeeze=False)[0]
        for ax, (method, network) in zip(panels, networks.items(), strict=True):
            plots.spectra(network.epochs, network.spectra, ax).set_title(method)
            ax.label_outer()
        figure.suptitle(f"{title}: sensitivity to small changes, and along orbits")

    directory.figure("invariance.png", (12, 4), invariances)
    directory.figure("spectra.png", (1 + 3 * len(networks), 4), spectra)
