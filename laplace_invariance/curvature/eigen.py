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
def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of finite symmetric matrices ``[..., d, d]``.

    For some matrices of low rank LAPACK does not converge in single precision, or returns NaN
    without saying so; these are decomposed in double precision.
    """
    supported = matrices
    if matrices.dtype in (torch.float16, torch.bfloat16):  # for which there is no eigh
        supported = matrices.float()
    try:
        values, vectors = torch.linalg.eigh(supported)
        finite = bool(torch.isfinite(values).all() and torch.isfinite(vectors).all())
    except torch.linalg.LinAlgError:
        finite = False
    if not finite:
        values, vectors = torch.linalg.eigh(matrices.double())
    return values.to(matrices.dtype), vectors.to(matrices.dtype)


@torch.no_grad()
def decompose(factors: Sequence[Tensor]) -> list[Pair]:
    """Return eigenvalues, round-off below zero removed, and eigenvectors of each factor.

    Args:
        factors: Matrices ``[d, d]``, blocks ``[q, d, d]``, or diagonals ``[d]``, whose
            eigenvectors are None. Equal ones are decomposed once: the curvature of a bias is often
            the factor of its weight.

    Raises:
        LinAlgError: A factor is not finite.
    """
    factors = [factor.detach() for factor in factors]
    _check_finite(factors)
    twins = _find_twins(factors)
    found: dict[int, Pair] = {}
    for group in _groups(factors, twins):
        found |= zip(group, _decompose_together([factors[i] for i in group]), strict=True)
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


def _decompose_together(factors: Sequence[Tensor]) -> list[Pair]:
    if factors[0].ndim == 1:
        return [(factor.clamp(min=0), None) for factor in factors]
    if len(factors) == 1:
        values, vectors = eigh(factors[0])
        return [(values.clamp(min=0), vectors)]
    values, vectors = eigh(torch.stack(list(factors)))
    return list(zip(values.clamp(min=0), vectors, strict=True))
