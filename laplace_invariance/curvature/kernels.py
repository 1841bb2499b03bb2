"""Neural tangent kernels of single parameters, and their log determinants, as pure functions.

Axis names are those of ``kfac``; ``r`` and ``s`` are all positions and samples of an input. With
``psi[k, n]`` the gradient of ``f_n . L_n[:, k]``, where ``L_n L_n^T`` is the loss Hessian of input
n, the curvature is ``sum psi psi^T``, and relative to the prior

    log det(sum psi psi^T + P0) - log det P0 = log det(I + psi P0^-1 psi^T).

The kernel on the right is a sum over parameters, here with one prior precision for each. For a
matrix, ``psi[k, n] = sum_r g[k, n, r] (x) a[n, r]``, and its kernel is found in the cheaper of two
ways, in pieces, and once more in the backward pass, so that nothing but ``a`` and ``g`` is kept:

    explicit:  psi[k, n] . psi[l, m]                                 some rows of the matrix
    paired:    sum_rs (a[n, r] . a[m, s]) (g[k, n, r] . g[l, m, s])      some inputs m

Kernels are blocked: gradients have axes ``[block, column, batch, ...]``, and only columns of the
same block meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from laplace_invariance.curvature import kfac
from laplace_invariance.curvature.eigen import eigh
from laplace_invariance.curvature.recompute import recomputed

__all__ = ["log_determinant", "matrix_kernel", "softmax_root", "vector_kernel"]

# Elements of the largest tensor that is formed for a piece of a kernel, besides the kernel itself.
PIECE_ELEMENTS = 2**22

# Multiplications of a matrix product that take as long as one element of an elementwise product.
ELEMENT = 200

# Inputs m on the right, slots of the matrix, and rows of the matrix in each slot.
Piece = tuple[slice, slice, slice]
Part = Callable[[Tensor, Tensor, Piece], Tensor]

ALL = slice(None)


def softmax_root(logits: Tensor, reduced: bool) -> Tensor:
    """Return the columns of ``L`` with ``L L^T = diag(p) - p p^T``.

    ``L = diag(q) - p q^T``, where ``q = sqrt(p)`` is formed as ``exp(log_softmax / 2)``, whose
    derivative is finite for saturated logits. As ``L q = 0`` and ``q`` has length one, a reflection
    that maps the last unit vector to ``-q`` makes the last column zero, and it can be left out.

    Args:
        logits: Outputs ``[batch, C]`` of the network.
        reduced: Whether to reflect the columns, so that there are ``C - 1`` of them.

    Returns:
        Columns ``[column, batch, C]``.
    """
    log_p = logits.log_softmax(-1)
    p, q = log_p.exp(), (log_p / 2).exp()
    root = torch.diag_embed(q) - q.unsqueeze(-1) * p.unsqueeze(-2)  # [batch, column, C]
    if reduced:
        share = q[:, :-1] / (1 + q[:, -1:])
        root = root[:, :-1] - share.unsqueeze(-1) * root[:, -1:]
    return root.transpose(0, 1)


def vector_kernel(psi: Tensor, scale: Tensor) -> Tensor:
    """Return ``scale * psi psi^T`` for a parameter whose gradients are small enough to be kept.

    Args:
        psi: Gradients ``[block, column, batch, d]``.
        scale: Inverse of the prior precision, times the factor of the loss Hessian.

    Returns:
        Kernel ``[block, column * batch, column * batch]``.
    """
    psi = scale.sqrt() * psi.flatten(1, 2)  # so that no kernel is kept for the gradient in scale
    return psi @ psi.mT


def matrix_kernel(a: Tensor, g: Tensor, scale: Tensor) -> Tensor:
    """Return ``scale * psi psi^T`` for a matrix with gradients ``psi = sum_r g_r (x) a_r``.

    Slots meet disjoint parts of the matrix, so that the kernel is the sum of theirs.

    Args:
        a: What the matrix is applied to, ``[batch, r, (slots,) d_in]``.
        g: Gradients of its outputs, ``[block, column, batch, r, (slots,) d_out]``.
        scale: Inverse of the prior precision, times the factor of the loss Hessian.

    Returns:
        Kernel ``[block, column * batch, column * batch]``, differentiable in all three.
    """
    if a.ndim == 3:
        a, g = a.unsqueeze(-2), g.unsqueeze(-2)
    part, pieces = _plan(a, g)

    def evaluate() -> list[Tensor]:
        kernel = g.new_zeros(*g.shape[:3], *g.shape[1:3])
        with torch.no_grad():
            for piece in pieces:
                kernel[..., piece[0]] += part(a, g, piece)
        return [kernel.mul_(scale)]

    def pull_back(cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        (cotangent,) = cotangents
        assert cotangent is not None
        leaf_a = a.detach().requires_grad_(a.requires_grad)
        leaf_g = g.detach().requires_grad_(g.requires_grad)
        slope = torch.zeros_like(scale)
        for piece in pieces:
            weights = cotangent[..., piece[0]]
            found = part(leaf_a, leaf_g, piece)
            slope += (found.detach() * weights).sum()
            if found.requires_grad:
                found.backward(scale * weights)
        return [leaf_a.grad, leaf_g.grad, slope]

    (kernel,) = recomputed(evaluate, pull_back, [a, g, scale])
    return kernel.flatten(3).flatten(1, 2)


def _explicit(a: Tensor, g: Tensor, piece: Piece) -> Tensor:
    """Return the kernel ``[block, column, batch, column, batch]`` of some rows of the matrix."""
    _, slots, rows = piece
    psi = torch.einsum("bknrqo,nrqi->bknqoi", g[..., slots, rows], a[:, :, slots]).flatten(3)
    grams = torch.stack([kfac.gram(block.mT) for block in psi.flatten(1, 2)])
    return grams.view(*psi.shape[:3], *psi.shape[1:3])


def _paired(a: Tensor, g: Tensor, piece: Piece) -> Tensor:
    """Return the kernel ``[block, column, batch, column, m]`` with some inputs ``m``."""
    inputs = piece[0]
    a = a.permute(2, 1, 0, 3)  # [slots, r, batch, d_in]: sums over outer axes are fast
    g = g.permute(0, 4, 3, 1, 2, 5)  # [block, slots, r, column, batch, d_out]
    products = torch.einsum("qrni,qsmi->qrnsm", a, a[:, :, inputs])
    grams = torch.einsum("bqrkno,bqslmo->bqrknslm", g, g[..., inputs, :])
    return (grams * products[:, :, None, :, :, None]).sum((1, 2, 5))


def _plan(a: Tensor, g: Tensor) -> tuple[Part, list[Piece]]:
    """Return the way with fewer operations, and pieces of bounded size."""
    blocks, columns, n, r, slots, d_out = g.shape
    d_in = a.shape[-1]
    pairs = blocks * columns * columns * n * n  # entries of the kernel
    explicit = (blocks * columns * n * r + pairs) * slots * d_in * d_out
    paired = ((n * r) ** 2 * d_in + pairs * r * r * (d_out + ELEMENT)) * slots
    if paired < explicit:
        size = slots * pairs * r * r // n
        return _paired, [(part, ALL, ALL) for part in _slices(n, size)]
    size = blocks * columns * n * d_in
    if size * d_out < PIECE_ELEMENTS:
        return _explicit, [(ALL, part, ALL) for part in _slices(slots, size * d_out)]
    places = _slices(d_out, size)
    return _explicit, [(ALL, slice(q, q + 1), part) for q in range(slots) for part in places]


def _slices(n: int, size: int) -> list[slice]:
    """Cut ``n`` things, each of ``size`` elements, into pieces of bounded size."""
    step = max(1, PIECE_ELEMENTS // size)
    return [slice(start, start + step) for start in range(0, n, step)]


class _LogDeterminant(torch.autograd.Function):
    """The sum of ``log det(I + K)`` over blocks, with the inverse as its gradient."""

    @staticmethod
    def forward(ctx: Any, kernels: Tensor) -> Tensor:
        value, inverse = _by_cholesky(kernels, ctx.needs_input_grad[0])
        ctx.save_for_backward(inverse)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return cotangent * inverse


def _by_cholesky(kernels: Tensor, invert: bool) -> tuple[Tensor, Tensor | None]:
    """Return ``sum log det(I + K)`` and, if asked for, the inverses."""
    identity = torch.eye(kernels.shape[-1], dtype=kernels.dtype, device=kernels.device)
    root, failed = torch.linalg.cholesky_ex(kernels + identity)
    if failed.any():
        return _by_eigenvalues(kernels)
    value = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum()
    return value, torch.cholesky_inverse(root) if invert else None


def _by_eigenvalues(kernels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same where eigenvalues are negative below -1 by round-off, and count as zero."""
    if not torch.isfinite(kernels).all():
        raise torch.linalg.LinAlgError("the tangent kernel is not finite")
    values, vectors = eigh(kernels)
    assert vectors is not None
    values = 1 + values.clamp(min=0)
    return values.log().sum(), vectors / values.unsqueeze(-2) @ vectors.mT


def log_determinant(kernels: Tensor) -> Tensor:
    """Return ``sum_b log det(I + K_b)``.

    Args:
        kernels: Positive semidefinite matrices ``[block, n, n]``.

    Raises:
        torch.linalg.LinAlgError: A kernel is not finite.
    """
    return _LogDeterminant.apply(kernels)
