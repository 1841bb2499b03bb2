"""Whether blocks of what layers saw explain the gradients of a model, input by input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laplace_invariance.curvature.rules import AnyBlock, ElementwiseBlock, MatrixBlock
from laplace_invariance.curvature.trace.calls import Call, backpropagate
from laplace_invariance.curvature.trace.coverage import Coverage

__all__ = ["Truth", "verified"]


class Truth:
    """The gradients of a model, input by input, along one direction of its outputs.

    Args:
        outputs: Outputs ``[batch, C]`` of the model.
        parameters: Its parameters.

    Attributes:
        outputs: The same.
        parameters: The same.
        direction: Direction ``[C]``.
        gradients: Gradient ``[batch, numel]`` of each parameter.
        has_silent: Whether one of them is zero.
    """

    def __init__(self, outputs: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        self.outputs = outputs
        self.parameters = parameters
        numbers = torch.arange(1, outputs.shape[-1] + 1, device=outputs.device)
        self.direction = torch.sin(numbers.to(outputs.dtype))
        self.gradients = [outputs.new_empty(len(outputs), p.numel()) for p in parameters]
        for i, row in enumerate(outputs):
            for found, gradient in zip(
                self.gradients, backpropagate(row, parameters, self.direction), strict=True
            ):
                found[i] = gradient.flatten()
        self.has_silent = not torch.stack(list(map(torch.any, self.gradients))).all()


def verified(
    covered: Sequence[Coverage], truth: Truth, calls: Sequence[Call]
) -> dict[int, AnyBlock]:
    """Return a block of each parameter whose gradient, input by input, is what blocks say."""
    blocks: dict[int, AnyBlock] = {}
    for index, entry in enumerate(covered):
        if entry.reason is None:  # a layer that is not called has no curvature
            blocks[index] = entry.owners[0].blocks[0]
    layouts: dict[int, set[tuple[Any, ...]]] = {}
    for call in calls:
        for index, block in call.blocks:
            blocks[index] = block
            layouts.setdefault(index, set()).add(_layout(block))
    different = [index for index, found in layouts.items() if len(found) > 1]
    explained = _explain(truth, calls)
    largest = max(gradient.abs().max() for gradient in truth.gradients)
    tolerance = 10 * torch.finfo(truth.outputs.dtype).eps ** 0.5
    found = {}
    for index in sorted(blocks):
        expected = truth.gradients[index]
        actual = explained.get(index, torch.zeros_like(expected))
        if actual is None or index in different:
            continue
        allowed = tolerance * (expected.abs().max() + 1e-3 * largest)
        if (actual - expected).abs().max() <= allowed:
            found[index] = blocks[index]
    return found


def _layout(block: AnyBlock) -> tuple[Any, ...]:
    """Return that in which all blocks of one parameter must agree."""
    if isinstance(block, ElementwiseBlock):
        return (ElementwiseBlock,)
    return (MatrixBlock, block.transposed, block.slots, block.slotted_columns, block.rows)


def _explain(truth: Truth, calls: Sequence[Call]) -> dict[int, Tensor | None]:
    """Return the gradients ``[batch, numel]`` that blocks make of calls, None for a mismatch."""
    explained: dict[int, Tensor | None] = {}
    if not calls:
        return explained
    outputs = truth.outputs
    tensors = [call.output for call in calls]
    gradients = backpropagate(outputs, tensors, truth.direction.expand_as(outputs))
    for call, gradient in zip(calls, gradients, strict=True):
        for index, block in call.blocks:
            shape = truth.gradients[index].shape
            before = explained.get(index, outputs.new_zeros(shape))
            explained[index] = None
            if before is not None:
                term = _term(block, call.x, gradient, len(outputs))
                if term is not None and term.shape == shape:
                    explained[index] = before + term
    return explained


def _term(block: AnyBlock, x: Tensor, gradient: Tensor, batch: int) -> Tensor | None:
    """Return the gradient ``[batch, numel]`` that a block makes of a call, None if it cannot.

    A rule that a module inherits may not fit what it sees: inputs and gradients may differ in their
    positions, or nothing works at all.
    """
    try:
        g = block.g(gradient)
        a = g if block.a is None else block.a(x)
        fits = len(a) % batch == len(g) % batch == 0
        if isinstance(block, ElementwiseBlock):
            fits &= a.numel() == g.numel()
        else:
            fits &= a.shape[:-1].numel() == g.shape[:-1].numel()
            fits &= a.ndim == g.ndim and a.shape[2:-1] == g.shape[2:-1]
        return block.gradient_map(x, batch)(gradient) if fits else None
    except (IndexError, RuntimeError, TypeError, ValueError):
        return None
