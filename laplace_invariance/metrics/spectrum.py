"""How sensitive a network is to any change of its input, and how much of that is along an orbit.

A network can come to ignore a transformation by ignoring everything: all singular values of its
Jacobian shrink, and with them its sensitivity to the transformation (spectral decay, Moskalev et
al., 2023). One that is invariant is still sensitive to other changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laplace_invariance.draws import fixed_draws
from laplace_invariance.metrics.orbits import Data, GroupLike, Orbit, batches, check_outputs
from laplace_invariance.modes import evaluation

__all__ = ["JacobianSpectrum", "SpectrumRecorder", "jacobian_spectrum"]


@dataclass(frozen=True)
class JacobianSpectrum:
    """Sensitivities of a network: lengths of output changes over those of input changes.

    Attributes:
        singular_values: Singular values of the Jacobian, from the largest on, as root mean
            squares over inputs: sensitivities to small changes along the directions that matter
            at all.
        orbit: Sensitivity to a transformation, ``|f(g x) - f(x)| / |g x - x|``, root mean
            square.
    """

    singular_values: tuple[float, ...]
    orbit: float

    @property
    def relative(self) -> float:
        """Sensitivity along the orbit over the root mean square of the singular values.

        It is 0 for a constant network.
        """
        mean = (sum(value**2 for value in self.singular_values) / len(self.singular_values)) ** 0.5
        return self.orbit / mean if mean > 0 else 0.0


def jacobian_spectrum(
    model: nn.Module, data: Data, group: GroupLike, *, n_samples: int = 8, batch_size: int = 512
) -> JacobianSpectrum:
    """Compare the sensitivity along an orbit with the singular values of the Jacobian.

    One backward pass per output; a few dozen inputs suffice. ``InvariantModel`` has its fixed
    draws, as for predictions.

    Args:
        model: Maps inputs to ``[n, outputs]``, differentiable in its input.
        data: Inputs ``[n, ...]``, or a loader of them, or of tuples whose first entries they
            are.
        group: ``"p4"`` or another name, a :class:`~laplace_invariance.layers.Group` or an
            augmentation.
        n_samples: Number of fixed draws of an augmentation that is not a finite group.
        batch_size: Number of rows to evaluate at a time.
    """
    orbit = Orbit(group, n_samples)
    values, sensitivities = [], []
    with torch.enable_grad(), evaluation(model), fixed_draws():
        for x in batches(data, model, max(batch_size // orbit.size, 1)):
            transformed = orbit.all(x)
            x = x.detach().requires_grad_()
            outputs = check_outputs(model(x), len(x))
            values.append(torch.linalg.svdvals(_jacobian(outputs, x)))
            sensitivities.append(_sensitivities(model, x.detach(), transformed, outputs.detach()))
    singular_values = _root_mean_square(values)
    return JacobianSpectrum(
        tuple(singular_values.tolist()), _root_mean_square(sensitivities).item()
    )


def _jacobian(outputs: Tensor, x: Tensor) -> Tensor:
    """Return the Jacobian of each row, ``[n, outputs, inputs]``."""
    rows = []
    for column in outputs.unbind(1):
        (gradient,) = torch.autograd.grad(
            column.sum(), x, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        rows.append(gradient.flatten(1))
    return torch.stack(rows, 1)


@torch.no_grad()
def _sensitivities(model: nn.Module, x: Tensor, transformed: Tensor, outputs: Tensor) -> Tensor:
    """Return ``|f(g x) - f(x)| / |g x - x|``, 0 where ``g x = x``, ``[n * size]``."""
    along = model(transformed.flatten(0, 1)).unflatten(0, transformed.shape[:2])
    change = along - outputs.unsqueeze(1)
    size = (transformed - x.unsqueeze(1)).flatten(2).norm(dim=-1)
    rounding = 1e2 * torch.finfo(size.dtype).eps * x.flatten(1).norm(dim=1, keepdim=True)
    return torch.where(size > rounding, change.norm(dim=-1) / size, 0.0).flatten()


def _root_mean_square(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts).square().mean(0).sqrt()


class SpectrumRecorder:
    """Keep the spectrum over training.

    It is a callback of ``marglik_training``, or is called as ``recorder({"epoch": 3}, model)``.

    Args:
        x: Inputs ``[n, ...]``, a few dozen.
        group: ``"p4"`` or another name, a :class:`~laplace_invariance.layers.Group` or an
            augmentation.
        n_samples: Number of fixed draws of an augmentation that is not a finite group.
        every: Number of epochs from one spectrum to the next; the first epoch has one.

    Attributes:
        epochs: Epochs at which spectra were taken.
        spectra: The spectra, one for each of them.
    """

    def __init__(self, x: Tensor, group: GroupLike, *, n_samples: int = 8, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every must be positive, got {every}")
        Orbit(group, n_samples)  # raises before training, not after
        self.x = x
        self.group = group
        self.n_samples = n_samples
        self.every = every
        self.epochs: list[int] = []
        self.spectra: list[JacobianSpectrum] = []

    def __call__(self, record: Mapping[str, Any], model: nn.Module) -> None:
        """Take the spectrum, if the epoch of ``record`` is due."""
        if (record["epoch"] - 1) % self.every == 0:
            spectrum = jacobian_spectrum(model, self.x, self.group, n_samples=self.n_samples)
            self.epochs.append(record["epoch"])
            self.spectra.append(spectrum)
