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

**The loss Hessian.** K directions of it are backpropagated (``loss_hessian``). Either they carry
the gradient in ``f`` themselves, ``G = sum_n sum_k g_k g_k^T``, or they are fixed and weighted by
``M = diag(p) - p p^T`` with probabilities ``p`` ``[batch, column]``, which alone carry it:
``G = sum_n sum_kl M_kl g_k g_l^T``. ``M`` itself is never formed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = [
    "elementwise_jacobian",
    "factors",
    "fold_counts",
    "fold_gradients",
    "fold_inputs",
    "gram",
    "gram_blocks",
    "jacobian",
    "mark_symmetric",
    "pulling_back",
    "symmetric_product",
    "symmetrised",
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
            # a product of matrices, which is several times faster than einsum in both directions
            mean = weights.to(x.dtype) @ x.reshape(n, len(weights), -1)
            x = mean.reshape(-1, *x.shape[1:])
    return x


def fold_counts(counts: Tensor, levels: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Return the diagonal of ``A`` for one-hot inputs with these counts, of one sample each."""
    for _, weights in levels:
        counts = counts * weights.to(counts.dtype).square()
    return counts


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
    """Return ``x^T y``, which is known to be symmetric, for little over half the work on a CPU.

    Args:
        x: Matrix ``[n, d]``.
        y: Matrix ``[n, d]``.
        block: Rows of the product that are computed at once, up to the diagonal, on a CPU; a GPU
            is faster with one product.
    """
    n, d = x.shape
    few = d < 2 * block or n < block // 2  # for few rows, to write the result is most of the work
    if few or x.device.type != "cpu":
        return x.mT @ y
    product = x.new_empty(d, d)
    for start in range(0, d, block):
        stop = min(start + block, d)
        torch.mm(x[:, start:stop].mT, y[:, :stop], out=product[start:stop, :stop])
        product[:start, start:stop] = product[start:stop, :start].mT
    return product


# Length of vectors up to which products of them are formed without a copy in another layout.
SHORT = 64

# Whether values of Gram matrices are wanted, inside pulling_back(); None outside of it.
_values_wanted: ContextVar[bool | None] = ContextVar("laplace_invariance_values", default=None)


@contextmanager
def pulling_back(values: bool = True) -> Iterator[None]:
    """Form Gram matrices that will be differentiated under symmetric cotangents only.

    Args:
        values: Whether their values are wanted as well; if not, they are zeros without memory.
    """
    token = _values_wanted.set(values)
    try:
        yield
    finally:
        _values_wanted.reset(token)


def mark_symmetric(matrices: Tensor) -> Tensor:
    """Mark matrices ``[..., d, d]`` as symmetric, for :func:`symmetrised`, and return them."""
    matrices._laplace_invariance_symmetric = matrices._version  # type: ignore[attr-defined]
    return matrices


def symmetrised(cotangent: Tensor) -> Tensor:
    """Return the symmetric part of a cotangent ``[..., d, d]``; vectors are returned as they are.

    That of a symmetric matrix is all that counts. Its result is marked, so that nothing is done
    the next time: whoever uses a cotangent for many batches calls this once.
    """
    if cotangent.ndim < 2:
        return cotangent
    if getattr(cotangent, "_laplace_invariance_symmetric", None) == cotangent._version:
        return cotangent
    return mark_symmetric((cotangent + cotangent.mT).div_(2))


class _Gram(torch.autograd.Function):
    """``sum_b sum_kl M_kl x_k^T x_l`` with a gradient that costs one matrix product, not two."""

    # What is read in forward would not be there in backward, which may run in another thread.

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, scale: float, layout: str) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.scale = scale
        ctx.layout = layout
        ctx.symmetric = _values_wanted.get() is not None
        if _values_wanted.get() is False:
            return x.new_zeros(()).expand(_shape(x, layout))
        product = _weighted_product(x.contiguous(), weights, layout)
        return product if scale == 1 else product.mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weights = ctx.saved_tensors
        if cotangent.ndim > 1 and not ctx.symmetric:
            cotangent = (cotangent + cotangent.mT) / 2
        x = x.contiguous()
        if x.numel() < cotangent.numel():
            product = _multiply(x * (2 * ctx.scale), cotangent, ctx.layout)
        else:
            product = _multiply(x, cotangent * (2 * ctx.scale), ctx.layout)
        gradient = None
        if weights is not None and ctx.needs_input_grad[1]:
            gradient = _weights_gradient(x, product, weights)
        return _weigh(product, weights), gradient, None, None


def _shape(x: Tensor, layout: str) -> tuple[int, ...]:
    """Return the shape of the Gram matrix, of its blocks or of its diagonal."""
    *_, e, d = x.shape
    return {"dense": (d, d), "transposed": (e, e), "blocks": (e, d, d), "diagonal": (d,)}[layout]


def _weighted_product(x: Tensor, p: Tensor | None, layout: str) -> Tensor:
    """Return ``sum_k p_k x_k^T x_k - s^T s`` with ``s = sum_k p_k x_k``."""
    if p is None:
        return _product(x, x, layout)
    scaled = p.view(*p.shape, *[1] * (x.ndim - 2)) * x
    total = scaled.sum(1, keepdim=True)
    return _product(x, scaled, layout) - _product(total, total, layout)


def _product(x: Tensor, y: Tensor, layout: str) -> Tensor:
    """Return ``x^T y``, summed over all axes but that of slots and the last."""
    if layout == "transposed":
        return torch.bmm(x.flatten(0, -3), y.flatten(0, -3).mT).sum(0)
    if layout == "diagonal":
        return (x * y).flatten(0, -2).sum(0)
    if layout == "blocks":
        by_slot, other = x.flatten(0, -3).movedim(1, 0), y.flatten(0, -3).movedim(1, 0)
        return by_slot.mT @ other
    return symmetric_product(x.flatten(0, -2), y.flatten(0, -2))


def _multiply(x: Tensor, matrix: Tensor, layout: str) -> Tensor:
    """Return ``x C`` for a symmetric matrix, its blocks or its diagonal."""
    if layout == "transposed":
        return matrix @ x
    if layout == "diagonal":
        return x * matrix
    if layout == "blocks":
        return torch.einsum("...qd,qde->...qe", x, matrix)
    return x @ matrix


def _weigh(x: Tensor, weights: Tensor | None) -> Tensor:
    """Return ``sum_l M_kl x_l = p_k (x_k - sum_l p_l x_l)`` for ``x`` ``[batch, column, ...]``."""
    if weights is None:
        return x
    mean = weights.unsqueeze(1) @ x.flatten(2)
    return (weights.unsqueeze(2) * (x.flatten(2) - mean)).view_as(x)


def _weights_gradient(x: Tensor, product: Tensor, p: Tensor) -> Tensor:
    """Return the gradient in ``p`` of the Gram matrix under the cotangent ``C``.

    The derivative of ``M`` in ``p_k`` makes it ``<x_k, C x_k> - 2 <x_k, C sum_l p_l x_l>``.

    Args:
        x: Vectors ``[batch, column, ...]``.
        product: ``2 C x`` for the symmetric ``C``.
        p: Probabilities ``[batch, column]``.
    """
    x, product = x.flatten(2), product.flatten(2)
    mean = p.unsqueeze(1) @ product
    return (x * (product / 2 - mean)).sum(-1)


def gram(x: Tensor, weights: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Return the sum of outer products of vectors, their columns weighted by ``M``.

    Args:
        x: Vectors ``[batch, column, ..., d]``; all axes but the last are summed over.
        weights: Probabilities ``p`` ``[batch, column]`` of ``M = diag(p) - p p^T``; None stands
            for the identity.
        scale: Factor of the result.

    Returns:
        Matrix ``[d, d]``.
    """
    if _is_transposed(x):
        return _Gram.apply(x.mT, weights, scale, "transposed")
    return _Gram.apply(x, weights, scale, "dense")


def _is_transposed(x: Tensor) -> bool:
    """Return whether vectors are stored as columns, too short for a copy to be worth it.

    Gradients of convolutions with few channels are.
    """
    short = x.ndim > 3 and x.shape[-1] <= min(x.shape[-2], SHORT)
    return short and not x.is_contiguous() and x.mT.is_contiguous()


def gram_blocks(x: Tensor, weights: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Return :func:`gram` of each slot.

    Args:
        x: Vectors ``[batch, column, ..., slots, d]``.
        weights: As for :func:`gram`.
        scale: Factor of the result.

    Returns:
        Matrices ``[slots, d, d]``.
    """
    return _Gram.apply(x, weights, scale, "blocks")


def weighted_diagonal(x: Tensor, weights: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Return the diagonal ``[d]`` of :func:`gram`, with its arguments, without forming it."""
    return _Gram.apply(x, weights, scale, "diagonal")


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
    of a convolution), ``A`` where they split the columns. It is returned as its blocks,
    ``[slots, d, d]``, or as the diagonal ``[slots]`` that it is for rows of one output each
    (depthwise convolutions). Slot ``q`` of the columns meets gradients of its own only, so that a
    ``G_q`` for each of them is closer to the curvature: ``(1 / N) G_q (x) A_q`` instead of
    ``(1 / N) (mean_q G_q) (x) A_q``.

    Args:
        a: Averaged inputs ``[batch, shared, (slots,) d_in]``; for one-hot ones their counts
            ``[d_in]`` will do, with ``"expand"``, and ``A`` is then returned as its diagonal.
        g: Summed gradients ``[batch, column, shared, (slots,) d_out]``.
        weights: Probabilities ``[batch, column]`` of the columns, or None.
        N: Size of the data set.
        approx: ``"expand"`` or ``"reduce"`` for shared positions; slots are always expanded.
        slotted_columns: Whether slots split the columns of the parameter instead of its rows.
        per_slot: With ``slotted_columns``, return ``G`` of each slot, ``[slots, d_out, d_out]``.
    """
    if a.ndim == 1:
        return gram(g, weights, 1 / g.shape[2]), a / N
    if approx == "reduce":
        a, g = a.mean(1, keepdim=True), g.sum(2, keepdim=True)
    positions = g.shape[2:-1].numel()
    if slotted_columns:
        inner = gram_blocks(a, scale=1 / N)
        if per_slot:
            return gram_blocks(g, weights, 1 / g.shape[2]), inner
        return gram(g, weights, 1 / positions), inner
    inner = gram(a, scale=1 / N)
    if a.ndim == 3:
        return gram(g, weights, 1 / positions), inner
    if g.shape[-1] == 1:
        return weighted_diagonal(g.squeeze(-1), weights, 1 / positions), inner
    return gram_blocks(g, weights, 1 / positions), inner


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
