"""Eigendecompositions of many symmetric factors: each once, small ones of a size together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Decompositions", "Pair", "check_finite", "decompose", "eigh", "find_twins", "work"]

# Matrices of equal size up to this one are decomposed by one call.
STACKED_SIZE = 512

# Of matrices that LAPACK cannot decompose, relative to their largest entry: entries that only make
# for underflow, and what is added to the diagonal, for every row and column.
NEGLIGIBLE = 1e-100
JITTERS = (1e-16, 1e-14, 1e-12)

# Eigenvalues, and eigenvectors, which a diagonal does not need.
Pair = tuple[Tensor, Tensor | None]


@torch.no_grad()
def eigh(matrices: Tensor, vectors: bool = True) -> Pair:
    """Return eigenvalues and eigenvectors of finite symmetric matrices ``[..., d, d]``.

    For some matrices of low rank LAPACK does not converge, or returns NaN without saying so. These
    are decomposed in double precision, and if that fails, too, one by one: at a scale of 1, without
    rows of zeros, and at last with a diagonal added that is of the size of round-off.

    Args:
        matrices: The matrices.
        vectors: Whether eigenvectors are wanted, which takes twice the time; they are None if not.

    Raises:
        LinAlgError: A matrix is not finite, its eigenvalues are too large for its dtype, or all of
            this failed.
    """
    supported = matrices
    if matrices.dtype in (torch.float16, torch.bfloat16):  # for which there is no eigh
        supported = matrices.float()
    found = _attempt(supported, vectors)
    if found is None:
        found = _attempt(matrices.double(), vectors)
    if found is None:
        found = _one_by_one(matrices.double(), vectors)
    values, directions = found
    if values.dtype != matrices.dtype:
        values = values.to(matrices.dtype)
        _check_size(values)
    return values, None if directions is None else directions.to(matrices.dtype)


def _attempt(matrices: Tensor, vectors: bool) -> Pair | None:
    """Return what LAPACK finds; None if it fails, or finds what is not finite."""
    try:
        found = [*torch.linalg.eigh(matrices)] if vectors else [torch.linalg.eigvalsh(matrices)]
    except torch.linalg.LinAlgError:
        return None
    if not all(tensor.isfinite().all() for tensor in found):
        return None
    return found[0], found[1] if vectors else None


def _one_by_one(matrices: Tensor, vectors: bool) -> Pair:
    """Return the decompositions of matrices of which at least one is difficult."""
    check_finite([matrices])
    d = matrices.shape[-1]
    pairs = [_attempt(matrix, vectors) or _careful(matrix) for matrix in matrices.reshape(-1, d, d)]
    values = torch.stack([pair[0] for pair in pairs]).view(matrices.shape[:-1])
    _check_size(values)
    if not vectors:
        return values, None
    directions = [pair[1] for pair in pairs if pair[1] is not None]
    return values, torch.stack(directions).view(matrices.shape)


def _careful(matrix: Tensor) -> Pair:
    """Return eigenvalues and eigenvectors of a matrix for which LAPACK fails."""
    scale = matrix.abs().max()
    if scale == 0:
        return torch.zeros_like(matrix[0]), torch.eye(len(matrix)).to(matrix)
    scaled = matrix / scale
    scaled = scaled.where(scaled.abs() > NEGLIGIBLE, 0.0)
    kept = scaled.any(0).nonzero().squeeze(1)
    values = torch.zeros_like(matrix[0])
    directions = torch.eye(len(matrix)).to(matrix)  # a row of zeros has a direction of its own
    values[kept], directions[kept.unsqueeze(1), kept] = _jittered(scaled[kept][:, kept])
    order = values.argsort()
    return scale * values[order], directions[:, order]


def _jittered(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose a matrix at a scale of 1, with as little on its diagonal as is needed."""
    d = len(matrix)
    steps = torch.linspace(1, 2, d).to(matrix)  # which make equal eigenvalues different
    for size in (0.0, *JITTERS):
        pair = _attempt(matrix + torch.diag(size * d * steps), vectors=True)
        if pair is not None and pair[1] is not None:
            return pair[0], pair[1]
    raise torch.linalg.LinAlgError(
        f"the eigendecomposition of a finite matrix of size {d} does not converge, not even with "
        f"{JITTERS[-1] * d:.0e} of its largest entry added to its diagonal"
    )


def _check_size(values: Tensor) -> None:
    if not values.isfinite().all():
        raise torch.linalg.LinAlgError(
            f"eigenvalues are too large for {values.dtype}; check the scale of the loss and of the "
            "inputs of the network"
        )


@torch.no_grad()
def decompose(factors: Sequence[Tensor], vectors: bool = True) -> list[Pair]:
    """Return eigenvalues, round-off below zero removed, and eigenvectors of each factor.

    Args:
        factors: Matrices ``[d, d]``, blocks ``[q, d, d]``, or diagonals ``[d]``, whose
            eigenvectors are None. Equal ones are decomposed once: the curvature of a bias is often
            the factor of its weight.
        vectors: Whether eigenvectors are wanted.

    Raises:
        LinAlgError: A factor is not finite.
    """
    factors = [factor.detach() for factor in factors]
    check_finite(factors)
    twins = find_twins(factors)
    groups: dict[object, list[int]] = {}
    for i, factor in enumerate(factors):
        together = factor.ndim == 2 and len(factor) <= STACKED_SIZE
        if twins[i] == i:
            kind = (factor.shape, factor.dtype, factor.device)
            groups.setdefault(kind if together else i, []).append(i)
    found: dict[int, Pair] = {}
    for group in groups.values():
        values, directions = torch.stack([factors[i] for i in group]), None
        if factors[group[0]].ndim > 1:
            values, directions = eigh(values, vectors)
        for position, i in enumerate(group):
            own = None if directions is None else directions[position]
            found[i] = (values[position].clamp(min=0), own)
    return [found[twin] for twin in twins]


def work(factor: Tensor) -> int:
    """Return what a decomposition costs, up to a constant."""
    return factor.numel() * (factor.shape[-1] if factor.ndim > 1 else 1)


def check_finite(factors: Sequence[Tensor]) -> None:
    """Raise LinAlgError if a factor is not finite."""
    if not factors or torch.stack([factor.sum().double() for factor in factors]).isfinite().all():
        return
    if not all(factor.isfinite().all() for factor in factors):  # not so if a sum overflowed
        raise torch.linalg.LinAlgError(
            "a curvature factor is not finite; check the loss, the inputs of the network, and the "
            "ranges of its augmentations"
        )


def find_twins(factors: Sequence[Tensor]) -> list[int]:
    """Return for each factor the first that equals it, itself if there is none before."""
    seen: dict[torch.Size, list[int]] = {}
    twins = []
    for i, factor in enumerate(factors):
        candidates = seen.setdefault(factor.shape, [])
        twin = next((j for j in candidates if torch.equal(factors[j], factor)), i)
        if twin == i:
            candidates.append(i)
        twins.append(twin)
    return twins


class Decompositions:
    """Decompositions of factors that change slowly, each made anew only where that matters.

    A factor that is nearly a multiple of one that was decomposed has the same eigenvectors, and its
    eigenvalues at another scale. Differences are measured from the factor that was decomposed, so
    that they do not add up.

    Args:
        tolerance: Largest difference from a multiple, relative to the factor in the Frobenius norm,
            up to which a decomposition is used again.
        decompose: Function that makes decompositions.

    Attributes:
        n_made: Number of decompositions so far.
        n_reused: Number of times that one was used again.
    """

    def __init__(
        self, tolerance: float, decompose: Callable[[Sequence[Tensor]], list[Pair]] = decompose
    ) -> None:
        self.tolerance = tolerance
        self._decompose = decompose
        self.n_made = 0
        self.n_reused = 0
        self._known: list[Tensor] = []
        self._pairs: list[Pair] = []

    @torch.no_grad()
    def decompose(self, factors: Sequence[Tensor]) -> list[Pair]:
        """Return eigenvalues and eigenvectors of each factor, as :func:`decompose`."""
        factors = [factor.detach() for factor in factors]
        if not self._known:
            self._known, self._pairs = factors, self._decompose(factors)
            self.n_made += len(factors)
            return self._pairs
        check_finite(factors)
        scales = list(map(self._scale, factors, self._known))
        fresh = [i for i, scale in enumerate(scales) if scale is None]
        for i, pair in zip(fresh, self._decompose([factors[i] for i in fresh]), strict=True):
            self._known[i], self._pairs[i] = factors[i], pair
        self.n_made += len(fresh)
        self.n_reused += len(factors) - len(fresh)
        found = []
        for (values, vectors), scale in zip(self._pairs, scales, strict=True):
            found.append((values if scale is None else scale * values, vectors))
        return found

    def _scale(self, factor: Tensor, known: Tensor) -> Tensor | None:
        """Return the multiple of a known factor that this one nearly is, None if it is not."""
        scale = (factor * known).sum() / known.square().sum()
        if (factor - scale * known).norm() <= self.tolerance * factor.norm():
            return scale
        return None

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Return the factors that were decomposed."""
        return {"known": self._known}

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Decompose factors that :meth:`state_dict` returned."""
        self._known = list(state["known"])
        self._pairs = self._decompose(self._known) if self._known else []
