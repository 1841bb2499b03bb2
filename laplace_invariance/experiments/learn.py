"""Learn to which transformations images are invariant, and how far.

Images are transformed in a known way, and a network learns by evidence how far they were. All
methods run through ``marglik_training`` and differ in three things only: what the network is
averaged over, the objective, and what happens to training images on the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from laplace_invariance import datasets
from laplace_invariance.augmentations import AffineImage
from laplace_invariance.experiments import pictures
from laplace_invariance.experiments.base import (
    BATCH,
    MARGLIK_BATCH,
    N_SHOWN,
    TEST_BATCH,
    accuracy,
    cosine_recipe,
    image_model,
    load_transformed,
    seeded,
    training_seconds,
    with_error,
)
from laplace_invariance.experiments.choices import LEARN_METHODS
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.options import LearnConfig
from laplace_invariance.experiments.reports import learn_report
from laplace_invariance.layers import FixupResNet, cnn, mlp
from laplace_invariance.marglik import (
    Augerino,
    Evidence,
    Objective,
    Result,
    SearchResult,
    marglik_training,
)
from laplace_invariance.marglik.estimators import chosen_estimator
from laplace_invariance.tables import labelled

__all__ = ["LEARN_NETWORKS", "LearnConfig", "LearnResult", "learn", "learnt_model"]

LEARN_NETWORKS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet": lambda in_shape, n_classes: FixupResNet(in_shape[0], n_classes, depth=8),
}


@dataclass(frozen=True)
class LearnResult:
    """Ranges, accuracy and evidence of one run; prints as a summary.

    Attributes:
        config: Configuration of the run.
        accuracy: Accuracy on the test images.
        evidence: Log evidence per training image, of all directions of the loss Hessian.
        evidence_error: Standard error of the evidence; 0 if it is exact, as up to 33 classes.
        newton_decrement: By how much a Newton step on the weights would raise their log posterior,
            per training image; far from zero the evidence is not to be trusted.
        n_samples: Number of samples that outputs are averaged over; with more of them the evidence
            is higher.
        ranges: Learnt ranges in words, by name; empty without an augmentation.
        magnitudes: Learnt ranges as numbers, by name.
        truth: True ranges, by name.
        scale_correlation: Correlation of the two axes' scalings, if correlations were learnt.
        seconds: Duration of search and training, validation included.
        search: What the search for a start tried: the best trial, all trials, and the evidence of
            guessing; None without a search.
        training: What ``marglik_training`` returned; None if the result was read from a file.
    """

    config: LearnConfig
    accuracy: float
    evidence: float
    evidence_error: float
    newton_decrement: float
    n_samples: int
    ranges: dict[str, str]
    magnitudes: dict[str, float]
    truth: dict[str, float]
    scale_correlation: float | None
    seconds: float
    search: dict[str, Any] | None = None
    training: Result | None = field(default=None, repr=False, compare=False)

    def summary(self) -> dict[str, Any]:
        """Return the configuration and all that was learnt, for JSON."""
        left_out = ("config", "training")
        values = {name: value for name, value in vars(self).items() if name not in left_out}
        return {"experiment": asdict(self.config), **values}

    def __str__(self) -> str:
        config = self.config
        words = config.transform.replace("_", " ")
        lines = [
            labelled("data", f"{config.data}, {words}, seed {config.seed}"),
            labelled("method", f"{config.method}: {LEARN_METHODS[config.method]}"),
        ]
        if self.search is not None:
            lines.append(labelled("search", self._search_words(self.search)))
        if self.magnitudes:
            lines += self._range_lines()
        if self.scale_correlation is not None:
            lines.append(labelled("x and y scale", f"correlated by {self.scale_correlation:.2f}"))
        lines.append(labelled("test accuracy", f"{self.accuracy:.1%}"))
        lines.append(labelled("log evidence", self._evidence_words()))
        lines.append(labelled("time", f"{self.seconds:.0f} s"))
        return "\n".join(lines)

    def _search_words(self, search: dict[str, Any]) -> str:
        """Return what the search tried, where it starts, and what came next."""
        found = SearchResult.from_state_dict(search)
        words = f"{len(found.trials)} candidates, starts at: {found.best}"
        rivals = [t for t in found.trials if t != found.best and t.n_steps == found.best.n_steps]
        if rivals:
            words += f"; next, by {rivals[0].loss:.3f} nats: {rivals[0]}"
        return words

    def _evidence_words(self) -> str:
        words = f"{with_error(self.evidence, self.evidence_error)} per training image"
        if self.config.subset_of_weights == "last_layer":
            words += ", of the last layer"
        if self.n_samples > 1:
            words += f", {self.n_samples} samples"
        return words

    def _range_lines(self) -> list[str]:
        """Return a line for each range that is not zero in truth, and one for all others."""
        true = AffineImage(init=self.truth).ranges()
        wanted = [name for name, value in self.truth.items() if value > 0]
        lines = [labelled(name, f"{self.ranges[name]}, true {true[name]}") for name in wanted]
        rest = {name: value for name, value in self.magnitudes.items() if name not in wanted}
        widest = max(rest, key=lambda name: rest[name])
        label = "all others" if wanted else "all ranges"
        text = f"at most {rest[widest]:.3f} ({widest}: {self.ranges[widest]})"
        return [*lines, labelled(label, text)]


def learn(
    config: LearnConfig,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    progress_bar: bool = False,
) -> LearnResult:
    """Train one network, and learn to which transformations it should be invariant.

    Args:
        config: Images, transformation, method and network.
        out: Directory for ``checkpoint.pt``, ``history.jsonl``, ``summary.json`` and figures; None
            keeps nothing.
        resume: Whether to continue from a checkpoint in ``out``; a finished run is read.
        progress_bar: Whether to show progress.

    Returns:
        Learnt ranges, test accuracy and evidence.
    """
    with RunDirectory(out, config, resume) as directory, seeded(config.seed):
        summary = directory.finished()
        if summary is not None:
            del summary["experiment"]
            finished = LearnResult(config, **summary)
            learn_report(directory, finished)
            return finished
        split, model, augmentation = _prepare(config)
        directory.begin()
        start = time.perf_counter()
        training = _train(config, split, model, directory, progress_bar)
        # The history has the time of interrupted calls before, the clock that of validation.
        seconds = max(training_seconds(training.history), time.perf_counter() - start)
        result = LearnResult(
            config,
            accuracy=accuracy(model, TensorDataset(split.x_test, split.y_test)),
            evidence=training.evidence / len(split.x_train),
            evidence_error=training.evidence_error / len(split.x_train),
            newton_decrement=training.newton_decrement / len(split.x_train),
            n_samples=training.n_samples.get("", 1),
            **_learnt(augmentation),
            truth=datasets.true_ranges(config.transform),
            scale_correlation=_scale_correlation(config, augmentation),
            seconds=seconds,
            search=None if training.search is None else training.search.state_dict(),
            training=training,
        )
        estimator = chosen_estimator(_estimator(config), training.model, _objective(config))
        pictures.draw_learn(directory, result, _augmentation(config), estimator, split)
        directory.save("summary.json", result.summary())
        learn_report(directory, result)
    return result


def learnt_model(result: LearnResult, out: str | Path | None) -> tuple[nn.Module, TensorDataset]:
    """Return the model of a run of :func:`learn`, and the images that it was trained on.

    Args:
        result: Result of the run, perhaps read from a file.
        out: Directory of the run, whose checkpoint has the model then.

    Raises:
        FileExistsError: If the directory has a run without its checkpoint.
    """
    config = result.config
    with RunDirectory(out, config, resume=True) as directory, seeded(config.seed):
        split, model, _ = _prepare(config)
        if result.training is not None:
            model = result.training.model
        else:
            directory.lock()
            _train(config, split, model, directory, progress_bar=False)  # no epoch is left
    return model, TensorDataset(split.x_train, split.y_train)


def _prepare(config: LearnConfig) -> tuple[datasets.Split, nn.Module, AffineImage | None]:
    """Return transformed images, and the model as training starts with it."""
    split = load_transformed(config, config.transform, config.seed)
    augmentation = _augmentation(config)
    net = LEARN_NETWORKS[config.net](split.in_shape, split.n_classes)
    return split, image_model(net, split.x_train, augmentation, config.n_samples), augmentation


def _augmentation(config: LearnConfig) -> AffineImage | None:
    if config.method == "evidence":
        return AffineImage(correlated=config.correlated)
    if config.method == "augerino":
        return AffineImage(init=0.1, correlated=config.correlated)
    if config.method == "fixed":
        return AffineImage(init=dict(config.fixed)).frozen()
    return None


def _objective(config: LearnConfig) -> Objective:
    if config.method == "augerino":
        return Augerino(config.strength)
    return Evidence()


def _train(
    config: LearnConfig,
    split: datasets.Split,
    model: nn.Module,
    directory: RunDirectory,
    progress_bar: bool,
) -> Result:
    train = TensorDataset(split.x_train, split.y_train)
    test = TensorDataset(split.x_test, split.y_test)
    collate = None
    if config.method == "trivial-augment":
        collate = _trivially_augmented
    loader = DataLoader(train, BATCH, shuffle=True, collate_fn=collate)
    options: dict[str, Any] = {}
    if config.method == "augerino":
        options["lr_aug"] = config.lr_augerino
    return marglik_training(
        model,
        loader,
        objective=_objective(config),
        estimator=_estimator(config),
        search=config.method == "evidence" and config.start == "search",
        subset_of_weights=config.subset_of_weights,
        marglik_loader=DataLoader(train, MARGLIK_BATCH),
        valid_loader=DataLoader(TensorDataset(*test[:N_SHOWN]), TEST_BATCH),
        checkpoint=directory.path("checkpoint.pt"),
        history=directory.path("history.jsonl"),
        resume=directory.resume,
        progress_bar=progress_bar,
        **cosine_recipe(config.n_epochs, len(loader)),
        **options,
    )


def _estimator(config: LearnConfig) -> str:
    """Return the name of the estimator; one that sees training images must not see augmented."""
    if config.estimator is not None:
        return config.estimator
    return "refit" if config.method == "trivial-augment" else "running"


def _trivially_augmented(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Collate examples, each image through a transform of torchvision that takes uint8."""
    from torchvision.transforms import v2

    transform = v2.TrivialAugmentWide()
    x, y = default_collate(examples)
    images = [transform(image) for image in (x * 255).round().to(torch.uint8)]
    return torch.stack(images).to(x.dtype) / 255, y


def _learnt(augmentation: AffineImage | None) -> dict[str, Any]:
    """Return the ranges of an augmentation, in words and as numbers."""
    if augmentation is None:
        return {"ranges": {}, "magnitudes": {}}
    return {"ranges": augmentation.ranges(), "magnitudes": augmentation.magnitudes()}


@torch.no_grad()
def _scale_correlation(config: LearnConfig, augmentation: AffineImage | None) -> float | None:
    """Return the correlation of x- and y-scale under the learnt distribution, if there is one.

    Draws are uncorrelated and of equal variance, so it is the cosine between two rows of the map
    from draws to coefficients.
    """
    if augmentation is None or not config.correlated:
        return None
    columns = augmentation.coefficients(torch.eye(len(augmentation.names))).unbind(1)
    x_scale, y_scale = (columns[augmentation.names.index(f"{axis}_scale")] for axis in "xy")
    return F.cosine_similarity(x_scale, y_scale, dim=0).item()
