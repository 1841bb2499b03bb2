"""Keep what the layers of a model saw, and make columns of curvature of their gradients.

Plumbing only: the layers' rules say what to do with inputs and gradients, ``kfac`` does the
arithmetic. Other engines than autograd keep calls in their own way and have a
:meth:`Trace.gradients` of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from laplace_invariance.curvature import kfac
from laplace_invariance.curvature.rules import AnyBlock, ElementwiseBlock, Map, MatrixBlock
from laplace_invariance.curvature.trace.parts import Answers
from laplace_invariance.curvature.trace.uses import Uses
from laplace_invariance.invariant import LEVELS, Levels

__all__ = ["Call", "Gradients", "Layers", "PerParameter", "Trace", "backpropagate"]

# A tensor for each parameter, None for parameters whose layer was not called.
PerParameter = list[Tensor | None]

# Gradients in the outputs of all calls, and, by index, in parameters without a rule.
Gradients = tuple[list[Tensor], dict[int, Tensor]]


def backpropagate(
    outputs: Tensor, tensors: Sequence[Tensor], column: Tensor, create_graph: bool = False
) -> tuple[Tensor, ...]:
    """Return the gradients of ``sum(outputs * column)``, zero where it does not depend on a tensor.

    Args:
        outputs: Outputs of a model or of a part of it.
        tensors: Tensors of its graph.
        column: Direction to backpropagate, of the shape of the outputs.
        create_graph: Whether the gradients will be differentiated.
    """
    if not tensors:
        return ()
    gradients = torch.autograd.grad(
        outputs,
        tensors,
        column.contiguous(),
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    # embeddings may have sparse ones
    return tuple(g.to_dense() if g.is_sparse else g for g in gradients)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer: what went in and out, and which samples its rows are.

    Attributes:
        blocks: Index of each of its parameters, and the parameter's block.
        x: Input ``[rows, ...]``.
        output: Output ``[rows, ...]``.
        levels: Batch size and sample weights of each averaging model around it.
        versions: How often input and output had been modified in place by then.
    """

    blocks: list[tuple[int, AnyBlock]]
    x: Tensor
    output: Tensor
    levels: Levels
    versions: tuple[int, int]

    def modified(self) -> bool:
        """Return whether a later operation overwrote input or output in place."""
        return (self.x._version, self.output._version) != self.versions


@dataclass
class Layers:
    """The layers of a model whose calls are captured.

    Attributes:
        blocks: Indices and blocks of each layer's parameters.
        used: Parameters that the model uses outside of layers, by index.
        constants: Buffers of the model.
        copies: Whether to keep copies of inputs and outputs, for models that overwrite them.
        keywords: Type of a layer that was called with its input as a keyword argument, if any.
        answers: What was found out about the parameters that are used outside of layers.
    """

    blocks: dict[nn.Module, list[tuple[int, AnyBlock]]]
    used: dict[int, nn.Parameter] = field(default_factory=dict)
    constants: list[Tensor] = field(default_factory=list)
    copies: bool = False
    keywords: str | None = None
    answers: Answers = field(default_factory=Answers)

    def call(self, blocks: list[tuple[int, AnyBlock]], x: Tensor, output: Tensor) -> Call:
        """Return the record of a call that is being made."""
        if self.copies:
            x = x.clone()
        return Call(blocks, x, output, LEVELS.get(), (x._version, output._version))

    @contextmanager
    def capture(self) -> Iterator[list[Call]]:
        """Collect the calls of a forward pass."""
        calls: list[Call] = []

        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
        ) -> Tensor | None:
            if args:
                x = args[0]
            else:
                x = next(iter(kwargs.values()))
                self.keywords = type(module).__name__
            if isinstance(module, _BatchNorm) and len(output) == 1 and output.requires_grad:
                # torch 2.15 reads a gradient that is laid out otherwise in the wrong order
                output.register_hook(Tensor.contiguous)
            calls.append(self.call(self.blocks[module], x, output))
            # the record keeps the output itself; what overwrites it must get a copy
            return output.clone() if self.copies else None

        def record(x: Tensor, output: Tensor, blocks: list[tuple[int, AnyBlock]]) -> Tensor:
            if not blocks:
                return output
            calls.append(self.call(blocks, x, output))
            return output.clone() if self.copies else output

        handles = [module.register_forward_hook(hook, with_kwargs=True) for module in self.blocks]
        try:
            uses = Uses(self.used, self.constants, record, self.answers) if self.used else None
            with uses or nullcontext():
                yield calls
        finally:
            for handle in handles:
                handle.remove()

    def check(self, calls: Iterable[Call]) -> None:
        """Raise if a captured tensor was modified in place; later passes capture copies."""
        if not self.copies and any(call.modified() for call in calls):
            self.copies = True
            raise RuntimeError(
                "the model overwrote a layer's input or output in place, "
                "which it had not done before"
            )


@dataclass(eq=False)
class Trace:
    """A forward pass of a batch, from which curvature is made column by column.

    Attributes:
        outputs: The model's outputs ``[batch, C]``.
        calls: What :meth:`Layers.capture` collected.
        parameters: All parameters that curvature is wanted for.
        others: Indices of parameters without a rule, whose gradients autograd sums over the
            batch: it passes once for every input.
        differentiate: Whether the curvature will be differentiated.
    """

    outputs: Tensor
    calls: list[Call]
    parameters: Sequence[nn.Parameter]
    others: Sequence[int] = ()
    differentiate: bool = False

    def gradients(self, columns: Sequence[Tensor]) -> Iterator[Gradients]:
        """Yield the gradients of ``sum(outputs * column)`` for each column ``[batch, C]``."""
        tensors = [call.output for call in self.calls]
        others: list[Tensor] = [self.parameters[index] for index in self.others]
        n = len(tensors)
        for column in columns:
            if len(column) == 1 or not others:
                found = backpropagate(self.outputs, tensors + others, column, self.differentiate)
                gradients, rest = found[:n], [g.reshape(1, -1) for g in found[n:]]
            else:
                gradients = backpropagate(self.outputs, tensors, column, self.differentiate)
                rest = self._row_by_row(others, column)
            yield list(gradients), dict(zip(self.others, rest, strict=True))

    def _row_by_row(self, tensors: Sequence[Tensor], column: Tensor) -> list[Tensor]:
        """Return the gradients ``[batch, numel]`` of each input in tensors that all share."""
        rows = []
        for output, direction in zip(self.outputs, column, strict=True):
            found = backpropagate(output, tensors, direction, self.differentiate)
            rows.append([gradient.flatten() for gradient in found])
        return [torch.stack(own) for own in zip(*rows, strict=True)]

    def jacobian_columns(self, columns: Sequence[Tensor]) -> PerParameter:
        """Return the exact gradients of ``sum_c outputs_c column_c`` of each input.

        Args:
            columns: Directions ``[batch, C]`` to backpropagate.

        Returns:
            Gradients ``[batch, column, numel]`` with respect to each parameter.
        """
        maps = self._gradient_maps(scales_only=False)
        found = []
        for gradients, exact in self.gradients(columns):
            for position, index, gradient_map in maps:
                _add(exact, index, gradient_map(gradients[position]))
            found.append(exact)
        return self._stacked(found)

    def averaged_inputs(self, counts: bool = False) -> PerParameter:
        """Return what each matrix is applied to, averaged: ``[batch, shared, (slots,) d_in]``.

        Args:
            counts: Whether to return counts ``[d_in]`` of one-hot inputs, all of one sample each.
        """
        inputs: dict[int, list[Tensor]] = {}
        result: PerParameter = [None] * len(self.parameters)
        for call in self.calls:
            for index, block in call.blocks:
                if isinstance(block, ElementwiseBlock):
                    continue
                if counts and block.counts is not None:
                    total = kfac.fold_counts(block.counts(call.x), call.levels)
                    before = result[index]
                    result[index] = total if before is None else before + total
                    continue
                if block.linear:  # to unfold the mean is cheaper than to average unfolded samples
                    a = block.a(kfac.fold_inputs(call.x, call.levels))
                else:
                    a = kfac.fold_inputs(block.a(call.x), call.levels)
                inner = self._rows_per_input(a)
                a = rearrange(a, "(batch inner) r ... -> batch (inner r) ...", inner=inner)
                inputs.setdefault(index, []).append(a)
        for index, tensors in inputs.items():
            result[index] = _joined(tensors, dim=1)
        return result

    def averaged_gradients(self, columns: Sequence[Tensor]) -> PerParameter:
        """Return gradients in every parameter, the material of Kronecker factors.

        Args:
            columns: Directions ``[batch, C]`` to backpropagate.

        Returns:
            For a matrix, gradients in its outputs, summed over samples,
            ``[batch, column, shared, (slots,) d_out]``; for all other parameters their exact
            gradients ``[batch, column, numel]``.
        """
        scales = self._gradient_maps(scales_only=True)
        folded: list[list[Tensor]] = [[] for _ in self.calls]
        found = []
        for gradients, exact in self.gradients(columns):
            for call, gradient, sums in zip(self.calls, gradients, folded, strict=True):
                sums.append(kfac.fold_gradients(gradient, call.levels))
            for position, index, gradient_map in scales:
                _add(exact, index, gradient_map(gradients[position]))
            found.append(exact)
        result = self._stacked(found)
        for index, (block, parts) in self._at_positions(folded).items():
            joined = _joined(parts, dim=2)
            result[index] = joined if isinstance(block, MatrixBlock) else joined.sum(2)
        return result

    def _gradient_maps(self, scales_only: bool) -> list[tuple[int, int, Map]]:
        """Return position of the call, index of the parameter and gradient map of all blocks.

        Products of a scale with samples cannot be summed over samples before they are formed,
        as those of matrices are (approximately) and those of biases (exactly).
        """
        maps = []
        for position, call in enumerate(self.calls):
            self._rows_per_input(call.output)
            for index, block in call.blocks:
                if not scales_only or _is_scale(block):
                    maps.append((position, index, block.gradient_map(call.x, len(self.outputs))))
        return maps

    def _at_positions(self, folded: list[list[Tensor]]) -> dict[int, tuple[AnyBlock, list[Tensor]]]:
        """Return folded gradients at the positions of each matrix, and summed for each bias.

        For each call and column these are ``[batch * inner, ...]``; they become, by index of the
        parameter and for each of its calls, ``[batch, column, shared, (slots,) d_out]``.
        """
        found: dict[int, tuple[AnyBlock, list[Tensor]]] = {}
        for call, sums in zip(self.calls, folded, strict=True):
            inner = self._rows_per_input(sums[0])
            stacked = torch.stack([g.unflatten(0, (-1, inner)) for g in sums], dim=1)
            for index, block in call.blocks:
                if _is_scale(block):
                    continue
                g = rearrange(
                    block.g(stacked.flatten(0, 2)),
                    "(batch column inner) r ... -> batch column (inner r) ...",
                    column=len(sums),
                    inner=inner,
                )
                if isinstance(block, ElementwiseBlock):
                    g = g.sum(2, keepdim=True)
                found.setdefault(index, (block, []))[1].append(g)
        return found

    def _rows_per_input(self, x: Tensor) -> int:
        """Return how many rows belong to one input: positions may be in the batch axis, too."""
        batch = len(self.outputs)
        if len(x) % batch:
            raise ValueError(
                f"a layer was called with {len(x)} rows for a batch of {batch}; the first axis "
                "must be the batch, or a multiple of it (batch_first=True)"
            )
        return len(x) // batch

    def _stacked(self, found: list[dict[int, Tensor]]) -> PerParameter:
        """Stack the columns of each parameter, ``[batch, numel]`` to ``[batch, column, numel]``."""
        result: PerParameter = [None] * len(self.parameters)
        for index in found[0]:
            result[index] = torch.stack([column[index] for column in found], dim=1)
        return result


def _is_scale(block: AnyBlock) -> bool:
    return isinstance(block, ElementwiseBlock) and block.a is not None


def _add(totals: dict[int, Tensor], index: int, term: Tensor) -> None:
    """Add what another call of a layer contributes to the gradient of its parameter."""
    if index in totals:
        term = totals[index] + term
    totals[index] = term


def _joined(tensors: list[Tensor], dim: int) -> Tensor:
    """Join the positions of several calls: the calls of a layer are further shared positions."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors, dim)
