"""Random draws: how points of a cube are drawn, and how a curvature pass replays them.

Draws never depend on hyperparameters. They are points of the cube ``[-1, 1]^k``, fresh for every
input where gradients are enabled and one fixed, even set elsewhere, so that predictions repeat. A
curvature pass records its draws on a tape, from which its backward pass replays them. They belong
to the inputs: how a batch is split into chunks does not change which input gets which draw, and
how a data set is split into batches does not either, for a model that draws in one place. The same
holds for processes that share out the rows of a batch: each draws for all of them, and takes its
own.

Functions that draw take the number of dimensions ``k`` and a tensor ``like`` whose dtype, or single
precision instead of half, and device the draws get.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.quasirandom import SobolEngine

from laplace_invariance.precision import at_least_single

__all__ = [
    "Share",
    "Tape",
    "are_fixed",
    "common_draws",
    "fixed_cube",
    "fixed_draws",
    "generator_of_draws",
    "grid_cube",
    "recording",
    "replaying",
    "sample_cube",
    "sharing",
    "taped",
    "uniform",
]

SOBOL_SEED = 0


@dataclass(frozen=True)
class _Part:
    """Some inputs of a batch of ``n`` inputs."""

    rows: slice
    n: int

    def per_input(self, n_rows: int) -> int:
        """Return how many draws belong to one input, if the part asks for ``n_rows``.

        They are several inside of another average, or where positions are in the batch axis.
        """
        size = self.rows.stop - self.rows.start
        if n_rows % size:
            raise ValueError(
                f"draws for {n_rows} rows were asked for in a chunk of {size} inputs; their number "
                "must be a multiple of that of the inputs"
            )
        return n_rows // size

    def of(self, draws: Tensor, n_rows: int) -> Tensor:
        """Return the draws of this part, if those of the batch are not shared by all inputs."""
        inner = self.per_input(n_rows)
        if len(draws) == 1:
            return draws
        return draws[self.rows.start * inner : self.rows.stop * inner]


@dataclass
class _Pass:
    """A pass over a batch, or over a part of it, that replays draws and may record further ones."""

    draws: list[Tensor]
    records: bool
    position: int = 0
    part: _Part | None = None

    def draw(self, fresh: Callable[..., Tensor], n: int, *rest: object) -> Tensor:
        if self.position == len(self.draws):
            self.draws.append(self._fresh(fresh, n, *rest))
        found = self.draws[self.position]
        self.position += 1
        if self.part is None:
            return found
        return self.part.of(found, n)

    def _fresh(self, fresh: Callable[..., Tensor], n: int, *rest: object) -> Tensor:
        """Draw for the whole batch."""
        if not self.records:
            raise RuntimeError(
                "the model draws more often than in the pass that was recorded, "
                "so it cannot be replayed"
            )
        if self.part is not None:
            n = self.part.per_input(n) * self.part.n
        draws = fresh(n, *rest)
        if len(draws) not in (1, n):
            raise ValueError(f"draws for {n} rows must have as many or one, got {len(draws)}")
        return draws


Source = Literal["fixed"] | _Pass | None
_source: ContextVar[Source] = ContextVar("laplace_invariance_draws", default=None)
_common: ContextVar[torch.Generator | None] = ContextVar(
    "laplace_invariance_common_draws", default=None
)


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
    """Append draws inside the context to ``tape``, as they are asked for."""
    return _using(_Pass(tape, records=True, position=len(tape)))


def replaying(tape: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Replay draws inside the context from ``tape``, in order."""
    return _using(_Pass(list(tape), records=False))


class Tape:
    """The draws of a batch that is run in parts: each is made once, for all inputs.

    The first part that asks draws for the whole batch, and every part gets the rows of its own
    inputs. So under one seed an input has the same draws, whatever the parts are.

    Args:
        n: Number of inputs in the batch.

    Attributes:
        draws: Draws ``[n * inner or 1, ...]``, in the order in which they were asked for.
        closed: Whether all parts have run, so that later passes may only replay.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.draws: list[Tensor] = []
        self.closed = False

    def playing(self, rows: slice) -> AbstractContextManager[None]:
        """Use the draws of these inputs inside the context, and record new ones until closed."""
        part = _Part(slice(*rows.indices(self.n)), self.n)
        return _using(_Pass(self.draws, records=not self.closed, part=part))


@dataclass(frozen=True)
class Share:
    """The rows ``rank::size`` of a batch, as several processes have one between them.

    A process for which there is no row repeats the last one, so that it takes part in everything,
    and it does not count.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes.
        n: Number of inputs in the batch.
    """

    rank: int
    size: int
    n: int

    @property
    def rows(self) -> slice:
        """Rows of the batch that this process has."""
        return slice(min(self.rank, self.n - 1), None, self.size)

    @property
    def n_own(self) -> int:
        """Number of these rows."""
        return len(range(self.n)[self.rows])

    @property
    def n_counted(self) -> int:
        """Number of those that count."""
        return self.n_own if self.rank < self.n else 0

    def draw(self, fresh: Callable[..., Tensor], n_rows: int, *rest: object) -> Tensor:
        """Draw for the whole batch, and return what belongs to the rows of this process."""
        inner, remainder = divmod(n_rows, self.n_own)
        if remainder:
            raise ValueError(
                f"draws for {n_rows} rows were asked for {self.n_own} inputs; their number must be "
                "a multiple of that of the inputs"
            )
        draws = fresh(inner * self.n, *rest)
        if len(draws) == 1:
            return draws
        return draws.unflatten(0, (self.n, inner))[self.rows].flatten(0, 1)


_share: ContextVar[Share | None] = ContextVar("laplace_invariance_share", default=None)


@contextmanager
def sharing(share: Share) -> Iterator[None]:
    """Let models inside the context run on the rows of one process, with draws of the batch."""
    token = _share.set(share if share.size > 1 else None)
    try:
        yield
    finally:
        _share.reset(token)


@contextmanager
def common_draws(seed: int) -> Iterator[None]:
    """Take the fresh draws of all augmentations inside the context from one seeded generator.

    Two evidences that are estimated with the same seed see the same transformations, so that
    their difference is not one of draws::

        for structure in ("kron", "diag"):
            with common_draws(0):
                la = Laplace(model, "classification", "all", structure, backend=AugmentedGGN)
                la.fit(loader)

    Neither torch's default generator nor those of models are used or changed, and nothing but
    augmentations draws from this one: an estimate with random directions (``stochastic=True``)
    sees the transformations of the exact one.

    Args:
        seed: Seed of the generator, which is on the CPU; draws are moved to the device.
    """
    token = _common.set(torch.Generator().manual_seed(seed))
    try:
        yield
    finally:
        _common.reset(token)


def generator_of_draws(own: torch.Generator | None) -> torch.Generator | None:
    """Return the generator of :func:`common_draws` inside its context, and ``own`` elsewhere."""
    common = _common.get()
    return own if common is None else common


def are_fixed() -> bool:
    """Return whether to use fixed draws.

    They are used inside :func:`fixed_draws`, and where gradients are disabled unless draws are
    recorded or replayed: a curvature pass needs fresh draws, and its first pass has no gradients.
    Derivatives in forward mode are those of predictions (laplace's ``ELLALaplace``).
    """
    source = _source.get()
    if source is None:
        return not torch.is_grad_enabled() or forward_ad._current_level >= 0
    return source == "fixed"


def taped(fresh: Callable[..., Tensor], n: int, *rest: object) -> Tensor:
    """Return ``fresh(n, *rest)``, recorded or replayed inside a pass over a batch.

    Args:
        fresh: Function that draws ``[n, ...]``, or ``[1, ...]`` to be shared by all rows.
        n: Number of rows: that of the inputs, or a multiple of it.
        *rest: Further arguments of ``fresh``.

    Returns:
        The draws ``[n or 1, ...]``. In a part of a batch they are rows of the batch's draws.

    Raises:
        RuntimeError: If there are more draws than were recorded.
        ValueError: If draws do not belong to inputs: their number is no multiple.
    """
    source, share = _source.get(), _share.get()
    if share is not None:
        fresh = partial(share.draw, fresh)
    if isinstance(source, _Pass):
        return source.draw(fresh, n, *rest)
    return fresh(n, *rest)


def uniform(
    shape: tuple[int, ...],
    like: Tensor,
    generator: torch.Generator | None = None,
    low: float = -1.0,
    high: float = 1.0,
) -> Tensor:
    """Return independent uniform draws from ``[low, high)``."""
    device = like.device if generator is None else generator.device
    dtype = at_least_single(like.dtype)
    draws = torch.rand(shape, generator=generator, device=device, dtype=dtype)
    return ((high - low) * draws + low).to(like.device, non_blocking=True)


def sample_cube(
    kind: str,
    n: int,
    n_samples: int,
    dimensions: int,
    like: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return fresh draws ``[n, n_samples, k]``, ``"independent"`` or ``"sobol"``.

    Each input uses numbers of its own that follow each other, so that under one seed its draws do
    not depend on how many inputs are drawn for at once.
    """
    generator = generator_of_draws(generator)
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
    numbers = uniform((n, n_samples + 1, dimensions), like, generator, low=0.0)
    shift, inside = numbers[:, :1], numbers[:, 1:]
    parts = (shift * n_samples).long().clamp(max=n_samples - 1)
    return 2 * (_exchanged(n_samples, parts) + inside) / n_samples - 1


def fixed_cube(n_samples: int, dimensions: int, like: Tensor) -> Tensor:
    """Return one set ``[1, n_samples, k]`` like ``"sobol"``, always the same, at midpoints."""
    seeded = torch.Generator().manual_seed(SOBOL_SEED)
    shift = torch.randint(n_samples, (1, 1, dimensions), generator=seeded)
    shift = shift.to(like.device, non_blocking=True)
    parts = _exchanged(n_samples, shift).to(at_least_single(like.dtype))
    return 2 * (parts + 0.5) / n_samples - 1


def grid_cube(n_samples: int, dimensions: int, active: Sequence[int], like: Tensor) -> Tensor:
    """Return midpoints of equal cells ``[1, n_samples, k]`` along at most two dimensions.

    Draws are zero along dimensions that are not ``active``.
    """
    dtype = at_least_single(like.dtype)
    draws = like.new_zeros(1, n_samples, dimensions, dtype=dtype)
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
    for dimension, axis in zip(active, axes, strict=True):
        draws[0, :, dimension] = axis.flatten()
    return draws


def _exchanged(n_samples: int, shift: Tensor) -> Tensor:
    """Return the parts ``[n, n_samples, k]`` in which draws lie, exchanged by ``[n, 1, k]``."""
    dimensions = shift.shape[-1]
    if n_samples & (n_samples - 1) == 0:  # a power of two
        return _sobol_parts(dimensions, n_samples, shift.device) ^ shift
    return (_sobol_ranks(dimensions, n_samples, shift.device) + shift) % n_samples


# Made on the CPU, on which they are the same everywhere, and kept on every device that asks.


@lru_cache(maxsize=32)
def _sobol_parts(dimensions: int, n: int, device: torch.device) -> Tensor:
    """Return in which part of each axis the first ``n`` Sobol points lie: ``[n, k]``."""
    return (SobolEngine(dimensions).draw(n, dtype=torch.float64) * n).long().to(device)


@lru_cache(maxsize=32)
def _sobol_ranks(dimensions: int, n: int, device: torch.device) -> Tensor:
    """Return the ranks of ``n`` scrambled Sobol points along each axis: ``[n, k]``."""
    points = SobolEngine(dimensions, scramble=True, seed=SOBOL_SEED).draw(n, dtype=torch.float64)
    return points.argsort(0).argsort(0).to(device)
