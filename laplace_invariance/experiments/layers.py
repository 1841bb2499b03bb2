"""Learn layer by layer which symmetry a network should have.

Every layer of the network (``layers.equivariant_cnn``) is a sum of paths, say a convolution and a
fully connected path. Each has prior precisions of its own, learnt by evidence: a path that the data
do not need is switched off by a large one. What is left is a convolution where shifts do not
matter, and something freer where they do. The network may also be averaged over transformations of
its input, whose ranges are learnt by the same evidence: both kinds of symmetry at once.
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from laplace.baselaplace import ParametricLaplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from laplace_invariance import datasets, plots
from laplace_invariance.augmentations import AffineImage
from laplace_invariance.experiments.base import (
    N_SHOWN,
    TEST_BATCH,
    accuracy,
    cosine_recipe,
    draw_evidence,
    load_images,
    log_likelihood,
    seeded,
    training_seconds,
    with_error,
)
from laplace_invariance.experiments.choices import LAYERS_METHODS, LAYERS_TASKS, PATHS_STARTS
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.options import LayersConfig
from laplace_invariance.experiments.reports import layers_report
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.layers import (
    Standardise,
    closed_paths,
    equivariant_cnn,
    free_paths,
    rescale_paths,
    start_precisions,
)
from laplace_invariance.marglik import (
    MAP,
    Evidence,
    Objective,
    Refit,
    Result,
    Running,
    Search,
    SearchResult,
    marglik_training,
)
from laplace_invariance.marglik.estimators import Estimator
from laplace_invariance.metrics import Ablation, LayerReport, ablation, layer_report
from laplace_invariance.tables import labelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LayersConfig", "LayersResult", "layers"]

SIZE = 32  # height and width of images, as the network takes them
START_OF_RANGES = 0.1  # radians, half-widths of the image, logarithms of factors
SEARCH = Search(keep=2, n_rounds=1)  # of starts: about a dozen short trainings


@dataclass(frozen=True)
class LayersResult:
    """How much of each path is in use, with accuracy and evidence; prints as a table and a summary.

    Attributes:
        config: Configuration of the run.
        accuracy: Accuracy on the test images.
        log_likelihood: Log-likelihood per test image.
        evidence: Log evidence per training image, of all directions of the loss Hessian.
        evidence_error: Standard error of the evidence; 0 if it is exact, as up to 33 classes.
        seconds: Duration of search and training, estimates included.
        ablation: What the network loses without each path, and which it needs.
        report: How much of each path is in use.
        magnitudes: Learnt ranges of transformations by name: radians, half-widths of the image,
            logarithms of factors; empty if there are none.
        search: What the search for a start tried: the best trial, all trials, and the evidence of
            guessing; None without a search.
        history: Records of ``marglik_training``, one per epoch.
        training: What ``marglik_training`` returned; None if the result was read from a file.
    """

    config: LayersConfig
    accuracy: float
    log_likelihood: float
    evidence: float
    evidence_error: float
    seconds: float
    ablation: Ablation = field(repr=False)
    report: LayerReport = field(repr=False, compare=False)
    history: list[dict[str, Any]] = field(repr=False, compare=False)
    magnitudes: dict[str, float] = field(default_factory=dict)
    search: dict[str, Any] | None = field(default=None, repr=False)
    training: Result | None = field(default=None, repr=False, compare=False)

    def summary(self) -> dict[str, Any]:
        """Return configuration, numbers and report, for JSON."""
        return {
            "experiment": asdict(self.config),
            "accuracy": self.accuracy,
            "log_likelihood": self.log_likelihood,
            "evidence": self.evidence,
            "evidence_error": self.evidence_error,
            "seconds": self.seconds,
            "chosen": self.report.chosen,
            "ablation": self.ablation.as_dict(),
            "report": self.report.as_dict(),
            "magnitudes": self.magnitudes,
            "search": self.search,
        }

    def __str__(self) -> str:
        config = self.config
        evidence = with_error(self.evidence, self.evidence_error)
        words = config.transform.replace("_", " ")
        lines = [
            labelled("data", f"{config.data}, {words}, seed {config.seed}"),
            labelled("task", f"{config.task}: {LAYERS_TASKS[config.task]}"),
            labelled("network", f"{config.kind}, width {config.width}"),
            labelled("method", f"{config.method}: {LAYERS_METHODS[config.method]}"),
            labelled("start", self._start_words()),
            labelled("layers", ", ".join(self.report.chosen.values())),
            labelled(
                "test accuracy",
                f"{self.accuracy:.1%}, log-likelihood {self.log_likelihood:.3f} per image",
            ),
            labelled("without", _without_words(self.ablation)),
            labelled("log evidence", f"{evidence} per training image"),
            labelled("time", f"{self.seconds:.0f} s"),
        ]
        if self.magnitudes:
            found = {name: width for name, width in self.magnitudes.items() if width}
            lines.append(labelled("averaged over", plots.short_words(found, (SIZE, SIZE))))
        return "\n".join([str(self.report), "", *lines])

    def _start_words(self) -> str:
        """Return where free paths start, and what the search tried if there was one."""
        if self.search is None:
            return f"{self.config.start}: {PATHS_STARTS[self.config.start]}"
        found = SearchResult.from_state_dict(self.search)
        words = f"search over {len(found.trials)} candidates, starts at: {found.best}"
        others = [trial for trial in found.trials if trial != found.best]
        if others:
            words += f"; next {others[0]}, lost by {others[0].loss:.3f}"
        return words


def _without_words(ablation: Ablation) -> str:
    """Return what all free paths, and what all paths that were not chosen, are worth."""
    words = []
    for row in (ablation.free, ablation.unused):
        words.append(f"{row.place}: accuracy {row.accuracy:.1%}, evidence {-row.cost:+.3f}")
    return "; ".join(words)


def layers(
    config: LayersConfig,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    progress_bar: bool = False,
) -> LayersResult:
    """Train a network whose layers are sums of paths, and learn which path each layer needs.

    Args:
        config: Images, task, network, priors and training.
        out: Directory for ``checkpoint.pt``, ``history.jsonl``, ``summary.json``, the report as a
            table (``report.txt``) and figures; None keeps nothing.
        resume: Whether to continue from a checkpoint in ``out``; a finished run is read.
        progress_bar: Whether to show progress.

    Returns:
        Report on the paths, test accuracy and evidence.
    """
    with RunDirectory(out, config, resume) as directory, seeded(config.seed):
        finished = _read(config, directory)
        if finished is not None:
            layers_report(directory, finished)
            return finished
        train, test, n_classes = _data(config)
        model = _model(config, train.tensors[0], n_classes)
        if config.start == "search" and not free_paths(model):
            raise ValueError(f"there is no start to search: {config.kind!r} has no free path")
        directory.begin()
        result = _train(config, train, test, model, directory, progress_bar)
        directory.save("report.txt", f"{result.report}\n\n{result.ablation}")
        _draw(directory, result, len(train))
        directory.save("summary.json", result.summary())
        layers_report(directory, result)
    return result


def _read(config: LayersConfig, directory: RunDirectory) -> LayersResult | None:
    """Return the result of a finished run."""
    summary, path = directory.finished(), directory.path("history.jsonl")
    if summary is None or path is None:
        return None
    names = ("accuracy", "log_likelihood", "evidence", "evidence_error", "seconds")
    numbers = {name: summary[name] for name in names}
    history = [json.loads(line) for line in path.read_text().splitlines()]
    return LayersResult(
        config,
        **numbers,
        ablation=Ablation.from_dict(summary["ablation"]),
        report=LayerReport.from_dict(summary["report"]),
        history=history,
        magnitudes=summary.get("magnitudes", {}),  # which earlier versions did not learn
        search=summary["search"],
    )


def _data(config: LayersConfig) -> tuple[TensorDataset, TensorDataset, int]:
    """Return images of 32 x 32 with labels, for training and test, and the number of classes."""
    split = load_images(config, config.seed)
    generator = torch.Generator().manual_seed(config.seed)

    def prepared(images: Tensor, labels: Tensor) -> TensorDataset:
        images = datasets.transformed(images, config.transform, generator)
        if config.task == "plain":
            return TensorDataset(datasets.framed(images, SIZE), labels)
        return TensorDataset(*datasets.quadrants(images, labels, config.task, generator, SIZE))

    n_classes = split.n_classes
    if config.task == "both":
        n_classes *= 4
    train = prepared(split.x_train, split.y_train)
    test = prepared(split.x_test, split.y_test)
    return train, test, n_classes


def _model(config: LayersConfig, images: Tensor, n_classes: int) -> nn.Module:
    net = equivariant_cnn(
        config.kind,
        images.shape[1],
        n_classes,
        config.width,
        in_shape=SIZE,
        scale=config.scale,
        kernel=config.kernel,
        omega=config.omega,
        elements=config.elements,
    )
    named: OrderedDict[str, nn.Module] = OrderedDict(standardise=Standardise.of(images))
    named.update(net.named_children())
    model = nn.Sequential(named)
    if config.ranges == "none":
        return model
    learnt = "all" if config.ranges == "affine" else config.ranges
    return InvariantModel(model, AffineImage(START_OF_RANGES, learnt), config.n_samples)


def _estimator(config: LayersConfig) -> Estimator:
    """Return the estimator: if nothing but priors is learnt, a pass serves all their steps."""
    by_default = "refit" if config.ranges == "none" or config.augment else "running"
    return Refit() if (config.estimator or by_default) == "refit" else Running()


def _train(
    config: LayersConfig,
    train: TensorDataset,
    test: TensorDataset,
    model: nn.Module,
    directory: RunDirectory,
    progress_bar: bool,
) -> LayersResult:
    started = time.perf_counter()
    collate = _mirrored_and_shifted if config.augment else None
    loader = DataLoader(train, config.batch_size, shuffle=True, collate_fn=collate)
    n_at_once = config.marglik_batch_size
    if config.ranges != "none":  # as many images, all samples counted
        n_at_once = max(1, n_at_once // config.n_samples)
    as_they_are = DataLoader(train, n_at_once)
    recipe = cosine_recipe(
        config.n_epochs,
        len(loader),
        lr=config.lr,
        lr_min=config.lr_min,
        n_epochs_burnin=config.n_epochs_burnin,
        marglik_frequency=config.marglik_frequency,
        n_hypersteps=config.n_hypersteps,
        backend_kwargs={"per_slot": config.per_slot},
    )
    training = marglik_training(
        model,
        loader,
        objective=_objective(config),
        estimator=_estimator(config),
        prior_structure=config.prior_structure,
        prior_prec_init=_start(config, model),
        search=SEARCH if config.start == "search" else None,
        lr_hyp=config.lr_hyp,
        marglik_loader=as_they_are,
        valid_loader=DataLoader(TensorDataset(*test[:N_SHOWN]), TEST_BATCH),
        checkpoint=directory.path("checkpoint.pt"),
        history=directory.path("history.jsonl"),
        resume=directory.resume,
        progress_bar=progress_bar,
        **recipe,
    )
    assert isinstance(training.la, ParametricLaplace)  # since prior precisions are learnt
    seconds = max(training_seconds(training.history), time.perf_counter() - started)
    without = ablation(training.la, as_they_are, DataLoader(test, TEST_BATCH))
    return LayersResult(
        config,
        accuracy=accuracy(model, test),
        log_likelihood=log_likelihood(model, test),
        evidence=training.evidence / len(train),
        evidence_error=training.evidence_error / len(train),
        seconds=seconds,
        ablation=without,
        report=layer_report(training.la, without),
        history=training.history,
        magnitudes=_magnitudes(model),
        search=None if training.search is None else training.search.state_dict(),
        training=training,
    )


def _magnitudes(model: nn.Module) -> dict[str, float]:
    """Return the ranges of transformations that a network is averaged over."""
    if isinstance(model, InvariantModel):
        return model.augmentation.magnitudes()
    return {}


def _mirrored_and_shifted(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Collate examples, each image mirrored or not and shifted by up to an eighth of its size."""
    images, labels = default_collate(examples)
    reach = images.shape[-1] // 8
    moved = []
    for image, mirrored in zip(images, (torch.rand(len(images)) < 0.5).tolist(), strict=True):
        framed = F.pad(image.flip(-1) if mirrored else image, [reach] * 4)
        y, x = torch.randint(2 * reach + 1, (2,)).tolist()
        moved.append(framed[:, y : y + image.shape[-2], x : x + image.shape[-1]])
    return torch.stack(moved), labels


def _objective(config: LayersConfig) -> Objective:
    if config.method == "map":
        return MAP()
    return Evidence()


def _start(config: LayersConfig, model: nn.Module) -> float | dict[str, float]:
    """Rescale free paths to their start, if it is not closed; return initial prior precisions."""
    if config.method != "evidence" or config.prior_structure not in ("layerwise", "path"):
        return 1.0
    shared = config.prior_structure == "path"
    if config.start == "closed":
        return closed_paths(model, config.free_precision, shared=shared) or 1.0
    if config.start == "search":
        return 1.0
    levels = dict.fromkeys(free_paths(model), config.start.replace("-", " "))
    rescale_paths(model, levels)
    found = start_precisions(model, levels, shared=shared)
    return {re.escape(name): precision for name, precision in found.items()} or 1.0


def _draw(directory: RunDirectory, result: LayersResult, n_train: int) -> None:
    config = result.config
    words = config.transform.replace("_", " ")
    title = f"{Path(config.data).stem}, {words}, task {config.task}, {config.kind}, {config.method}"

    def shares_and_precisions(figure: Figure) -> None:
        above, below = figure.subplots(2, 1)
        plots.layer_shares(result.report, above)
        plots.layer_precisions(result.report, below)
        figure.suptitle(title)

    draw_evidence(directory, result.history, n_train, title, _estimator(config))
    directory.figure("layers.png", (9, 8), shares_and_precisions)
