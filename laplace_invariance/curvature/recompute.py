"""Recompute instead of remember: a batch's loss and curvature as one node of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from laplace_invariance.hyper import differentiable

__all__ = ["pull_back_through", "recomputed"]

Output = TypeVar("Output", Tensor, Tensor | None)


class _Recomputed(torch.autograd.Function):
    # Nothing is saved through save_for_backward, so the node may be walked back any number of
    # times, which laplace.marglik_training does (n_hypersteps).

    @staticmethod
    def forward(
        ctx: Any,
        evaluate: Callable[[], Sequence[Tensor | None]],
        pull_back: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]],
        *inputs: Tensor,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.pull_back = pull_back
        with torch.enable_grad():
            outputs = evaluate()
        return tuple(output if output is None else output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        # The one place where forward passes depend on hyperparameters differentiably.
        with torch.enable_grad(), differentiable():
            return None, None, *ctx.pull_back(cotangents)


def recomputed(
    evaluate: Callable[[], Sequence[Output]],
    pull_back: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]],
    inputs: Sequence[Tensor],
) -> tuple[Output, ...]:
    """Return ``evaluate()`` detached, as a differentiable function of the inputs.

    Args:
        evaluate: Computes the outputs, with or without a graph; the graph is dropped. None
            stands for an output that does not exist.
        pull_back: Maps cotangents of the outputs (None where there is none) to gradients of the
            inputs, recomputing what it needs. It must see the same random draws as ``evaluate``
            did, and runs inside :func:`~laplace_invariance.hyper.differentiable`.
        inputs: Hyperparameters, and other tensors that ``evaluate`` depends on. If none requires
            grad, the outputs are plain constants.
    """
    return _Recomputed.apply(evaluate, pull_back, *inputs)


def pull_back_through(
    outputs: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
) -> list[Tensor | None]:
    """Return the vector-Jacobian product of a graph.

    Args:
        outputs: Outputs of the graph.
        cotangents: A weight for each output, or None.
        inputs: Tensors of the graph to differentiate with respect to.

    Returns:
        A gradient for each input, None for an input that does not take part.
    """
    tensors, weights = [], []
    for output, cotangent in zip(outputs, cotangents, strict=True):
        if output is not None and cotangent is not None and output.requires_grad:
            tensors.append(output)
            weights.append(cotangent)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not tensors or not wanted:
        return [None] * len(inputs)
    gradients = iter(torch.autograd.grad(tensors, wanted, weights, allow_unused=True))
    return [next(gradients) if tensor.requires_grad else None for tensor in inputs]
