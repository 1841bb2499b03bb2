"""Prior precisions and observation noise: what the evidence moves beside the hyperparameters of modules."""

from __future__ import annotations

import math
from typing import Any

import torch
from laplace.utils import expand_prior_precision, fix_prior_prec_structure
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

__all__ = ["Priors"]


class Priors:
    """Log prior precisions of the trainable parameters and, for regression, the log noise, with their optimiser.

    Args:
        model: whose parameters have the prior.
        structure: ``"scalar"``, ``"layerwise"`` (one per tensor) or ``"diag"``, as in laplace.
        precision: initial prior precision.
        noise: initial standard deviation of the observation noise; None where the likelihood has none.
        learn_noise: whether it is learnt.
        temperature: of the likelihood, as in laplace.
        lr: step size of Adam.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: str,
        precision: float,
        noise: float | None,
        learn_noise: bool,
        temperature: float,
        lr: float,
    ) -> None:
        self._model = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._temperature = temperature
        first = self._parameters[0]
        sizes = len(self._parameters), sum(p.numel() for p in self._parameters)
        start = math.log(temperature * precision)
        self.log_precision = fix_prior_prec_structure(start, structure, *sizes, first.device, first.dtype)
        self.log_precision.requires_grad_()
        self.log_noise = (
            None if noise is None else torch.full((1,), math.log(noise)).to(first).requires_grad_(learn_noise)
        )
        self.learnt = [t for t in (self.log_precision, self.log_noise) if t is not None and t.requires_grad]
        self.optimizer = torch.optim.Adam(self.learnt, lr=lr)

    @property
    def precision(self) -> Tensor:
        """The prior precisions, differentiable."""
        return self.log_precision.exp()

    @property
    def noise(self) -> Tensor | None:
        """The standard deviation of the noise, differentiable if learnt; None for classification."""
        return None if self.log_noise is None else self.log_noise.exp()

    def penalty(self, n_data: int) -> Tensor:
        """Return the negative log prior, scaled to be added to the mean loss of a datum."""
        scale = self._temperature if self.noise is None else self._temperature / (2 * self.noise.detach().square())
        theta = parameters_to_vector(self._parameters)
        delta = expand_prior_precision(self.precision.detach(), self._model)
        return (0.5 * (delta * theta) @ theta / n_data / scale).squeeze()

    def values(self) -> dict[str, Tensor]:
        """Return detached copies of the logarithms."""
        tensors = {"log_precision": self.log_precision, "log_noise": self.log_noise}
        return {name: tensor.detach().clone() for name, tensor in tensors.items() if tensor is not None}

    @torch.no_grad()
    def set_values(self, values: dict[str, Tensor]) -> None:
        """Put such copies back."""
        for name, value in values.items():
            getattr(self, name).copy_(value)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.set_values(state["values"])
        self.optimizer.load_state_dict(state["optimizer"])
