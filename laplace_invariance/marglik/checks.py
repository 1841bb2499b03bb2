"""What is refused before a training, so that nothing was trained or written then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from laplace_invariance.layers.starts import check_rescalable
from laplace_invariance.marglik.search import PathSpace, space_of
from laplace_invariance.marglik.settings import Settings
from laplace_invariance.marglik.targets import (
    check_labels,
    check_targets,
    known_targets,
    targets_of,
)
from laplace_invariance.modes import evaluation

__all__ = ["check_data", "check_every_target", "check_search"]


def check_search(model: nn.Module, settings: Settings) -> None:
    """Raise if there is nothing to search, or nothing to compare by, before anything is written."""
    space = space_of(model, settings)
    checkpoint = settings.output.checkpoint
    if isinstance(space, PathSpace) and (checkpoint is None or not Path(checkpoint).exists()):
        check_rescalable(model)  # a run that is resumed brings weights of its own
    with torch.random.fork_rng(devices=[]):
        check_targets(targets_of(settings.data))


def check_data(model: nn.Module, settings: Settings) -> None:
    """Raise unless labels are classes, and all ranks, which take rows of them, have the same data.

    Labels that are not at hand are checked with every batch.
    """
    targets = known_targets(settings.data.train_loader.dataset)
    if targets is not None and not settings.evidence.is_regression:
        check_labels(targets, _n_outputs(model, settings))
    if settings.ranks.size == 1:
        return
    with torch.random.fork_rng(devices=[]):
        data = next(iter(settings.data.ordered_loader))
    y = data[settings.data.dict_key_y] if isinstance(data, Mapping) else data[-1]
    settings.ranks.check_equal(
        (settings.data.n_data, y.tolist()),
        "ranks have different data; give all of them the same data set, of which each takes rows "
        "of its own, with an ordinary loader or a DistributedSampler",
    )


def check_every_target(model: nn.Module, settings: Settings) -> None:
    """Raise if all targets are the same, or if any is no class of the model; all are read."""
    batches = list(targets_of(settings.data))
    if not settings.evidence.is_regression:
        n_outputs = _n_outputs(model, settings)
        for targets in batches:
            check_labels(targets, n_outputs)
    check_targets(batches)


def _n_outputs(model: nn.Module, settings: Settings) -> int:
    """Return the number of outputs of a model, which is left as it is."""
    x = settings.data.example()
    if isinstance(x, torch.Tensor):
        x = x[:1].to(next(model.parameters()).device)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), evaluation(model):
        found: int = model(x).shape[-1]
    return found
