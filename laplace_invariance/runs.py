"""Finished runs of the command line, back in Python."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laplace_invariance.augmentations import AffineImage
from laplace_invariance.experiments.learn import LearnConfig, LearnResult, build_model
from laplace_invariance.files import read_json

__all__ = ["Run", "load_run"]


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run of ``laplace-invariance learn``; prints as its summary.

    Attributes:
        directory: Where it was read from.
        config: Its configuration.
        result: What it found: ranges, evidence, accuracy, and what the search tried.
        model: The trained network, averaged over the augmentation, in evaluation mode. It takes
            images ``[n, channels, height, width]`` in [0, 1].
        augmentation: The learnt augmentation, a part of the model; None if the method had none.
        history: One record per epoch, as of :func:`~laplace_invariance.marglik_training`.
    """

    directory: Path
    config: LearnConfig
    result: LearnResult
    model: nn.Module
    augmentation: AffineImage | None
    history: list[dict[str, Any]]

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of the outputs; numbers if they have no names."""
        data = self.result.data
        return data["classes"] or [str(label) for label in range(data["n_classes"])]

    def ranges(self) -> dict[str, str]:
        """Return the learnt ranges by name, in degrees, pixels of the images, and factors."""
        if self.augmentation is None:
            return {}
        return self.augmentation.ranges(self.result.data["in_shape"])

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Return the probabilities ``[n, classes]`` of images ``[n, c, h, w]`` in [0, 1]."""
        return self.model(images).softmax(-1)

    def __str__(self) -> str:
        return str(self.result)

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"


def load_run(directory: str | Path) -> Run:
    """Read a finished run of ``laplace-invariance learn``, to predict, to export or to train on.

    The data are not needed for it.

    Args:
        directory: Directory that the run wrote, its ``--out``.

    Returns:
        Model, augmentation, history, configuration and result.

    Raises:
        FileNotFoundError: If there is no such directory, or no run in it.
        ValueError: If the run has not finished, is of another verb, or of another version.
    """
    directory = Path(directory)
    config = _config(directory)
    for name in ("summary.json", "model.pt"):
        if not (directory / name).exists():
            raise ValueError(
                f"the run in {directory} has not finished: there is no {name}; the command that "
                "began it continues with --resume"
            )
    summary = read_json(directory / "summary.json")
    del summary["experiment"]
    result = LearnResult(config, **summary)
    model = _model(result, directory / "model.pt")
    lines = (directory / "history.jsonl").read_text().splitlines()
    history = [json.loads(line) for line in lines]
    return Run(directory, config, result, model, getattr(model, "augmentation", None), history)


def _config(directory: Path) -> LearnConfig:
    """Return the configuration of the run in a directory."""
    path = directory / "experiment.json"
    if not path.exists():
        raise FileNotFoundError(
            f"there is no run in {directory}, which has no experiment.json; give the directory "
            "that laplace-invariance learn wrote, its --out"
        )
    saved = read_json(path)
    kind, version = saved.pop("experiment", None), saved.pop("format", 1)
    if kind != LearnConfig.__name__:
        inside = sorted(str(found.parent) for found in directory.glob("*/experiment.json"))
        hint = f"; its runs of learn are in {', '.join(inside)}" if inside else ""
        raise ValueError(f"{directory} has no run of learn, but one of {kind}{hint}")
    if version != LearnConfig.format:
        raise ValueError(
            f"{path} has format {version}, and this version reads format {LearnConfig.format}; "
            "run it again in another directory"
        )
    return LearnConfig(**saved)


def _model(result: LearnResult, path: Path) -> nn.Module:
    """Return the model of a run, with its weights and ranges."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    data = result.data
    with torch.random.fork_rng(devices=[]):  # initial weights, which are replaced
        blank = torch.zeros(1, *data["in_shape"])
        model = build_model(result.config, result.net, data["n_classes"], blank)
    dtype = next(value.dtype for value in state.values() if value.is_floating_point())
    model.to(dtype).load_state_dict(state)
    return model.eval()
