"""Training of a shallow network and its ranges by the ELBO, or by a point estimate."""

from __future__ import annotations

import math
from typing import Any

import torch
import tqdm
from torch import Tensor

from laplace_invariance.hyper import hyperparameters
from laplace_invariance.variational.network import ShallowNetwork

__all__ = ["OBJECTIVES", "fit"]

OBJECTIVES = {
    "elbo": "lower bound on the evidence",
    "point": "log likelihood at the mean of q, no KL",
}
N_BASIS = 2000  # inputs that the basis of q is computed from


def fit(
    model: ShallowNetwork,
    x: Tensor,
    y: Tensor,
    objective: str = "elbo",
    n_epochs: int = 6,
    batch_size: int = 128,
    lr: float = 0.02,
    lr_mean: float = 0.3,
    lr_hyper: float = 0.1,
    n_epochs_burnin: int = 1,
    progress_bar: bool = False,
) -> list[dict[str, Any]]:
    """Maximise an objective by Adam over parameters and hyperparameters.

    Step sizes fall to zero along half a cosine.

    Args:
        model: Network to train, in place; its ``q`` starts from scratch.
        x: Inputs ``[n, *in_shape]``.
        y: Labels ``[n]`` or targets ``[n, n_outputs]``.
        objective: One of ``OBJECTIVES``.
        n_epochs: Number of passes over the data.
        batch_size: Number of data per step.
        lr: Initial step size of the covariance of ``q`` and of ReLU weights.
        lr_mean: Initial step size of the mean of ``q``, which is in units of its standard deviation
            and goes far.
        lr_hyper: Initial step size of hyperparameters.
        n_epochs_burnin: Number of first epochs, fewer than all, in which hyperparameters stay:
            before ``q`` fits at all, any wide range looks good.
        progress_bar: Whether to show a progress bar.

    Returns:
        One record per epoch: ``epoch``, ``objective`` per datum, mean over its batches, and
        ``ranges`` at its end.

    Raises:
        FloatingPointError: If the objective is not finite.
    """
    _check_training(x, y, n_epochs, batch_size, n_epochs_burnin)
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}; choose from {', '.join(OBJECTIVES)}")
    n_steps = n_epochs * math.ceil(len(x) / batch_size)
    ascent = _Ascent(model, objective, lr, lr_mean, lr_hyper, n_steps)
    history: list[dict[str, Any]] = []
    bar = tqdm.tqdm(range(1, n_epochs + 1), disable=not progress_bar, unit="epoch")
    for epoch in bar:
        model.rebase_(x[:N_BASIS], len(x), restart=epoch == 1)
        value = ascent.epoch(x, y, batch_size, epoch, learns=epoch > n_epochs_burnin)
        magnitudes = model.augmentation.magnitudes()
        history.append({"epoch": epoch, "objective": value, "ranges": magnitudes})
        widest = max(magnitudes, key=magnitudes.__getitem__)
        words = model.augmentation.ranges()[widest]
        bar.set_postfix({objective: f"{value:.3f}", widest: words})
    return history


class _Ascent:
    """Adam that maximises an objective, with step sizes that fall along half a cosine."""

    def __init__(
        self,
        model: ShallowNetwork,
        objective: str,
        lr: float,
        lr_mean: float,
        lr_hyper: float,
        n_steps: int,
    ) -> None:
        self.model = model
        self.objective = objective
        self.learnt = [tensor for tensor in hyperparameters(model) if tensor.requires_grad]
        rest = [parameter for parameter in model.parameters() if parameter is not model.mean]
        groups = [
            {"params": [model.mean], "lr": lr_mean},
            {"params": rest, "lr": lr},
            {"params": self.learnt, "lr": lr_hyper},
        ]
        self.optimizer = torch.optim.Adam(groups)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, n_steps)

    def epoch(self, x: Tensor, y: Tensor, batch_size: int, epoch: int, learns: bool) -> float:
        """Return the objective per datum in a pass that steps hyperparameters if it ``learns``."""
        total = 0.0
        order = torch.randperm(len(x), generator=self.model.generator).to(x.device)
        for batch in order.split(batch_size):
            value = self._value(x[batch], y[batch], len(x))
            if not value.isfinite():
                raise FloatingPointError(
                    f"the {self.objective} is {value.item()} in epoch {epoch}; "
                    "use smaller step sizes"
                )
            self._step(value, learns)
            total += value.item() * len(batch)
        return total / len(x)

    def _value(self, x: Tensor, y: Tensor, n_data: int) -> Tensor:
        if self.objective == "elbo":
            return self.model.elbo(x, y, n_data) / n_data
        return self.model.point_log_likelihood(x, y)

    def _step(self, value: Tensor, learns: bool) -> None:
        self.optimizer.zero_grad()
        (-value).backward()
        if not learns:
            for tensor in self.learnt:
                tensor.grad = None
        self.optimizer.step()
        self.scheduler.step()
        self.model.augmentation.project_()


def _check_training(
    x: Tensor, y: Tensor, n_epochs: int, batch_size: int, n_epochs_burnin: int
) -> None:
    if n_epochs < 1 or batch_size < 1:
        raise ValueError(
            f"n_epochs and batch_size must be positive, got {n_epochs} and {batch_size}"
        )
    if n_epochs_burnin >= n_epochs:
        raise ValueError(
            f"nothing is learnt in n_epochs={n_epochs} if n_epochs_burnin={n_epochs_burnin} of "
            "them are burn-in"
        )
    if len(x) != len(y) or not len(x):
        raise ValueError(
            f"there must be inputs, and as many labels or targets, got {len(x)} and {len(y)}"
        )
    if not (x.isfinite().all() and y.isfinite().all()):
        raise ValueError("inputs or targets hold NaN or infinite values")
