"""What hyperparameters are learnt by: the evidence, the training loss with a reward for wide ranges, or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from laplace_invariance.augmentations import BoxAugmentation
from laplace_invariance.hyper import differentiable

__all__ = ["MAP", "Augerino", "Evidence", "Objective", "Regularised"]

Criterion = Callable[[Tensor, Tensor], Tensor]


class Objective:
    """How ``marglik_training`` learns hyperparameters.

    Attributes:
        estimates: whether the evidence is estimated, and moves prior precisions and noise.
        steps_in_training: whether the training loss moves hyperparameters, with every batch, instead of the evidence.
    """

    estimates = False
    steps_in_training = False

    def training_loss(self, model: nn.Module, criterion: Criterion, x: Any, y: Tensor) -> Tensor:
        """Return the mean loss of a batch, to which the prior's term is added: by default ``criterion(model(x), y)``."""
        return criterion(model(x), y)

    def __repr__(self) -> str:  # a checkpoint is known by it
        return f"{type(self).__name__}({vars(self)})"


class Evidence(Objective):
    """Learn prior precisions, noise and hyperparameters by the Laplace approximation of the evidence."""

    estimates = True


class MAP(Objective):
    """Learn weights only: prior precisions, noise and hyperparameters stay as they are."""


class Augerino(Objective):
    """Learn hyperparameters by the training loss, with a reward for wide ranges (Benton et al., 2020).

    The loss is ``criterion(f(x), y) - strength * |w|`` with ``w`` the half-widths that are learnt. Prior precisions and noise are
    learnt by evidence, as otherwise. Ranges step with every batch, so ``lr_aug`` must be small, 0.03 or less; start them above
    zero, at 0.1 or so.

    Args:
        strength: of the reward; 0.01 in the paper.
    """

    estimates = True
    steps_in_training = True

    def __init__(self, strength: float = 0.01) -> None:
        if strength < 0:
            raise ValueError(f"strength must not be negative, got {strength}")
        self.strength = strength

    def training_loss(self, model: nn.Module, criterion: Criterion, x: Any, y: Tensor) -> Tensor:
        augmentations = [
            module for module in model.modules() if isinstance(module, BoxAugmentation)
        ]
        if not augmentations:
            raise ValueError(
                "Augerino learns the ranges of an augmentation; wrap the network in InvariantModel(net, augmentation)"
            )
        with differentiable():
            widths = torch.cat(
                [module.half_widths()[list(module.learnt)] for module in augmentations]
            )
            return criterion(model(x), y) - self.strength * widths.norm()


class Regularised(Objective):
    """Add a penalty to the training loss of another objective, such as the error of ``metrics.InvarianceError``.

    Weights follow the sum; the evidence, where it is estimated, knows nothing of the penalty.

    Args:
        penalty: called as ``penalty(model, x)`` with every batch; returns a scalar. A checkpoint knows it by its ``repr``.
        strength: factor of the penalty.
        objective: whose loss it is added to; None is :class:`Evidence`.
    """

    def __init__(
        self,
        penalty: Callable[[nn.Module, Any], Tensor],
        strength: float = 1.0,
        objective: Objective | None = None,
    ) -> None:
        objective = Evidence() if objective is None else objective
        if not isinstance(objective, Objective):
            raise TypeError(
                f"objective must be an instance of laplace_invariance.marglik.Objective, got {objective!r}"
            )
        if not callable(penalty):
            raise TypeError(f"penalty must be callable as penalty(model, x), got {penalty!r}")
        if not 0 <= strength < math.inf:
            raise ValueError(f"strength must be finite and not negative, got {strength}")
        self.penalty, self.strength, self.objective = penalty, strength, objective
        self.estimates, self.steps_in_training = objective.estimates, objective.steps_in_training

    def training_loss(self, model: nn.Module, criterion: Criterion, x: Any, y: Tensor) -> Tensor:
        loss = self.objective.training_loss(model, criterion, x, y)
        return loss + self.strength * self.penalty(model, x)
