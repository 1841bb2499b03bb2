"""Objectives by which hyperparameters are learnt: the evidence, the training loss, or none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from laplace_invariance.augmentations import BoxAugmentation
from laplace_invariance.hyper import differentiable

__all__ = ["MAP", "Augerino", "Evidence", "Objective", "Regularised", "evidence_unless_given"]

Criterion = Callable[[Tensor, Tensor], Tensor]


class Objective:
    """Base class of the ways in which ``marglik_training`` learns hyperparameters.

    Attributes:
        estimates: Whether the evidence is estimated, and prior precisions and noise learnt by it.
        steps_in_training: Whether hyperparameters are stepped by the training loss, with every
            batch, instead of the evidence.
    """

    estimates = False
    steps_in_training = False

    def training_loss(self, model: nn.Module, criterion: Criterion, x: Any, y: Tensor) -> Tensor:
        """Return the mean loss of a batch, to which the negative log prior is added.

        Args:
            model: The model in training mode.
            criterion: Cross-entropy or squared error, called as ``criterion(outputs, y)``.
            x: Inputs ``[batch, ...]``, or a mapping if the loader yields mappings.
            y: Targets ``[batch, ...]``.

        Returns:
            A scalar; ``criterion(model(x), y)`` unless a subclass overrides it.
        """
        return criterion(model(x), y)

    def __repr__(self) -> str:
        # A checkpoint is only resumed with an objective of the same text.
        return f"{type(self).__name__}({vars(self)})"


class Evidence(Objective):
    """Learn prior precisions, noise and hyperparameters by the evidence."""

    estimates = True


class MAP(Objective):
    """Learn weights only: prior precisions, noise and hyperparameters keep their initial values."""


class Augerino(Objective):
    """Learn ranges by the training loss, with a reward for wide ones (Benton et al., 2020).

    The loss is ``criterion(f(x), y) - strength * |w|`` with ``w`` the half-widths that are learnt.
    Ranges step with every batch, so ``lr_aug`` must be small, 0.03 or less; start them above zero,
    at 0.1 or so.

    Args:
        strength: Factor of the reward; 0.01 in the paper.
        learn_priors: Whether prior precisions and noise are learnt by the evidence, as otherwise;
            in the paper they are a fixed weight decay.

    Raises:
        ValueError: If the strength is negative or not finite.
    """

    steps_in_training = True

    def __init__(self, strength: float = 0.01, learn_priors: bool = True) -> None:
        _check_strength(strength)
        self.strength = strength
        self.estimates = learn_priors

    def training_loss(self, model: nn.Module, criterion: Criterion, x: Any, y: Tensor) -> Tensor:
        augmentations = [
            module for module in model.modules() if isinstance(module, BoxAugmentation)
        ]
        if not augmentations:
            raise ValueError(
                "Augerino learns the ranges of an augmentation; "
                "wrap the network in InvariantModel(net, augmentation)"
            )
        with differentiable():
            widths = [module.half_widths() * module.learnt_mask for module in augmentations]
            return criterion(model(x), y) - self.strength * torch.cat(widths).norm()


class Regularised(Objective):
    """Add a penalty to the training loss of another objective.

    Weights follow the sum; the evidence, where it is estimated, does not contain the penalty.
    The error of :class:`~laplace_invariance.metrics.InvarianceError` is such a penalty.

    Args:
        penalty: Function called as ``penalty(model, x)`` with every batch, which returns a scalar.
            A checkpoint identifies it by its ``repr``.
        strength: Factor of the penalty.
        objective: Objective to whose loss the penalty is added; None is :class:`Evidence`.

    Raises:
        TypeError: If the penalty cannot be called, or the objective is none.
        ValueError: If the strength is negative or not finite.
    """

    def __init__(
        self,
        penalty: Callable[[nn.Module, Any], Tensor],
        strength: float = 1.0,
        objective: Objective | None = None,
    ) -> None:
        if not callable(penalty):
            raise TypeError(f"penalty must be callable as penalty(model, x), got {penalty!r}")
        _check_strength(strength)
        self.penalty = penalty
        self.strength = strength
        self.objective = evidence_unless_given(objective)
        self.estimates = self.objective.estimates
        self.steps_in_training = self.objective.steps_in_training

    def training_loss(self, model: nn.Module, criterion: Criterion, x: Any, y: Tensor) -> Tensor:
        loss = self.objective.training_loss(model, criterion, x, y)
        return loss + self.strength * self.penalty(model, x)


def _check_strength(strength: float) -> None:
    if not 0 <= strength < math.inf:  # which NaN is not, either
        raise ValueError(f"strength must be finite and not negative, got {strength}")


def evidence_unless_given(objective: Objective | None) -> Objective:
    """Return the objective, or :class:`Evidence` for None; raise TypeError for anything else."""
    if objective is None:
        return Evidence()
    if not isinstance(objective, Objective):
        raise TypeError(
            "objective must be an instance of laplace_invariance.marglik.Objective, "
            f"got {objective!r}"
        )
    return objective
