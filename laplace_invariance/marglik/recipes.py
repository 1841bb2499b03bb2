"""Settings of training that suit small networks on images, as the experiments use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch

__all__ = ["SAMPLED", "Recipe", "cosine_recipe"]

# The loss Hessian in training, by one random direction: without bias, and the cheapest.
# The evidence of a result is computed with all directions.
SAMPLED = {"stochastic": True}


class Recipe(TypedDict):
    """Arguments of ``marglik_training`` that experiments share."""

    n_epochs: int
    optimizer_kwargs: dict[str, Any]
    scheduler_cls: type[torch.optim.lr_scheduler.LRScheduler]
    scheduler_kwargs: dict[str, Any]
    n_epochs_burnin: int
    marglik_frequency: int
    n_hypersteps: int
    backend_kwargs: dict[str, Any]


def cosine_recipe(
    n_epochs: int,
    n_batches: int,
    *,
    lr: float = 5e-3,
    lr_min: float = 5e-5,
    n_epochs_burnin: int = 4,
    marglik_frequency: int = 2,
    n_hypersteps: int = 4,
    backend_kwargs: Mapping[str, Any] | None = None,
) -> Recipe:
    """Return settings of training whose step size falls along half a cosine over all batches.

    Args:
        n_epochs: Number of epochs.
        n_batches: Number of batches per epoch.
        lr: Step size of the weights at the start.
        lr_min: Step size of the weights at the end.
        n_epochs_burnin: Number of epochs before the first estimate of the evidence, at most half.
        marglik_frequency: Number of epochs between two estimates, at most all.
        n_hypersteps: Number of steps on prior precisions per estimate.
        backend_kwargs: Further options of the curvature.
    """
    return Recipe(
        n_epochs=n_epochs,
        optimizer_kwargs={"lr": lr},
        scheduler_cls=torch.optim.lr_scheduler.CosineAnnealingLR,
        scheduler_kwargs={"T_max": n_epochs * n_batches, "eta_min": lr_min},
        n_epochs_burnin=min(n_epochs_burnin, max(1, n_epochs // 2)),
        marglik_frequency=min(marglik_frequency, n_epochs),
        n_hypersteps=n_hypersteps,
        backend_kwargs=SAMPLED | dict(backend_kwargs or {}),
    )
