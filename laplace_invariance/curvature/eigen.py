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
    supported = matrices
    if matrices.dtype in (torch.float16, torch.bfloat16):  # for which there is no eigh
        supported = matrices.float()
    try:
        found = _decompose(supported, vectors)
        finite = all(bool(tensor.isfinite().all()) for tensor in found)
    except torch.linalg.LinAlgError:
        finite = False
    if not finite:
        found = _decompose(matrices.double(), vectors)
    values, *rest = (tensor.to(matrices.dtype) for tensor in found)
    return values, rest[0] if rest else None


def _decompose(matrices: Tensor, vectors: bool) -> Sequence[Tensor]:
    if vectors:
        return torch.linalg.eigh(matrices)
    return [torch.linalg.eigvalsh(matrices)]


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
    found: dict[int, Pair] = {}
    for group in _groups(factors, twins):
        pairs = _decompose_together([factors[i] for i in group], vectors)
        found |= zip(group, pairs, strict=True)
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


def _groups(factors: Sequence[Tensor], twins: Sequence[int]) -> list[list[int]]:
    """Return the indices of factors to decompose together, without those of later twins."""
    groups: dict[object, list[int]] = {}
    for i, factor in enumerate(factors):
        if twins[i] != i:
            continue
        stacked = factor.ndim == 2 and len(factor) <= STACKED_SIZE
        kind = (factor.shape, factor.dtype, factor.device)
        groups.setdefault(kind if stacked else i, []).append(i)
    return list(groups.values())


def _decompose_together(factors: Sequence[Tensor], vectors: bool) -> list[Pair]:
    if factors[0].ndim == 1:
        return [(factor.clamp(min=0), None) for factor in factors]
    values, directions = eigh(torch.stack(list(factors)), vectors)
    if directions is None:
        return [(own, None) for own in values.clamp(min=0)]
    return list(zip(values.clamp(min=0), directions, strict=True))
