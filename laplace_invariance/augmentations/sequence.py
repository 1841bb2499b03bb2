"""Shifts and stretches of signals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from laplace_invariance.augmentations.base import Shape
from laplace_invariance.augmentations.box import (
    BoxAugmentation,
    BoxOptions,
    Init,
    Names,
    as_factor,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Sequence"]

PADDINGS = ("zeros", "circular")


class Sequence(BoxAugmentation):
    """Shifts and stretches of signals ``[n, channels, length]``, by linear interpolation.

    A transformation says where each output position ``i`` reads its input: at
    ``c + exp(stretch) (i - c) + shift length / 2`` with the centre ``c = (length - 1) / 2``. So a
    positive shift takes the signal towards its start, 1 by half its length, and a positive stretch
    makes it shorter. Samples are piecewise smooth in the hyperparameters.

    Args:
        init: Initial ``eta``: one number, one per generator, or a mapping from names.
        learn: Generators to learn: ``"all"``, ``"shift"`` or ``"stretch"``.
        padding: Values outside the signal: ``"zeros"``, or ``"circular"``, the signal repeated;
            then a shift of 1 is all of them, and the limit.
        **options: ``constraint``, ``correlated`` and ``draws``, as for
            :class:`~laplace_invariance.augmentations.BoxAugmentation`.
    """

    input_ndims = (2,)

    def __init__(
        self,
        init: Init = 0.0,
        learn: Names = "all",
        *,
        padding: str = "zeros",
        **options: Unpack[BoxOptions],
    ) -> None:
        if padding not in PADDINGS:
            raise ValueError(f"unknown padding {padding!r}; choose from {PADDINGS}")
        limits = [math.inf, math.inf]
        if padding == "circular":
            limits = [1.0, math.inf]
        super().__init__(("shift", "stretch"), limits, init, learn, **options)
        self.padding = padding

    def transform_by(self, x: Tensor, coefficients: Tensor) -> Tensor:
        """Shift and stretch ``x`` by ``coefficients`` ``[n or 1, n_samples, 2]``."""
        if x.ndim != 3:
            raise ValueError(
                f"Sequence transforms signals [n, channels, length], got shape {list(x.shape)}"
            )
        if not x.is_floating_point():
            raise TypeError(
                f"Sequence interpolates, so signals must be floating point, got {x.dtype}"
            )
        length = x.shape[-1]
        centre = (length - 1) / 2
        shift, stretch = coefficients.unsqueeze(-1).unbind(-2)
        steps = torch.arange(length, device=x.device, dtype=coefficients.dtype) - centre
        positions = centre + stretch.exp() * steps + shift * (length / 2)
        if self.padding == "zeros":
            # one zero before the signal and two after it, the last for the right neighbour
            x = F.pad(x, (1, 2))
            positions = positions.clamp(-1, length) + 1
        floor = positions.detach().floor()
        left, right = floor.long(), floor.long() + 1
        if self.padding == "circular":
            left, right = left % length, right % length
        return _interpolate(x, left, right, positions - floor)

    def in_words(self, name: str, magnitude: float, shape: Shape | None = None) -> str:
        """Return a range in words, with the shape of a signal in time steps and factors."""
        if name != "shift":
            return as_factor(magnitude)
        if shape is None:
            return f"±{magnitude:.3f} half-lengths"
        return f"±{magnitude * shape[-1] / 2:.1f} steps"


def _interpolate(x: Tensor, left: Tensor, right: Tensor, fractions: Tensor) -> Tensor:
    """Read ``x`` ``[n, c, length]`` between ``left`` and ``right`` ``[n or 1, n_samples, p]``."""
    n, channels, _ = x.shape
    signals = x.unsqueeze(1).expand(-1, left.shape[1], -1, -1)

    def per_channel(values: Tensor) -> Tensor:
        return values.unsqueeze(2).expand(n, -1, channels, -1)

    at_left = signals.gather(-1, per_channel(left))
    at_right = signals.gather(-1, per_channel(right))
    return torch.lerp(at_left, at_right, per_channel(fractions.to(x.dtype)))
