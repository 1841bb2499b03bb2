"""Learn layer by layer which symmetry a network should have, with one call; what ``laplace-invariance layers`` runs.

Every layer of the network (``layers.equivariant_cnn``) is a sum of paths, say a convolution and a fully connected path. Each has
prior precisions of its own, learnt by evidence: a path that the data do not need is switched off by a large one, and what is left
is a convolution where shifts do not matter and something freer where they do.
"""

from __future__ import annotations

import importlib.util
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_invariance import datasets, plots
from laplace_invariance.datasets import framed, quadrants
from laplace_invariance.experiments.base import claim
from laplace_invariance.experiments.learn import N_SHOWN, TEST_BATCH, accuracy, draw_evidence
from laplace_invariance.files import read_json, write_json
from laplace_invariance.layers import Standardise, closed_paths, equivariant_cnn
from laplace_invariance.layers.paths import parse_kind
from laplace_invariance.marglik import MAP, Evidence, Result, marglik_training
from laplace_invariance.metrics import LayerReport, PathReport, layer_report

__all__ = ["METHODS", "TASKS", "LayerExperiment", "LayerOutcome", "learn_layers"]

METHODS = {
    "evidence": "prior precisions learnt by evidence",
    "map": "prior precisions fixed at 1, the evidence estimated once at the end",
}
TASKS = {
    "plain": "images as they are",
    "digit": "images in random quadrants, labelled by class",
    "both": "images in random quadrants, labelled by class and quadrant",
}
PRIORS = ("layerwise", "path", "scalar")
SIZE = 32  # of images, as the network takes them


@dataclass(frozen=True)
class LayerExperiment:
    """What is learnt from what.

    Attributes:
        data: source of the images, as for ``datasets.load``.
        transform: how they are moved, one of ``datasets.KINDS``.
        task: one of ``TASKS``.
        kind: paths of every layer, joined by "+", as for ``layers.equivariant_cnn``.
        method: one of ``METHODS``.
        width: channels of the first layer.
        n_train: training images; None is all.
        n_test: test images; None is all.
        n_epochs: epochs of training.
        batch_size: of training.
        lr: step size of the weights at the start.
        lr_min: step size at the end of half a cosine, which moves with every batch.
        marglik_frequency: epochs between two estimates of the evidence.
        n_epochs_burnin: epochs before the first one.
        n_hypersteps: steps on prior precisions per estimate.
        lr_hyp: their size.
        marglik_batch_size: images per batch of an estimate.
        output_rank: leading directions of the loss Hessian that the curvature has; None is all.
        prior_structure: what shares a prior precision: "layerwise" (a tensor), "path", "scalar", or regular expressions, as for
            ``marglik_training``.
        per_slot: a gradient factor for every slot of factored layers, as for ``curvature.AugmentedGGN``.
        scale: of the initial weights of all paths but the strictest.
        free_precision: their initial prior precision, if learnt one per tensor or path, see ``layers.closed_paths``; that of all
            else is 1.
        seed: of subset, transformations, quadrants and weights.
        root: directory of torchvision's data sets.
        download: fetch them.
    """

    data: str = "digits"
    transform: str = "original"
    task: str = "plain"
    kind: str = "f_fc+conv"
    method: str = "evidence"
    width: int = 4
    n_train: int | None = None
    n_test: int | None = None
    n_epochs: int = 40
    batch_size: int = 125
    lr: float = 5e-3
    lr_min: float = 1e-5
    marglik_frequency: int = 4
    n_epochs_burnin: int = 4
    n_hypersteps: int = 50
    lr_hyp: float = 0.1
    marglik_batch_size: int = 500
    output_rank: int | None = 3
    prior_structure: str | Sequence[str] = "layerwise"
    per_slot: bool = False
    scale: float = 0.01
    free_precision: float = 1000.0
    seed: int = 0
    root: str = "data"
    download: bool = False

    def __post_init__(self) -> None:
        for name, known in (("task", TASKS), ("method", METHODS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"unknown {name} {getattr(self, name)!r}; choose from {', '.join(known)}"
                )
        parse_kind(self.kind)
        datasets.true_ranges(self.transform)
        for name in (
            "width",
            "n_epochs",
            "batch_size",
            "lr",
            "marglik_frequency",
            "lr_hyp",
            "marglik_batch_size",
            "output_rank",
            "free_precision",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        for name in ("lr_min", "n_epochs_burnin", "n_hypersteps", "scale"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not isinstance(self.prior_structure, str):
            object.__setattr__(
                self, "prior_structure", tuple(self.prior_structure)
            )  # a list, if read from JSON
        elif self.prior_structure not in PRIORS:
            raise ValueError(
                f"unknown prior_structure {self.prior_structure!r}; choose from {', '.join(PRIORS)}, or give a list of "
                "regular expressions"
            )


@dataclass(frozen=True)
class LayerOutcome:
    """What was learnt.

    Attributes:
        experiment: what was asked.
        accuracy: on the test images.
        evidence: log evidence per training image.
        seconds: that training took, estimates included.
        report: how much of each path is in use.
        history: one record per epoch, as ``marglik_training`` has them.
        result: of the training; None if the outcome was read from a file.
    """

    experiment: LayerExperiment
    accuracy: float
    evidence: float
    seconds: float
    report: LayerReport = field(repr=False, compare=False)
    history: list[dict[str, Any]] = field(repr=False, compare=False)
    result: Result | None = field(default=None, repr=False, compare=False)

    def summary(self) -> dict[str, Any]:
        """Return experiment, numbers and report, for JSON."""
        return {
            "experiment": asdict(self.experiment),
            "accuracy": self.accuracy,
            "evidence": self.evidence,
            "seconds": self.seconds,
            "chosen": self.report.chosen,
            "report": self.report.as_dict(),
        }

    def __str__(self) -> str:
        e = self.experiment
        lines = [
            ("data", f"{e.data}, {e.transform.replace('_', ' ')}, seed {e.seed}"),
            ("task", f"{e.task}: {TASKS[e.task]}"),
            ("network", f"{e.kind}, width {e.width}"),
            ("method", f"{e.method}: {METHODS[e.method]}"),
            ("layers", ", ".join(self.report.chosen.values())),
            ("test accuracy", f"{self.accuracy:.1%}"),
            ("log evidence", f"{self.evidence:.3f} per training image"),
            ("time", f"{self.seconds:.0f} s"),
        ]
        return "\n".join([str(self.report), "", *(f"{name:<15} {value}" for name, value in lines)])


def learn_layers(
    experiment: LayerExperiment,
    out: str | Path | None = None,
    resume: bool = False,
    progress_bar: bool = False,
) -> LayerOutcome:
    """Run an experiment.

    Args:
        experiment: what to learn.
        out: directory for checkpoint and history, then ``result.json``, the report as a table (``report.txt``) and, where
            matplotlib is installed, the figures ``layers.png`` and ``evidence.png``; None keeps nothing.
        resume: go on from a checkpoint in ``out``; an experiment that is finished there is read.
        progress_bar: show one.
    """
    out = None if out is None else Path(out)
    if out is not None:
        claim(out, experiment, resume)
        if (out / "result.json").exists():
            return _read(out, experiment)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.seed)
        return _learn(experiment, out, resume, progress_bar)


def _learn(
    experiment: LayerExperiment, out: Path | None, resume: bool, progress_bar: bool
) -> LayerOutcome:
    train, test, n_classes = _data(experiment)
    images = train.tensors[0]
    net = equivariant_cnn(
        experiment.kind,
        images.shape[1],
        n_classes,
        experiment.width,
        in_shape=SIZE,
        scale=experiment.scale,
    )
    model = nn.Sequential(
        OrderedDict(standardise=Standardise.of(images), **dict(net.named_children()))
    )
    loader = DataLoader(train, experiment.batch_size, shuffle=True)
    if out is not None:
        write_json(out / "experiment.json", asdict(experiment))
    result = marglik_training(
        model,
        loader,
        valid_loader=DataLoader(TensorDataset(*test[:N_SHOWN]), TEST_BATCH),
        checkpoint=None if out is None else out / "checkpoint.pt",
        history=None if out is None else out / "history.jsonl",
        resume=resume,
        progress_bar=progress_bar,
        **_recipe(experiment, model, len(loader)),
    )
    outcome = LayerOutcome(
        experiment,
        accuracy=accuracy(model, DataLoader(test, TEST_BATCH)),
        evidence=result.la.log_marginal_likelihood().item() / len(train),
        seconds=sum(sum(record["seconds"].values()) for record in result.history),
        report=layer_report(result.la),
        history=result.history,
        result=result,
    )
    if out is not None:
        (out / "report.txt").write_text(f"{outcome.report}\n")
        _draw(outcome, len(train), out)
        write_json(out / "result.json", outcome.summary())
    return outcome


def _data(experiment: LayerExperiment) -> tuple[TensorDataset, TensorDataset, int]:
    """Return images of 32 x 32 with labels, to train on and to test on, and the number of classes."""
    split = datasets.load(
        experiment.data,
        root=experiment.root,
        download=experiment.download,
        n_train=experiment.n_train,
        n_test=experiment.n_test,
        seed=experiment.seed,
    )
    generator = torch.Generator().manual_seed(experiment.seed)

    def made(images: Tensor, labels: Tensor) -> TensorDataset:
        images = datasets.transformed(images, experiment.transform, generator)
        if experiment.task == "plain":
            return TensorDataset(framed(images, SIZE), labels)
        return TensorDataset(*quadrants(images, labels, experiment.task, generator, SIZE))

    n_classes = split.n_classes * (4 if experiment.task == "both" else 1)
    return made(split.x_train, split.y_train), made(split.x_test, split.y_test), n_classes


def _recipe(experiment: LayerExperiment, model: nn.Module, n_batches: int) -> dict[str, Any]:
    """Return the settings of training, the same for all methods but for the objective and where priors start."""
    closed: dict[str, float] = {}
    if experiment.method == "evidence" and experiment.prior_structure in ("layerwise", "path"):
        closed = closed_paths(
            model, experiment.free_precision, shared=experiment.prior_structure == "path"
        )
    return {
        "objective": MAP() if experiment.method == "map" else Evidence(),
        "prior_structure": experiment.prior_structure,
        "prior_prec_init": closed or 1.0,
        "n_epochs": experiment.n_epochs,
        "optimizer_kwargs": {"lr": experiment.lr},
        "scheduler_cls": torch.optim.lr_scheduler.CosineAnnealingLR,
        "scheduler_kwargs": {
            "T_max": experiment.n_epochs * n_batches,
            "eta_min": experiment.lr_min,
        },
        "n_epochs_burnin": min(experiment.n_epochs_burnin, experiment.n_epochs),
        "marglik_frequency": min(experiment.marglik_frequency, experiment.n_epochs),
        "n_hypersteps": experiment.n_hypersteps,
        "lr_hyp": experiment.lr_hyp,
        "marglik_batch_size": experiment.marglik_batch_size,
        "backend_kwargs": {"output_rank": experiment.output_rank, "per_slot": experiment.per_slot},
    }


def _read(out: Path, experiment: LayerExperiment) -> LayerOutcome:
    found = read_json(out / "result.json")
    rows = [PathReport(**row) for paths in found["report"].values() for row in paths.values()]
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    numbers = {name: found[name] for name in ("accuracy", "evidence", "seconds")}
    return LayerOutcome(experiment, **numbers, report=LayerReport(rows), history=history)


def _draw(outcome: LayerOutcome, n_train: int, out: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        return
    e = outcome.experiment
    title = (
        f"{Path(e.data).stem}, {e.transform.replace('_', ' ')}, task {e.task}, {e.kind}, {e.method}"
    )
    draw_evidence(outcome.history, n_train, title, out / "evidence.png")
    figure = plots.figure((9, 8))
    above, below = figure.subplots(2, 1)
    plots.layer_shares(outcome.report, above)
    plots.layer_precisions(outcome.report, below)
    figure.suptitle(title)
    figure.savefig(out / "layers.png", dpi=120)
