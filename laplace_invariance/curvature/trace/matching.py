"""Which layer explains which parameter, verified on the first inputs that a backend sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from laplace_invariance.curvature.rules import Block, Coverage, blocks_of, coverage
from laplace_invariance.curvature.trace.calls import Layers, Trace
from laplace_invariance.draws import fixed_draws

__all__ = ["Match", "match"]


@dataclass
class Match:
    """Every parameter that requires grad, exactly once: with a block, or with a reason why not.

    Attributes:
        parameters: in the order of ``model.parameters()``.
        layers: the layers to capture.
        blocks: by index of the parameter.
        unsupported: by index of the parameter.
        twins: biases whose gradients are those of the weight matrix of the same layer, summed over its positions.
        n_inputs: how many inputs this was verified on.
        n_outputs: of the model.
        size: elements of all captured layers' outputs, per input.
    """

    parameters: list[nn.Parameter]
    layers: Layers
    blocks: dict[int, Block]
    unsupported: dict[int, Coverage]
    twins: dict[int, int] = field(default_factory=dict)
    n_inputs: int = 0
    n_outputs: int = 0
    size: int = 0

    @property
    def others(self) -> list[tuple[int, nn.Parameter]]:
        """Parameters to be differentiated by autograd, one input at a time."""
        return [(index, self.parameters[index]) for index in sorted(self.unsupported)]

    def complaint(self) -> str:
        """Say which parameters lack Kronecker curvature, why, and what to do."""
        lines = [
            f"  {entry.name} {list(entry.parameter.shape)}: {entry.reason}"
            for _, entry in sorted(self.unsupported.items())
        ]
        return "\n".join(
            [
                "no Kronecker curvature for:",
                *lines,
                "Ways out: backend_kwargs={'on_unsupported': 'diag'} uses their exact diagonal instead (one input at a time, "
                "hence slow); register_rule teaches the backend a layer in a few lines; requires_grad_(False) leaves a "
                "parameter out of the posterior; hessian_structure='diag' or 'full' needs no rule. "
                "laplace_invariance.curvature.check_model(model) shows the whole table.",
            ]
        )


def match(
    root: nn.Module,
    parameters: Sequence[nn.Parameter],
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
) -> Match:
    """Match ``parameters`` of ``root`` with rules, and verify that these explain the gradients of ``forward(x)``."""
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    found = {index_of[id(entry.parameter)]: entry for entry in coverage(root)}
    result = Match(
        list(parameters),
        Layers(),
        {},
        {i: entry for i, entry in found.items() if not entry.supported},
    )
    for index, entry in found.items():
        if not entry.supported:
            continue
        for _, module in entry.modules:
            for block in blocks_of(module):
                if getattr(module, block.parameter) is entry.parameter:
                    result.layers.blocks.setdefault(module, []).append((index, block))
                    result.blocks[index] = block
    for index in _unexplained(result, forward, x):
        entry = found[index]
        where = " and ".join(path or "the model" for path, _ in entry.modules)
        result.unsupported[index] = replace(
            entry,
            reason=f"calls of {where} do not explain its gradient: it is used outside of them as well, or the first axis of "
            "what they see is not the batch",
        )
        del result.blocks[index]
    for module, blocks in list(result.layers.blocks.items()):
        kept = [(index, block) for index, block in blocks if index in result.blocks]
        result.layers.blocks[module] = kept
        if not kept:
            del result.layers.blocks[module]
        own = [(index, block) for index, block in kept if len(found[index].modules) == 1]
        matrices = {
            block.g: index for index, block in own if not (block.elementwise or block.transposed)
        }
        result.twins |= {
            index: matrices[block.g]
            for index, block in own
            if block.a is None and block.g in matrices
        }
    return result


def _unexplained(result: Match, forward: Callable[[Tensor], Tensor], x: Tensor) -> list[int]:
    """Return the parameters whose gradient, input by input, differs from what their blocks say."""
    with torch.enable_grad(), fixed_draws():
        with result.layers.capture() as calls:
            outputs = forward(x)
        if any(call.modified() for call in calls):
            result.layers.copies = True
            with result.layers.capture() as calls:
                outputs = forward(x)
        if outputs.ndim != 2:
            raise ValueError(
                f"the model must return [batch, outputs], got shape {list(outputs.shape)}"
            )
        result.n_inputs = len(outputs)
        result.n_outputs = outputs.shape[-1]
        result.size = sum(call.output.numel() for call in calls) // len(outputs) + 1
        direction = torch.sin(torch.arange(1, outputs.shape[-1] + 1).to(outputs))
        indices = sorted(result.blocks)
        if not indices:
            return []
        tensors = [result.parameters[index] for index in indices]
        truth = [
            torch.autograd.grad(
                row,
                tensors,
                direction,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for row in outputs
        ]
        try:
            explained = Trace(outputs, calls).jacobian_columns([direction.expand_as(outputs)])
        except (
            ValueError,
            RuntimeError,
        ):  # shapes that do not fit: find the layers that are to blame
            explained = _one_by_one(outputs, calls, direction)
    largest = max(
        (g.abs().max() for gradients in truth for g in gradients), default=torch.zeros(())
    )
    tolerance = 10 * torch.finfo(outputs.dtype).eps ** 0.5
    wrong = []
    for position, index in enumerate(indices):
        expected = torch.stack([gradients[position].flatten() for gradients in truth])
        actual = explained[index].squeeze(1) if index in explained else torch.zeros_like(expected)
        if actual.shape != expected.shape or (actual - expected).abs().max() > tolerance * (
            expected.abs().max() + 1e-3 * largest
        ):
            wrong.append(index)
    return wrong


def _one_by_one(outputs: Tensor, calls: list, direction: Tensor) -> dict[int, Tensor]:
    explained: dict[int, Tensor] = {}
    broken: set[int] = set()
    for call in calls:
        try:
            part = Trace(outputs, [call]).jacobian_columns([direction.expand_as(outputs)])
        except (ValueError, RuntimeError):
            broken.update(index for index, _ in call.blocks)
            continue
        for index, value in part.items():
            explained[index] = explained[index] + value if index in explained else value
    return {index: value for index, value in explained.items() if index not in broken}
