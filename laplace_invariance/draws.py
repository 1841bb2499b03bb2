"""Random draws: how points of a cube are drawn, and how a curvature pass replays them.

Draws never depend on hyperparameters. They are points of the cube ``[-1, 1]^k``, fresh for every
input where gradients are enabled and one fixed, even set elsewhere, so that predictions repeat. A
curvature pass records its draws on a tape, from which its backward pass replays them.

Functions that draw take the number of dimensions ``k`` and a tensor ``like`` whose dtype and
device the draws get.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

__all__ = [
    "are_fixed",
    "fixed_cube",
    "fixed_draws",
    "grid_cube",
    "recording",
    "replaying",
    "sample_cube",
    "taped",
    "uniform",
]

SOBOL_SEED = 0

# "fixed", a list to record draws on, an iterator to replay them from, or None
Source = Literal["fixed"] | list[Tensor] | Iterator[Tensor] | None
_source: ContextVar[Source] = ContextVar("laplace_invariance_draws", default=None)


@contextmanager
def _using(source: Source) -> Iterator[None]:
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def fixed_draws() -> AbstractContextManager[None]:
    """Use the fixed set of draws of every augmentation inside the context, as for predictions."""
    return _using("fixed")


def recording(tape: list[Tensor]) -> AbstractContextManager[None]:
    """Append draws inside the context to ``tape``, as the first pass over a batch does."""
    return _using(tape)


def replaying(tape: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Replay draws inside the context from ``tape``, in order, as the backward pass does."""
    return _using(iter(tape))


def are_fixed() -> bool:
    """Return whether to use fixed draws.

    They are used inside :func:`fixed_draws`, and where gradients are disabled unless draws are
    recorded or replayed: a curvature pass needs fresh draws, and its first pass has no gradients.
    """
    source = _source.get()
    if source is None:
        return not torch.is_grad_enabled()
    return source == "fixed"


def taped(fresh: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Return ``fresh(*arguments)``, recorded or replayed inside these contexts.

    Raises:
        RuntimeError: If there are more draws than were recorded.
    """
    source = _source.get()
    if isinstance(source, Iterator):
        replayed = next(source, None)
        if replayed is None:
            raise RuntimeError(
                "the model draws more often than in the pass that was recorded, "
                "so it cannot be replayed"
            )
        return replayed
    draw = fresh(*arguments)
    if isinstance(source, list):
        source.append(draw)
    return draw


_common: ContextVar[torch.Generator | None] = ContextVar("laplace_invariance_common", default=None)


@contextmanager
def common_draws(seed: int) -> Iterator[None]:
    """Draw for all augmentations inside the context from one generator with this seed."""
    token = _common.set(torch.Generator().manual_seed(seed))
    try:
        yield
    finally:
        _common.reset(token)


def uniform(
    shape: tuple[int, ...],
    like: Tensor,
    generator: torch.Generator | None = None,
    low: float = -1.0,
    high: float = 1.0,
) -> Tensor:
    """Return independent uniform draws from ``[low, high)``."""
    generator = _common.get() or generator
    device = like.device if generator is None else generator.device
    draws = torch.rand(shape, generator=generator, device=device, dtype=like.dtype)
    return ((high - low) * draws + low).to(like.device)


def sample_cube(
    kind: str,
    n: int,
    n_samples: int,
    dimensions: int,
    like: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return fresh draws ``[n, n_samples, k]``, ``"independent"`` or ``"sobol"``."""
    if kind == "sobol":
        return _stratified(n, n_samples, dimensions, like, generator)
    return uniform((n, n_samples, dimensions), like, generator)


def _stratified(
    n: int, n_samples: int, dimensions: int, like: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Return draws ``[n, n_samples, k]`` that are spread evenly, another set for every input.

    Each axis is cut into ``n_samples`` equal parts, and the draws of an input have one in each.
    Which parts of different axes meet is decided by a Sobol set whose parts are exchanged at
    random. For a power of two they are exchanged digit by digit, which keeps the evenness of the
    Sobol set in two dimensions; for other numbers of samples the result is a Latin hypercube. Where
    a draw lies in its part is independent. So each draw is uniform, and the mean of a smooth
    function has a variance of order ``n_samples^-3`` along one axis, where independent draws have
    ``n_samples^-1`` and a Sobol set that is only shifted has ``n_samples^-2``.
    """
    shift = uniform((n, 1, dimensions), like, generator, low=0.0)
    inside = uniform((n, n_samples, dimensions), like, generator, low=0.0)
    parts = (shift * n_samples).long().clamp(max=n_samples - 1)
    return 2 * (_exchanged(n_samples, parts) + inside) / n_samples - 1


def fixed_cube(n_samples: int, dimensions: int, like: Tensor) -> Tensor:
    """Return one set ``[1, n_samples, k]`` like ``"sobol"``, always the same, at midpoints."""
    seeded = torch.Generator().manual_seed(SOBOL_SEED)
    shift = torch.randint(n_samples, (1, 1, dimensions), generator=seeded)
    return 2 * (_exchanged(n_samples, shift).to(like) + 0.5) / n_samples - 1


def grid_cube(n_samples: int, dimensions: int, active: Sequence[int], like: Tensor) -> Tensor:
    """Return midpoints of equal cells ``[1, n_samples, k]`` along at most two dimensions.

    Draws are zero along dimensions that are not ``active``.
    """
    draws = like.new_zeros(1, n_samples, dimensions)
    if not active:
        return draws
    side = n_samples if len(active) == 1 else math.isqrt(n_samples)
    if side ** len(active) != n_samples:
        raise ValueError(
            "a grid of two generators needs a square number of samples, "
            f"got n_samples = {n_samples}"
        )
    midpoints = (2 * torch.arange(side, device=draws.device, dtype=draws.dtype) + 1) / side - 1
    axes = torch.meshgrid(*[midpoints] * len(active), indexing="ij")
    draws[0, :, list(active)] = torch.stack([axis.flatten() for axis in axes], dim=-1)
    return draws


def _exchanged(n_samples: int, shift: Tensor) -> Tensor:
    """Return the parts ``[n, n_samples, k]`` in which draws lie, exchanged by ``[n, 1, k]``."""
    dimensions = shift.shape[-1]
    if n_samples & (n_samples - 1) == 0:  # a power of two
        return _sobol_parts(dimensions, n_samples).to(shift.device) ^ shift
    return (_sobol_ranks(dimensions, n_samples).to(shift.device) + shift) % n_samples


@lru_cache(maxsize=32)
def _sobol_parts(dimensions: int, n: int) -> Tensor:
    """Return in which part of each axis the first ``n`` Sobol points lie: ``[n, k]``."""
    return (SobolEngine(dimensions).draw(n, dtype=torch.float64) * n).long()


@lru_cache(maxsize=32)
def _sobol_ranks(dimensions: int, n: int) -> Tensor:
    """Return the ranks of ``n`` scrambled Sobol points along each axis: ``[n, k]``."""
    points = SobolEngine(dimensions, scramble=True, seed=SOBOL_SEED).draw(n, dtype=torch.float64)
    return points.argsort(0).argsort(0)
