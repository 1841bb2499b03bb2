"""What is kept and shown of every epoch of a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace_invariance.files import to_finite
from laplace_invariance.marglik.estimators.base import TERMS
from laplace_invariance.marglik.settings import Record

if TYPE_CHECKING:
    from laplace_invariance.marglik.loop import Trainer

__all__ = ["progress", "record_of"]

MAX_NAMED = 200  # prior precisions that a record has by name
MAX_LISTED = 1000  # prior precisions that a record has at all


def record_of(
    trainer: Trainer,
    estimate: Record,
    valid: dict[str, float | None] | None,
    seconds: dict[str, float],
) -> Record:
    """Return what is known at the end of an epoch.

    Args:
        trainer: Run after the epoch.
        estimate: What the estimator found, nothing if it was not asked.
        valid: What was found on other data, None if none was looked at.
        seconds: Duration of training and of the estimate.
    """
    priors = trainer.priors
    noise = priors.noise
    record = {
        "epoch": trainer.epoch,
        "loss": trainer.losses[-1],
        **dict.fromkeys(("evidence", *TERMS, "newton_decrement")),
        **trainer.hyperparameters.describe(),
        **estimate,
        "prior_precision": _summary(priors.precision.detach()),
        "prior_precisions": priors.named() if len(priors.groups) <= MAX_NAMED else None,
        "sigma_noise": None if noise is None else noise.item(),
        "valid": valid,
        "skipped": dict(trainer.guard.skipped),
        "seconds": dict(seconds),
    }
    found: Record = to_finite(record)
    return found


def _summary(precisions: Tensor) -> list[float]:
    """Return prior precisions; minimum, median and maximum if there are too many for a record."""
    if len(precisions) > MAX_LISTED:
        precisions = torch.stack([precisions.min(), precisions.median(), precisions.max()])
    return precisions.tolist()


def progress(trainer: Trainer) -> dict[str, str]:
    """Return loss, evidence, accuracy and the widest ranges, each as last known, in words."""
    history = trainer.history
    shown = {"loss": f"{trainer.losses[-1]:.3f}"}
    evidence = _last_known(history, "evidence")
    if evidence is not None:
        shown["evidence"] = f"{evidence / trainer.settings.data.n_data:.3f}"
    valid = _last_known(history, "valid")
    if valid is not None and "accuracy" in valid:
        shown["accuracy"] = f"{valid['accuracy']:.1%}"
    ranges: dict[str, float] = {}
    for magnitudes in history[-1]["ranges"].values():
        ranges |= magnitudes
    widest = sorted(ranges.items(), key=lambda item: item[1], reverse=True)[:3]
    return shown | {name: f"{value:.2f}" for name, value in widest}


def _last_known(history: Sequence[Record], key: str) -> Any:
    known = (record[key] for record in reversed(history) if record[key] is not None)
    return next(known, None)
