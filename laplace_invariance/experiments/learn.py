"""Learn invariances of image data with one call; what the command line runs.

An experiment is data, a way to move them whose ranges are known, a network, and a method. All methods run through
``marglik_training`` and differ in three things only: what the network is averaged over, the objective, and what happens to
training images on the way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from laplace_invariance import datasets, plots
from laplace_invariance.augmentations import AffineImage
from laplace_invariance.experiments.base import claim
from laplace_invariance.files import read_json, write_json
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.layers import FixupResNet, Standardise, cnn, mlp
from laplace_invariance.marglik import Augerino, Evidence, Objective, Result, marglik_training

__all__ = ["METHODS", "NETWORKS", "Experiment", "Outcome", "accuracy", "draw_evidence", "learn"]

NETWORKS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet": lambda in_shape, n_classes: FixupResNet(in_shape[0], n_classes, depth=8),
}
METHODS = {
    "evidence": "ranges learnt by evidence",
    "none": "no invariance, priors learnt by evidence",
    "augerino": "ranges learnt by the loss and a reward for wide ones, priors by evidence",
    "fixed": "fixed ranges, as many samples, priors learnt by evidence",
    "trivial-augment": "torchvision's TrivialAugmentWide on training images, priors learnt by evidence",
}
BATCH, MARGLIK_BATCH, TEST_BATCH = 100, 250, 500
N_SHOWN = 1000  # test images for the accuracy in the progress bar and the history
FIGURE = {"ranges": (8, 4.5), "evidence": (8, 4.5), "samples": (11, 5), "flow": (5, 5)}


@dataclass(frozen=True)
class Experiment:
    """What is learnt from what.

    Attributes:
        data: source of the images, as for ``datasets.load``.
        transform: how they are moved, one of ``datasets.KINDS``.
        method: one of ``METHODS``.
        net: one of ``NETWORKS``.
        n_samples: samples per image.
        n_epochs: epochs of training.
        n_train: training images; None is all.
        n_test: test images; None is all.
        correlated: learn correlations of the ranges, too.
        fixed: ranges of the method "fixed", by name of the generator.
        strength: of Augerino's reward.
        lr_augerino: Augerino's step size of the ranges.
        seed: of subset, transformations, weights and draws.
        root: directory of torchvision's data sets.
        download: fetch them.
    """

    data: str = "digits"
    transform: str = "fully_rotated"
    method: str = "evidence"
    net: str = "mlp"
    n_samples: int = 8
    n_epochs: int = 100
    n_train: int | None = None
    n_test: int | None = None
    correlated: bool = False
    fixed: Mapping[str, float] = field(default_factory=lambda: {"rotation": math.pi})
    strength: float = 0.1
    lr_augerino: float = 0.03
    seed: int = 0
    root: str = "data"
    download: bool = False

    def __post_init__(self) -> None:
        for name, known in (("method", METHODS), ("net", NETWORKS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"unknown {name} {getattr(self, name)!r}; choose from {', '.join(known)}"
                )
        datasets.true_ranges(self.transform)
        Augerino(self.strength)
        if self.n_epochs < 1:
            raise ValueError(f"n_epochs must be positive, got {self.n_epochs}")


@dataclass(frozen=True)
class Outcome:
    """What was learnt.

    Attributes:
        experiment: what was asked.
        accuracy: on the test images.
        evidence: log evidence per training image; None if the method estimates none.
        ranges: in words, by name; empty without an augmentation.
        magnitudes: the same as numbers.
        truth: the true ones.
        scale_correlation: of the two axes' scalings, if correlations were learnt.
        seconds: that training took, validation included.
        result: of the training; None if the outcome was read from a file.
    """

    experiment: Experiment
    accuracy: float
    evidence: float | None
    ranges: dict[str, str]
    magnitudes: dict[str, float]
    truth: dict[str, float]
    scale_correlation: float | None
    seconds: float
    result: Result | None = field(default=None, repr=False, compare=False)

    def summary(self) -> dict[str, Any]:
        """Return all but the result, for JSON."""
        fields = {name: value for name, value in vars(self).items() if name != "result"}
        return fields | {"experiment": asdict(self.experiment)}

    def __str__(self) -> str:
        e = self.experiment
        lines = [
            ("data", f"{e.data}, {e.transform.replace('_', ' ')}, seed {e.seed}"),
            ("method", f"{e.method}: {METHODS[e.method]}"),
        ]
        if self.magnitudes:
            true = AffineImage(init=self.truth).ranges()
            wanted = [name for name, value in self.truth.items() if value > 0]
            lines += [(name, f"{self.ranges[name]}, true {true[name]}") for name in wanted]
            rest = {name: value for name, value in self.magnitudes.items() if name not in wanted}
            widest = max(rest, key=rest.get)
            lines.append(
                (
                    "all others" if wanted else "all ranges",
                    f"at most {rest[widest]:.3f} ({widest}: {self.ranges[widest]})",
                )
            )
        if self.scale_correlation is not None:
            lines.append(("x and y scale", f"correlated by {self.scale_correlation:.2f}"))
        lines.append(("test accuracy", f"{self.accuracy:.1%}"))
        if self.evidence is not None:
            lines.append(("log evidence", f"{self.evidence:.3f} per training image"))
        lines.append(("time", f"{self.seconds:.0f} s"))
        return "\n".join(f"{name:<15} {value}" for name, value in lines)


# One experiment.


class _Transformed(Dataset):
    """Training images through a transform of torchvision that takes uint8."""

    def __init__(
        self, images: Tensor, labels: Tensor, transform: Callable[[Tensor], Tensor]
    ) -> None:
        self.images = (images * 255).round().to(torch.uint8)
        self.labels, self.transform, self.dtype = labels, transform, images.dtype

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[index]).to(self.dtype) / 255, self.labels[index]


def _augmentation(experiment: Experiment) -> AffineImage | None:
    if experiment.method == "evidence":
        return AffineImage(draws="sobol", correlated=experiment.correlated)
    if experiment.method == "augerino":
        return AffineImage(init=0.1, draws="sobol", correlated=experiment.correlated)
    if experiment.method == "fixed":
        return AffineImage(init=dict(experiment.fixed), draws="sobol").frozen()
    return None


def _objective(experiment: Experiment) -> Objective:
    return Augerino(experiment.strength) if experiment.method == "augerino" else Evidence()


def learn(
    experiment: Experiment,
    out: str | Path | None = None,
    resume: bool = False,
    progress_bar: bool = False,
) -> Outcome:
    """Run an experiment.

    Args:
        experiment: what to learn.
        out: directory for checkpoint, history, figures and summary; None keeps nothing.
        resume: go on from a checkpoint in ``out``; an experiment that is finished there is read.
        progress_bar: show one.
    """
    out = None if out is None else Path(out)
    if out is not None:
        claim(out, experiment, resume)
        if (out / "summary.json").exists():
            return _read(out / "summary.json", experiment)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.seed)
        return _learn(experiment, out, resume, progress_bar)


def _read(path: Path, experiment: Experiment) -> Outcome:
    return Outcome(**read_json(path) | {"experiment": experiment})


def _learn(experiment: Experiment, out: Path | None, resume: bool, progress_bar: bool) -> Outcome:
    split = datasets.load(
        experiment.data,
        root=experiment.root,
        download=experiment.download,
        n_train=experiment.n_train,
        n_test=experiment.n_test,
        seed=experiment.seed,
    )
    generator = torch.Generator().manual_seed(experiment.seed)
    x_train, x_test = (
        datasets.transformed(x, experiment.transform, generator)
        for x in (split.x_train, split.x_test)
    )
    train = TensorDataset(x_train, split.y_train)
    test = DataLoader(TensorDataset(x_test, split.y_test), TEST_BATCH)
    if experiment.method == "trivial-augment":
        from torchvision.transforms import v2

        moving: Dataset = _Transformed(x_train, split.y_train, v2.TrivialAugmentWide())
    else:
        moving = train
    loader = DataLoader(moving, BATCH, shuffle=True)
    net = NETWORKS[experiment.net](split.in_shape, split.n_classes)
    model: nn.Module = nn.Sequential(
        Standardise.of(x_train), *(net if isinstance(net, nn.Sequential) else [net])
    )
    augmentation = _augmentation(experiment)
    if augmentation is not None:
        model = InvariantModel(model, augmentation, experiment.n_samples)
    if out is not None:
        write_json(out / "experiment.json", asdict(experiment))
    start = time.perf_counter()
    result = marglik_training(
        model,
        loader,
        n_epochs=experiment.n_epochs,
        objective=_objective(experiment),
        marglik_loader=DataLoader(train, MARGLIK_BATCH),
        valid_loader=DataLoader(
            TensorDataset(x_test[:N_SHOWN], split.y_test[:N_SHOWN]), TEST_BATCH
        ),
        checkpoint=None if out is None else out / "checkpoint.pt",
        history=None if out is None else out / "history.jsonl",
        resume=resume,
        progress_bar=progress_bar,
        **_recipe(experiment, len(loader)),
    )
    seconds = sum(sum(record["seconds"].values()) for record in result.history)
    outcome = Outcome(
        experiment,
        accuracy=accuracy(model, test),
        evidence=_best_evidence(result, len(train)),
        ranges={} if augmentation is None else augmentation.ranges(),
        magnitudes={} if augmentation is None else augmentation.magnitudes(),
        truth=datasets.true_ranges(experiment.transform),
        scale_correlation=_scale_correlation(augmentation)
        if experiment.correlated and augmentation is not None
        else None,
        seconds=max(seconds, time.perf_counter() - start),
        result=result,
    )
    if out is not None:
        _draw(outcome, augmentation, x_train[:6], out)
        write_json(out / "summary.json", outcome.summary())
    return outcome


def _recipe(experiment: Experiment, n_batches: int) -> dict[str, Any]:
    """Return the settings of training, the same for all methods but for Augerino's step size."""
    return {
        "optimizer_kwargs": {"lr": 5e-3},
        "scheduler_cls": torch.optim.lr_scheduler.CosineAnnealingLR,
        "scheduler_kwargs": {"T_max": experiment.n_epochs * n_batches, "eta_min": 5e-5},
        "n_epochs_burnin": min(4, experiment.n_epochs),
        "marglik_frequency": min(2, experiment.n_epochs),
        "n_hypersteps": 4,
        "backend_kwargs": {"output_rank": 3},
        **({"lr_aug": experiment.lr_augerino} if experiment.method == "augerino" else {}),
    }


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader) -> float:
    """Return the share of a loader's examples that the model, in evaluation mode, classifies rightly."""
    model.eval()
    correct = sum((model(x).argmax(-1) == y).sum().item() for x, y in loader)
    return correct / len(loader.dataset)


def _best_evidence(result: Result, n_data: int) -> float | None:
    found = [record["evidence"] for record in result.history if record["evidence"] is not None]
    return max(found) / n_data if found else None


@torch.no_grad()
def _scale_correlation(augmentation: AffineImage) -> float:
    """Return the correlation of x- and y-scale under the learnt distribution; draws are uncorrelated, of equal variance."""
    unit = torch.eye(len(augmentation.names)).to(augmentation.eta)
    rows = augmentation.coefficients(unit)[
        :, [augmentation.names.index(f"{axis}_scale") for axis in "xy"]
    ]
    return torch.nn.functional.cosine_similarity(rows[:, 0], rows[:, 1], dim=0).item()


# Pictures.


def draw_evidence(
    history: Sequence[Mapping[str, Any]], n_data: int, title: str, path: Path
) -> None:
    """Draw the evidence per datum and its terms over epochs; nothing if it was never estimated.

    Args:
        history: of the training.
        n_data: number of training images.
        title: of the picture.
        path: of the file.
    """
    estimated = [record for record in history if record["evidence"] is not None]
    if not estimated:
        return
    terms = {
        "log evidence": [r["evidence"] / n_data for r in estimated],
        "log likelihood": [r["log_likelihood"] / n_data for r in estimated],
        "-½ log determinant ratio": [-r["log_det_ratio"] / 2 / n_data for r in estimated],
        "-½ scatter": [-r["scatter"] / 2 / n_data for r in estimated],
    }
    figure = plots.figure(FIGURE["evidence"])
    plots.evidence_terms([r["epoch"] for r in estimated], terms, figure.subplots()).set_title(title)
    figure.savefig(path, dpi=120)


def _draw(outcome: Outcome, augmentation: AffineImage | None, images: Tensor, out: Path) -> None:
    history = outcome.result.history
    title = f"{outcome.experiment.data}, {outcome.experiment.transform.replace('_', ' ')}"
    draw_evidence(history, outcome.result.la.n_data, title, out / "evidence.png")
    if augmentation is None:
        return
    figure = plots.figure(FIGURE["ranges"])
    values = {
        name: [r["ranges"]["augmentation"][name] for r in history] for name in augmentation.names
    }
    truth = {name: value for name, value in outcome.truth.items() if value > 0}
    plots.ranges_over_epochs(
        [r["epoch"] for r in history], values, truth, figure.subplots()
    ).set_title(title)
    figure.savefig(out / "ranges.png", dpi=120)
    figure = plots.figure(FIGURE["samples"])
    start, end = figure.subplots(1, 2)
    plots.samples(_augmentation(outcome.experiment), images, 8, start, "at the start")
    plots.samples(augmentation, images, 8, end, "as learnt")
    figure.savefig(out / "samples.png", dpi=120)
    figure = plots.figure(FIGURE["flow"])
    plots.flow(augmentation, figure.subplots()).set_title(f"learnt on {title}")
    figure.savefig(out / "flow.png", dpi=120)
