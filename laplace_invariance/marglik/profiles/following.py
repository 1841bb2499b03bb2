"""Other open ranges follow while one range is held: a few gradient steps on the evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from laplace_invariance.hyper import hyperparameters
from laplace_invariance.marglik.approximation import constant, learnt_hyperparameters
from laplace_invariance.marglik.estimators import Running
from laplace_invariance.marglik.estimators.base import Context
from laplace_invariance.marglik.hyperparameters import Hyperparameters
from laplace_invariance.marglik.loop import Trainer
from laplace_invariance.marglik.profiles.ranges import Range, ranges_of

__all__ = ["N_LOOKS", "Following", "followers"]

N_LOOKS = 20  # minibatches that gradients are taken from, at each value
N_EXAMPLES = 400  # for one estimate of curvature and priors, if there are as many
RATE = 0.02  # first step size of ranges, which falls to zero


class Following:
    """Steps the open ranges of a model along the evidence, but for one, by the running estimator.

    The running estimator of training takes curvature and gradients from minibatches. The range
    that is held, and those that are closed, return to what they were after every step: at zero, a
    gradient is noise.

    Args:
        model: The model.
        trainer: What trains its weights, with the priors that estimates take to their optimum.
        held: The range that is held.

    Raises:
        ValueError: If the backend cannot differentiate the ranges that follow.
    """

    def __init__(self, model: nn.Module, trainer: Trainer, held: Range) -> None:
        self._ranges = followers(model, held)
        names = {one.name for one in self._ranges}
        self._held = [one for one in ranges_of(model) if one.name not in names]
        self._constant = _not_of(model, self._ranges)
        self._n_needed = min(N_EXAMPLES, trainer.settings.data.n_data)
        self._n_seen = 0
        with constant(self._constant):
            self._hyperparameters = Hyperparameters(model, RATE)
            context = Context(
                model, trainer.settings, trainer.priors, self._hyperparameters, trainer.guard
            )
            self._estimator = Running(every=1, settle=0.0).start(context)
        self._check_backend(trainer)

    def _check_backend(self, trainer: Trainer) -> None:
        if self._estimator.approximation.differentiates():
            return
        names = ", ".join(one.name for one in self._ranges)
        raise ValueError(
            f"the evidence of backend {trainer.settings.evidence.backend.__name__} has no gradient "
            f"by which {names} could follow; use backend=AugmentedGGN, or hold_others=True"
        )

    def look(self, data: Any, share: float) -> None:
        """Learn from a minibatch; ranges step as soon as there was an estimate of the evidence.

        Args:
            data: Inputs and targets.
            share: How much of the training is over, from 0 to 1.
        """
        x, y = self._estimator.approximation.batch(data)
        held = [tensor for one in self._held for tensor in one.entries()]
        kept = [tensor.clone() for tensor in held]
        with constant(self._constant):
            self._hyperparameters.set_rate(RATE * (1 + math.cos(math.pi * share)) / 2)
            self._estimator.observe(x, y, epoch=1)
            for tensor, before in zip(held, kept, strict=True):
                tensor.copy_(before)
            self._n_seen += len(y)
            if self._n_seen >= self._n_needed:
                self._estimator.estimate(epoch=1)
                self._n_seen = 0


def followers(model: nn.Module, held: Range) -> list[Range]:
    """Return the open ranges of a model but for the one that is held."""
    return [one for one in ranges_of(model) if one.is_open and one.name != held.name]


def _not_of(model: nn.Module, ranges: Sequence[Range]) -> list[Tensor]:
    """Return learnt hyperparameters that do not belong to the augmentations of some ranges."""
    own = {id(tensor) for one in ranges for tensor in hyperparameters(one.augmentation)}
    return [tensor for tensor in learnt_hyperparameters(model) if id(tensor) not in own]
