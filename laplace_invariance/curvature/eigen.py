"""Eigendecompositions of many symmetric factors: each once, small ones of a size together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["decompose", "eigh"]

# Matrices of equal size up to this one are decomposed by one call.
STACKED_SIZE = 512

# Eigenvalues, and eigenvectors, which a diagonal does not need.
Pair = tuple[Tensor, Tensor | None]


@torch.no_grad()
def eigh(matrices: Tensor, vectors: bool = True) -> Pair:
    """Return eigenvalues and eigenvectors of finite symmetric matrices ``[..., d, d]``.

    For some matrices of low rank LAPACK does not converge in single precision, or returns NaN
    without saying so; these are decomposed in double precision.

    Args:
        matrices: The matrices.
        vectors: Whether eigenvectors are wanted, which takes twice the time; they are None if not.
    """

    def decomposition(matrices: Tensor) -> Sequence[Tensor]:
        if vectors:
            return torch.linalg.eigh(matrices)
        return [torch.linalg.eigvalsh(matrices)]

    supported = matrices
    if matrices.dtype in (torch.float16, torch.bfloat16):  # for which there is no eigh
        supported = matrices.float()
    try:
        found = decomposition(supported)
        finite = all(bool(tensor.isfinite().all()) for tensor in found)
    except torch.linalg.LinAlgError:
        finite = False
    if not finite:
        found = decomposition(matrices.double())
    values, *rest = (tensor.to(matrices.dtype) for tensor in found)
    return values, rest[0] if rest else None


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
    _check_finite(factors)
    twins = _find_twins(factors)
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


def _check_finite(factors: Sequence[Tensor]) -> None:
    if not factors or torch.stack([factor.sum().double() for factor in factors]).isfinite().all():
        return
    if not all(factor.isfinite().all() for factor in factors):  # not so if a sum overflowed
        raise torch.linalg.LinAlgError(
            "a curvature factor is not finite; check the loss and the inputs of the network"
        )


def _find_twins(factors: Sequence[Tensor]) -> list[int]:
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
