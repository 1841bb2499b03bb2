"""Hyperparameters of a model that training learns, with their optimiser."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from laplace_invariance.augmentations.base import Augmentation
from laplace_invariance.hyper import Hyperparameterised, named_hyperparameters
from laplace_invariance.marglik.settings import Record

__all__ = ["Hyperparameters", "outermost_augmentations"]


class Hyperparameters:
    """The hyperparameters of a model that require grad, with the optimiser that steps them.

    Args:
        model: Any module; it need not have hyperparameters.
        lr: Initial step size of Adam.

    Attributes:
        named: The tensors by name.
        tensors: The tensors.

    Raises:
        ValueError: If a hyperparameter, learnt or not, is not finite.
    """

    def __init__(self, model: nn.Module, lr: float) -> None:
        self._model = model
        self.named = {}
        for name, tensor in named_hyperparameters(model):
            if not torch.isfinite(tensor).all():
                raise ValueError(
                    f"hyperparameter {name} is not finite at the start: {tensor.tolist()}"
                )
            if tensor.requires_grad:
                self.named[name] = tensor
        self.tensors = list(self.named.values())
        # a group may be empty, a list of tensors may not
        self._optimizer = torch.optim.Adam([{"params": self.tensors}], lr=lr)

    def set_rate(self, lr: float) -> None:
        """Set the step size."""
        self._optimizer.param_groups[0]["lr"] = lr

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """Step hyperparameters by their gradients, and bring them back into their domains."""
        self._optimizer.step()
        for module in self._model.modules():
            if isinstance(module, Hyperparameterised):
                module.project_()

    def describe(self) -> Record:
        """Return the present values, and the ranges of augmentations, for a record."""
        augmentations = outermost_augmentations(self._model)
        return {
            "hyperparameters": {name: tensor.tolist() for name, tensor in self.named.items()},
            "ranges": {name: module.magnitudes() for name, module in augmentations.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimiser; the values are in that of the model."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back a state that :meth:`state_dict` returned."""
        self._optimizer.load_state_dict(state)


def outermost_augmentations(model: nn.Module) -> dict[str, Augmentation]:
    """Return the augmentations that are not parts of others, which report the ranges of parts."""
    found: dict[str, Augmentation] = {}
    for name, module in model.named_modules():  # parents come before their parts
        is_part = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, Augmentation) and not is_part:
            found[name] = module
    return found
