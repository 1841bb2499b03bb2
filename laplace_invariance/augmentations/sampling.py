"""Draws from the cube ``[-1, 1]^k``: independent, spread by a Sobol set, or on a grid. No hyperparameters, no modules.

Every function takes the number of dimensions ``k`` and a tensor ``like`` whose dtype and device the draws get.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

__all__ = ["grid", "independent", "sample", "sobol", "stratified"]

SOBOL_SEED = 0


@lru_cache(maxsize=32)
def _sobol_points(dimensions: int, n: int) -> Tensor:
    return SobolEngine(dimensions, scramble=True, seed=SOBOL_SEED).draw(n, dtype=torch.float64)


def _uniform(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = generator.device if generator is not None else like.device
    return torch.rand(shape, generator=generator, device=device, dtype=like.dtype)


def independent(
    n: int, n_samples: int, dimensions: int, like: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Return independent uniform draws ``[n, n_samples, k]``."""
    return (2 * _uniform((n, n_samples, dimensions), like, generator) - 1).to(like.device)


@lru_cache(maxsize=32)
def _strata(dimensions: int, n: int) -> Tensor:
    """Return in which of ``n`` equal parts of each axis the points of a Sobol set lie, ``[n, k]``, each part once."""
    if _is_power_of_two(n):
        return (SobolEngine(dimensions).draw(n, dtype=torch.float64) * n).long()
    return _sobol_points(dimensions, n).argsort(0).argsort(0)


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def stratified(
    n: int, n_samples: int, dimensions: int, like: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Return draws ``[n, n_samples, k]`` that are spread like a Sobol set, another one for each of ``n`` inputs.

    Each axis is cut into ``n_samples`` equal parts, and the draws of an input have one in each. Which parts of different axes
    meet is decided by a Sobol set whose parts are exchanged at random, digit by digit, so that a power of two keeps its
    evenness in two dimensions; where a draw lies in its part is independent. So each draw is uniform, and the mean of a
    smooth function has a variance of order ``n_samples^-3`` along one axis, where independent draws have ``n_samples^-1`` and
    a Sobol set that is only shifted has ``n_samples^-2``.
    """
    shift = (
        (_uniform((n, 1, dimensions), like, generator).to(like.device) * n_samples)
        .long()
        .clamp(max=n_samples - 1)
    )
    inside = _uniform((n, n_samples, dimensions), like, generator).to(like.device)
    return 2 * (_exchanged(n_samples, shift) + inside) / n_samples - 1


def _exchanged(n_samples: int, shift: Tensor) -> Tensor:
    """Return the parts of the axes with each axis's parts exchanged, by shifts ``[n, 1, k]``."""
    strata = _strata(shift.shape[-1], n_samples).to(shift.device)
    return strata ^ shift if _is_power_of_two(n_samples) else (strata + shift) % n_samples


def sample(
    kind: str,
    n: int,
    n_samples: int,
    dimensions: int,
    like: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return fresh draws ``[n, n_samples, k]``, ``"independent"`` or ``"sobol"``."""
    draw = {"independent": independent, "sobol": stratified}[kind]
    return draw(n, n_samples, dimensions, like, generator)


def sobol(n_samples: int, dimensions: int, like: Tensor) -> Tensor:
    """Return one such set ``[1, n_samples, k]``, always the same, with each draw in the middle of its parts."""
    seeded = torch.Generator().manual_seed(SOBOL_SEED)
    shift = torch.randint(n_samples, (1, 1, dimensions), generator=seeded)
    return 2 * (_exchanged(n_samples, shift).to(like) + 0.5) / n_samples - 1


def grid(n_samples: int, dimensions: int, moving: Sequence[int], like: Tensor) -> Tensor:
    """Return midpoints of equal cells ``[1, n_samples, k]`` along the dimensions ``moving``, zero along the others."""
    draws = like.new_zeros(1, n_samples, dimensions)
    if not moving:
        return draws
    side = n_samples if len(moving) == 1 else math.isqrt(n_samples)
    if side ** len(moving) != n_samples:
        raise ValueError(
            f"a grid of two generators needs a square number of samples, got n_samples = {n_samples}"
        )
    midpoints = (2 * torch.arange(side, device=draws.device, dtype=draws.dtype) + 1) / side - 1
    axes = torch.meshgrid(*[midpoints] * len(moving), indexing="ij")
    draws[0, :, list(moving)] = torch.stack([axis.flatten() for axis in axes], dim=-1)
    return draws
