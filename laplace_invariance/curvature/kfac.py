"""The mathematics of augmented KFAC, as pure functions.

Axis names, used everywhere: ``batch`` B, ``sample`` S, ``rows`` = B * S, ``shared`` R positions
at which one weight matrix is applied, ``column`` K directions of the loss Hessian. ``N`` is the
size of the data set and nothing else.

**Samples.** The network is ``f = sum_s w_s f_s``. Per layer and input, its Jacobian is
``sum_s w_s g_s (x) a_s``, which KFAC replaces by ``g_bar (x) a_bar``, ``a_bar = sum_s w_s a_s``,
``g_bar = sum_s w_s g_s``. Gradients of ``f`` itself arrive as ``w_s g_s``, so ``g_bar`` is their
plain sum. Exact if all ``a_s`` or all ``g_s`` agree, and for a linear model.

**Shared positions.** Two ways to approximate ``sum_r g_r (x) a_r``:

    expand:  A = sum_n sum_r a a^T,      G = (1 / R) sum_n sum_r g Lambda g^T
    reduce:  a <- mean_r a,  g <- sum_r g,  then as with one position

and ``H ~ (1 / N) G (x) A``, kept as ``[G, A / N]`` so that factors add up over batches. Expand is
exact if positions do not interact, reduce if all ``a_r`` (or all ``g_r``) agree.

**The loss Hessian.** ``Lambda(f)`` is never decomposed by a differentiable root. K fixed
directions ``U`` are backpropagated and weighted by ``M = U^T Lambda U``, which alone carries the
gradient in ``f``: ``G = sum_n sum_kl M_kl g_k g_l^T``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = [
    "complement_basis",
    "eigh",
    "elementwise_jacobian",
    "factors",
    "fold_gradients",
    "fold_inputs",
    "gram",
    "jacobian",
    "leading_directions",
    "sampled_directions",
    "softmax_hessian",
    "unit_directions",
    "weighted_diagonal",
]


def fold_inputs(x: Tensor, levels: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Average over samples, level by level: ``[n * sample * inner, ...] -> [n * inner, ...]``.

    Args:
        x: Inputs of a layer. ``inner`` is more than one where a model puts positions into the
            batch axis before it calls the layer; ``n`` is more than the batch where it does so
            before it averages over samples.
        levels: For each averaging model around the layer, outermost first, ``n`` and the weights
            ``[sample]`` of its samples.

    Returns:
        Their weighted mean.
    """
    for n, weights in reversed(levels):
        if len(weights) == 1:
            x = x * weights.to(x.dtype)
        else:
            samples = x.unflatten(0, (n, len(weights), -1))
            x = torch.einsum("s,nst...->nt...", weights.to(x.dtype), samples).flatten(0, 1)
    return x


def fold_gradients(g: Tensor, levels: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Sum over samples, level by level: the weights are in the gradients.

    Args:
        g: Gradients of a layer's output, ``[n * sample * inner, ...]``.
        levels: For each averaging model around the layer, outermost first, ``n`` and the weights
            ``[sample]`` of its samples.

    Returns:
        Gradients ``[n * inner, ...]``.
    """
    for n, weights in reversed(levels):
        if len(weights) > 1:
            g = g.unflatten(0, (n, len(weights), -1)).sum(1).flatten(0, 1)
    return g


def symmetric_product(x: Tensor, y: Tensor, block: int = 256) -> Tensor:
    """Return ``x^T y``, which is known to be symmetric, for little over half the work.

    Args:
        x: Matrix ``[n, d]``.
        y: Matrix ``[n, d]``.
        block: Rows of the product that are computed at once, up to the diagonal.
    """
    d = x.shape[1]
    if d < 2 * block:
        return x.mT @ y
    product = x.new_empty(d, d)
    for start in range(0, d, block):
        stop = min(start + block, d)
        torch.mm(x[:, start:stop].mT, y[:, :stop], out=product[start:stop, :stop])
        product[:start, start:stop] = product[start:stop, :start].mT
    return product


class _Gram(torch.autograd.Function):
    """``sum_b sum_kl M_kl x_k^T x_l`` with a gradient that costs one matrix product, not two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.scale = scale
        product = symmetric_product(x.flatten(0, -2), _weigh(x, weights).flatten(0, -2))
        return product if scale == 1 else product.mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weights = ctx.saved_tensors
        product = x @ (cotangent + cotangent.mT).mul_(ctx.scale)
        if weights is None or not ctx.needs_input_grad[1]:
            return _weigh(product, weights), None, None
        return _weigh(product, weights), x.flatten(2) @ product.flatten(2).mT / 2, None


def _weigh(x: Tensor, weights: Tensor | None) -> Tensor:
    """Return ``sum_l M_kl x_l`` for ``x`` ``[batch, column, ...]``; None is the identity."""
    if weights is None:
        return x
    return (weights @ x.flatten(2)).view_as(x)


def gram(x: Tensor, weights: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Return the sum of outer products of vectors, their columns weighted by ``M``.

    Args:
        x: Vectors ``[batch, column, ..., d]``; all axes but the last are summed over.
        weights: Symmetric ``M`` ``[batch, column, column]``; None is the identity.
        scale: Factor of the result.

    Returns:
        Matrix ``[d, d]``.
    """
    return _Gram.apply(x, weights, scale)


def factors(
    a: Tensor,
    g: Tensor,
    weights: Tensor | None,
    N: int,
    approx: str,
    *,
    slotted_columns: bool = False,
    per_slot: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the Kronecker factors ``G`` ``[d_out, d_out]`` and ``A / N`` ``[d_in, d_in]``.

    With slots, each slot is a further position, at which only its own part of the matrix is not
    zero, and the factor on that side is block-diagonal: ``G`` where slots split the rows (groups
    of a convolution), ``A`` where they split the columns. The latter can be large and is
    returned as its blocks, ``[slots, d_in, d_in]``. Slot ``q`` of the columns meets gradients of
    its own only, so that a ``G_q`` for each of them is closer to the curvature:
    ``(1 / N) G_q (x) A_q`` instead of ``(1 / N) (mean_q G_q) (x) A_q``.

    Args:
        a: Averaged inputs ``[batch, shared, (slots,) d_in]``.
        g: Summed gradients ``[batch, column, shared, (slots,) d_out]``.
        weights: ``M`` ``[batch, column, column]``, or None for the identity.
        N: Size of the data set.
        approx: ``"expand"`` or ``"reduce"`` for shared positions; slots are always expanded.
        slotted_columns: Whether slots split the columns of the parameter instead of its rows.
        per_slot: With ``slotted_columns``, return ``G`` of each slot, ``[slots, d_out, d_out]``.
    """
    if approx == "reduce":
        a, g = a.mean(1, keepdim=True), g.sum(2, keepdim=True)
    positions = g.shape[2:-1].numel()
    if slotted_columns:
        inner = _blocks(a, None, 1 / N)
        if per_slot:
            return _blocks(g, weights, 1 / g.shape[2]), inner
        return gram(g, weights, 1 / positions), inner
    inner = gram(a, scale=1 / N)
    if a.ndim == 3:
        return gram(g, weights, 1 / positions), inner
    return torch.block_diag(*_blocks(g, weights, 1 / positions)), inner


def _blocks(x: Tensor, weights: Tensor | None, scale: float) -> Tensor:
    """Return the ``[slots, d, d]`` grams of ``x`` ``[batch, (column,) shared, slots, d]``."""
    return torch.stack([gram(part, weights, scale) for part in x.unbind(-2)])


def weighted_diagonal(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the diagonal ``[d]`` of :func:`gram` without forming it.

    Args:
        x: Vectors ``[batch, column, d]``.
        weights: Symmetric ``M`` ``[batch, column, column]``; None is the identity.
    """
    return (x * _weigh(x, weights)).sum((0, 1))


def jacobian(
    a: Tensor, g: Tensor, batch: int, *, slotted_columns: bool = False, transposed: bool = False
) -> Tensor:
    """Return the exact gradient ``sum g (x) a`` of each input's output in a matrix.

    Args:
        a: What the matrix is applied to, ``[rows, shared, (slots,) d_in]``.
        g: Gradients of its outputs, ``[rows, shared, (slots,) d_out]``, weights of the samples
            included.
        batch: Number of inputs; samples and positions are summed over.
        slotted_columns: Whether slots split the columns of the matrix instead of its rows.
        transposed: Whether the matrix is stored as ``[d_in, d_out]``.

    Returns:
        Gradients ``[batch, numel]``.
    """
    g = g.reshape(batch, -1, *g.shape[2:])
    a = a.reshape(batch, -1, *a.shape[2:])
    if a.ndim == 4:  # slot q of the positions meets part q of the columns or rows
        equation = "bnqo,bnqi->boqi" if slotted_columns else "bnqo,bnqi->bqoi"
        return torch.einsum(equation, g, a).flatten(1)
    product = a.mT @ g if transposed else g.mT @ a
    return product.flatten(1)


def elementwise_jacobian(a: Tensor | None, g: Tensor, batch: int) -> Tensor:
    """Return the exact gradient ``sum g * a`` of each input's output in a vector.

    Args:
        a: Factors of the vector, ``[rows, shared, d]``, or None for ones.
        g: Gradients of the products, ``[rows, shared, d]``, weights of the samples included.
        batch: Number of inputs; samples and positions are summed over.

    Returns:
        Gradients ``[batch, d]``.
    """
    g = g.reshape(batch, -1, *g.shape[2:])
    if a is None:
        return g.sum(1)
    return (g * a.reshape(g.shape)).sum(1)


def complement_basis(n: int, like: Tensor) -> Tensor:
    """Return an orthonormal basis ``[n, n - 1]`` of the vectors that sum to zero.

    The softmax Hessian annihilates the constant vector, so these directions suffice for it.

    Args:
        n: Dimension of the vectors.
        like: Tensor whose dtype and device the basis has.
    """
    k = torch.arange(1, n, dtype=like.dtype, device=like.device)
    basis = torch.triu(torch.ones(n, n - 1, dtype=like.dtype, device=like.device))
    basis[torch.arange(1, n), torch.arange(n - 1)] = -k
    return basis / (k * (k + 1)).sqrt()


def unit_directions(outputs: Tensor) -> list[Tensor]:
    """Return the unit vectors as directions, each ``[batch, C]`` as the outputs are."""
    return [unit.expand_as(outputs) for unit in torch.eye(outputs.shape[-1]).to(outputs)]


def softmax_hessian(logits: Tensor) -> Tensor:
    """Return ``Lambda = diag(p) - p p^T``, ``[batch, C, C]``, for logits ``[batch, C]``."""
    p = logits.softmax(-1)
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


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
def leading_directions(hessian: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leading eigenvectors of each Hessian, and how much of its trace they keep.

    Args:
        hessian: Symmetric matrices ``[batch, C, C]``.
        rank: Number of eigenvectors.

    Returns:
        Eigenvectors ``[batch, C, rank]``, and the traces kept and total, summed over the batch.
    """
    values, vectors = eigh(hessian)
    return vectors[..., -rank:], values[..., -rank:].sum(), values.sum()


def sampled_directions(logits: Tensor, signs: Tensor) -> Tensor:
    """Return ``v = L z``, ``L = diag(q) - p q^T``, with ``E[v v^T] = Lambda``, pathwise in logits.

    ``q = sqrt(p)`` is formed as ``exp(log_softmax / 2)``, whose derivative is finite for
    saturated logits.

    Args:
        logits: Outputs ``[batch, C]`` of the network.
        signs: Random signs ``z``, ``[column, batch, C]``.

    Returns:
        Directions ``[column, batch, C]``.
    """
    log_p = logits.log_softmax(-1)
    p, q = log_p.exp(), (log_p / 2).exp()
    return q * signs - p * (q * signs).sum(-1, keepdim=True)
