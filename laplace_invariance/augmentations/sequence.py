"""Shifts and stretches of signals."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from laplace_invariance.augmentations.box import BoxAugmentation, Init, Names, as_factor

__all__ = ["Sequence"]

PADDINGS = ("zeros", "circular")


class Sequence(BoxAugmentation):
    """Shifts and stretches of signals ``[n, channels, length]``, by linear interpolation.

    A transformation says where each output position ``i`` reads its input: at ``c + exp(stretch) (i - c) + shift length / 2``
    with the centre ``c = (length - 1) / 2``. So a positive shift moves the signal towards its start, 1 by half its length,
    and a positive stretch makes it shorter. Piecewise smooth in the hyperparameters.

    Args:
        init, learn, constraint, correlated, draws: as for :class:`~laplace_invariance.augmentations.BoxAugmentation`.
        padding: what is outside the signal: ``"zeros"``, or ``"circular"``, the signal again and again; then a shift of 1
            is all of them, and the limit.
    """

    input_ndims = (2,)

    def __init__(
        self,
        init: Init = 0.0,
        learn: Names = "all",
        constraint: str | None = None,
        correlated: bool = False,
        draws: str = "independent",
        padding: str = "zeros",
    ) -> None:
        if padding not in PADDINGS:
            raise ValueError(f"unknown padding {padding!r}; choose from {PADDINGS}")
        limits = (1.0 if padding == "circular" else math.inf, math.inf)
        super().__init__(("shift", "stretch"), limits, init, learn, constraint, correlated, draws)
        self.padding = padding

    def move(self, x: Tensor, coefficients: Tensor) -> Tensor:
        if x.ndim != 3:
            raise ValueError(
                f"Sequence transforms signals [n, channels, length], got shape {list(x.shape)}"
            )
        if not x.is_floating_point():
            raise TypeError(
                f"Sequence interpolates, so signals must be floating point, got {x.dtype}"
            )
        length, centre = x.shape[-1], (x.shape[-1] - 1) / 2
        shift, stretch = coefficients.unsqueeze(-1).unbind(-2)
        steps = torch.arange(length, device=x.device, dtype=coefficients.dtype) - centre
        positions = centre + stretch.exp() * steps + shift * (length / 2)
        if self.padding == "circular":
            left = positions.detach().floor()
            return _interpolate(
                x, left.long() % length, (left.long() + 1) % length, positions - left
            )
        # a zero before the signal and two after it, the last for the right neighbour of the first
        positions = positions.clamp(-1, length) + 1
        left = positions.detach().floor()
        return _interpolate(F.pad(x, (1, 2)), left.long(), left.long() + 1, positions - left)

    def ranges(self) -> dict[str, str]:
        magnitudes = self.magnitudes()
        return {
            "shift": f"±{magnitudes['shift']:.3f} half-lengths",
            "stretch": as_factor(magnitudes["stretch"]),
        }


def _interpolate(x: Tensor, left: Tensor, right: Tensor, fractions: Tensor) -> Tensor:
    """Read ``x`` ``[n, channels, length]`` between ``left`` and ``right`` ``[n or 1, n_samples, positions]``."""
    n, channels, _ = x.shape
    shape = (n, left.shape[1], channels, left.shape[2])
    signals = x.unsqueeze(1).expand(-1, shape[1], -1, -1)
    ends = [signals.gather(-1, index.unsqueeze(2).expand(shape)) for index in (left, right)]
    return torch.lerp(*ends, fractions.to(x.dtype).unsqueeze(2).expand(shape))
