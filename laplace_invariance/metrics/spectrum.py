"""How much a network reacts to anything at all, and how much of that is along an orbit.

A network can come to ignore a transformation by ignoring everything: all singular values of its Jacobian shrink, and with them
its reaction to the transformation (spectral decay, Moskalev et al., 2023). One that is invariant still reacts to other changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laplace_invariance.draws import fixed_draws
from laplace_invariance.metrics.orbits import (
    Data,
    GroupLike,
    Orbit,
    batches,
    check_outputs,
)
from laplace_invariance.modes import evaluation

__all__ = ["JacobianSpectrum", "SpectrumRecorder", "jacobian_spectrum"]


@dataclass(frozen=True)
class JacobianSpectrum:
    """Reactions of a network to changes of its input, as lengths: of the change of the output over that of the input.

    Attributes:
        singular_values: of the Jacobian, from the largest on, root mean squares over inputs: reactions to small changes along
            the directions to which the network reacts at all.
        orbit: reaction to a transformation, ``|f(g x) - f(x)| / |g x - x|``, root mean square.
    """

    singular_values: tuple[float, ...]
    orbit: float

    @property
    def relative(self) -> float:
        """The reaction to a transformation over the root mean square of the singular values; 0 for a constant network."""
        mean = (sum(value**2 for value in self.singular_values) / len(self.singular_values)) ** 0.5
        return self.orbit / mean if mean > 0 else 0.0


def jacobian_spectrum(
    model: nn.Module, data: Data, group: GroupLike, *, n_samples: int = 8, batch_size: int = 512
) -> JacobianSpectrum:
    """Compare how a network reacts along an orbit with how it reacts to any change, by singular values of its Jacobian.

    One backward pass per output; a few dozen inputs suffice. ``InvariantModel`` has its fixed draws, as for predictions.

    Args:
        model: maps inputs to ``[n, outputs]``, differentiable in its input.
        data: inputs ``[n, ...]``, or a loader of them, or of tuples whose first entries they are.
        group: ``"p4"`` or another name, a :class:`~laplace_invariance.layers.Group` or an augmentation.
        n_samples: fixed draws of an augmentation that is not a finite group.
        batch_size: rows to evaluate at a time.
    """
    orbit = Orbit(group, n_samples)
    values, reactions = [], []
    with torch.enable_grad(), evaluation(model), fixed_draws():
        for x in batches(data, model, max(batch_size // orbit.size, 1)):
            moved = orbit.all(x)
            x = x.detach().requires_grad_()
            outputs = check_outputs(model(x), len(x))
            rows = [
                torch.autograd.grad(
                    column.sum(), x, retain_graph=True, allow_unused=True, materialize_grads=True
                )[0].flatten(1)
                for column in outputs.unbind(1)
            ]
            values.append(torch.linalg.svdvals(torch.stack(rows, 1)))
            reactions.append(_reactions(model, x.detach(), moved, outputs.detach()))
    means = [torch.cat(found).square().mean(0).sqrt() for found in (values, reactions)]
    return JacobianSpectrum(tuple(means[0].tolist()), means[1].item())


@torch.no_grad()
def _reactions(model: nn.Module, x: Tensor, moved: Tensor, outputs: Tensor) -> Tensor:
    """Return ``|f(g x) - f(x)| / |g x - x|`` for all inputs and transformations in one row, 0 where ``g x = x``."""
    change = model(moved.flatten(0, 1)).unflatten(0, moved.shape[:2]) - outputs.unsqueeze(1)
    size = (moved - x.unsqueeze(1)).flatten(2).norm(dim=-1)
    rounding = 1e2 * torch.finfo(size.dtype).eps * x.flatten(1).norm(dim=1, keepdim=True)
    return torch.where(size > rounding, change.norm(dim=-1) / size, 0.0).flatten()


class SpectrumRecorder:
    """Keep the spectrum over training: a callback of ``marglik_training``, or called as ``recorder({"epoch": 3}, model)``.

    Args:
        x: inputs ``[n, ...]``, a few dozen.
        group, n_samples: as for :func:`jacobian_spectrum`.
        every: so many epochs, from the first on.

    Attributes:
        epochs: where spectra were taken.
        spectra: as many.
    """

    def __init__(self, x: Tensor, group: GroupLike, *, n_samples: int = 8, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every must be positive, got {every}")
        Orbit(group, n_samples)
        self.x, self.group, self.n_samples, self.every = x, group, n_samples, every
        self.epochs: list[int] = []
        self.spectra: list[JacobianSpectrum] = []

    def __call__(self, record: Mapping[str, Any], model: nn.Module) -> None:
        if (record["epoch"] - 1) % self.every == 0:
            self.epochs.append(record["epoch"])
            self.spectra.append(
                jacobian_spectrum(model, self.x, self.group, n_samples=self.n_samples)
            )
