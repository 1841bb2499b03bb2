"""Ask which augmentations would raise the evidence of a network that was trained without any.

A network is trained on images in the ordinary way, or its weights are read from a file. Then every
range of transformations is tried, by training on for a while with it and without.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_invariance import datasets
from laplace_invariance.augmentations import AffineImage
from laplace_invariance.experiments import pictures
from laplace_invariance.experiments.base import (
    BATCH,
    MARGLIK_BATCH,
    accuracy,
    cosine_recipe,
    image_model,
    load_transformed,
    network_name,
    seeded,
)
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.learn import LEARN_NETWORKS
from laplace_invariance.experiments.options import SuggestConfig
from laplace_invariance.experiments.reports import suggest_report
from laplace_invariance.experiments.results import transform_words
from laplace_invariance.files import replace
from laplace_invariance.marglik import MAP, Suggestions, marglik_training
from laplace_invariance.marglik import suggest as suggest_for
from laplace_invariance.marglik.suggestions import candidates_of
from laplace_invariance.marglik.targets import check_targets
from laplace_invariance.tables import labelled

__all__ = ["SuggestConfig", "SuggestResult", "suggest"]

LR = 2e-3  # step size of the weights at the start


@dataclass(frozen=True)
class SuggestResult:
    """What was suggested for a network; prints as a table.

    Attributes:
        config: Configuration of the run.
        accuracy: Accuracy of the network on the test images; None if there are none.
        net: Network.
        suggestions: Gains in evidence by augmentation.
    """

    config: SuggestConfig
    accuracy: float | None
    net: str
    suggestions: Suggestions

    def summary(self) -> dict[str, Any]:
        """Return the configuration and all that was found, for JSON."""
        return {
            "experiment": asdict(self.config),
            "accuracy": self.accuracy,
            "net": self.net,
            "suggestions": self.suggestions.to_dict(),
        }

    def __str__(self) -> str:
        config = self.config
        words = transform_words(config.transform)
        source = config.weights or f"{config.n_epochs} epochs without augmentation"
        lines = [
            labelled("data", f"{config.data}, {words}, seed {config.seed}"),
            labelled("network", f"{self.net}, {source}"),
        ]
        if self.accuracy is not None:
            lines.append(labelled("test accuracy", f"{self.accuracy:.1%}"))
        return "\n".join([*lines, "", str(self.suggestions), ""])


def suggest(
    config: SuggestConfig,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    progress_bar: bool = False,
) -> SuggestResult:
    """Train or read a network, and say which augmentations would raise its evidence.

    Args:
        config: Images, network and what to try.
        out: Directory for ``network.pt``, ``trials.json``, ``summary.json`` and ``suggest.png``,
            and the checkpoint and history of training; None keeps nothing.
        resume: Whether to continue with what is in ``out``; a finished run is read.
        progress_bar: Whether to show progress.

    Returns:
        Gains in evidence by augmentation, and the accuracy of the network.
    """
    with RunDirectory(out, config, resume) as directory, seeded(config.seed):
        summary = directory.finished()
        if summary is not None:
            found = Suggestions.from_dict(summary["suggestions"])
            finished = SuggestResult(config, summary["accuracy"], summary["net"], found)
            suggest_report(directory, finished)
            return finished
        split = load_transformed(config, config.transform, config.seed, needs_test=False)
        augmentation = AffineImage()
        candidates_of(augmentation, config.ranges or None)  # refuse before anything is trained
        check_targets([split.y_train])
        net = _network(config, split)
        if config.weights is not None:
            _read_weights(net, Path(config.weights))
        directory.begin()
        train = TensorDataset(split.x_train, split.y_train)
        if config.weights is None:
            _train(config, net, train, directory, progress_bar)
        found = suggest_for(
            net,
            DataLoader(train, BATCH),
            augmentation,
            n_samples=config.n_samples,
            ranges=config.ranges or None,
            n_steps=config.n_steps,
            n_repeats=config.n_repeats,
            checkpoint=directory.path("trials.json"),
            resume=resume,
            progress_bar=progress_bar,
        )
        rate = None
        if split.has_test:
            rate = accuracy(net, TensorDataset(split.x_test, split.y_test))
        result = SuggestResult(config, rate, network_name(config.net, split), found)
        pictures.draw_suggest(directory, result)
        directory.save("summary.json", result.summary())
        suggest_report(directory, result)
    return result


def _network(config: SuggestConfig, split: datasets.Split) -> nn.Module:
    net = LEARN_NETWORKS[network_name(config.net, split)](split.in_shape, split.n_classes)
    return image_model(net, split.x_train, None, config.n_samples)


def _read_weights(net: nn.Module, path: Path) -> None:
    """Read the weights of a network, as ``torch.save(net.state_dict(), path)`` wrote them."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path} to read weights from")
    try:
        net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises many kinds, from zip and pickle to its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{path} does not have the weights of this network, whose names and shapes are those "
            f"of network.pt of a run without --weights; choose another --net? {reason}"
        ) from error


def _train(
    config: SuggestConfig,
    net: nn.Module,
    train: TensorDataset,
    directory: RunDirectory,
    progress_bar: bool,
) -> None:
    """Train a network by its loss, or go on with it, and write its weights."""
    loader = DataLoader(train, BATCH, shuffle=True)
    marglik_training(
        net,
        loader,
        objective=MAP(),
        marglik_loader=DataLoader(train, MARGLIK_BATCH),
        checkpoint=directory.path("checkpoint.pt"),
        history=directory.path("history.jsonl"),
        resume=directory.resume,
        progress_bar=progress_bar,
        **cosine_recipe(config.n_epochs, len(loader), lr=LR),
    )
    path = directory.path("network.pt")
    if path is not None:
        replace(path, lambda file: torch.save(net.state_dict(), file))
