"""Recompute instead of remember: a batch's loss and curvature as one node of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["checkpointed", "pull_back_through"]


class _Checkpointed(torch.autograd.Function):
    # Nothing is saved through save_for_backward, so the node may be walked back any number of times, which
    # laplace.marglik_training does (n_hypersteps).

    @staticmethod
    def forward(
        ctx: Any, evaluate: Callable, pull_back: Callable, *hyperparameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.pull_back = pull_back
        with torch.enable_grad():
            return tuple(output.detach() for output in evaluate())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            return None, None, *ctx.pull_back(cotangents)


def checkpointed(
    evaluate: Callable[[], Sequence[Tensor]],
    pull_back: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]],
    hyperparameters: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Return ``evaluate()`` detached, as a differentiable function of the hyperparameters.

    Args:
        evaluate: computes the outputs, with or without a graph; the graph is dropped.
        pull_back: maps cotangents of the outputs (None where there is none) to gradients of the hyperparameters,
            recomputing what it needs. It must see the same random draws as ``evaluate`` did.
        hyperparameters: leaf tensors; if there are none, the outputs are plain constants.
    """
    return _Checkpointed.apply(evaluate, pull_back, *hyperparameters)


def pull_back_through(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the vector-Jacobian product of a graph, with None for what does not take part in it."""
    pairs = [
        (o, c)
        for o, c in zip(outputs, cotangents, strict=True)
        if c is not None and o.requires_grad
    ]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    tensors, weights = zip(*pairs, strict=True)
    gradients = iter(torch.autograd.grad(tensors, wanted, weights, allow_unused=True))
    return [next(gradients) if tensor.requires_grad else None for tensor in inputs]
