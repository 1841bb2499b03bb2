"""Run a model, keep what its layers saw, and turn gradients of their outputs into columns of curvature.

Plumbing only: the layers' rules say what to do with inputs and gradients, ``kfac`` does the arithmetic. Other engines than
autograd keep calls in their own way and have a :meth:`Trace.gradients` of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from laplace_invariance.curvature import kfac
from laplace_invariance.curvature.rules import Block
from laplace_invariance.invariant import Levels, current_levels

__all__ = ["Call", "Gradients", "Layers", "Trace"]

Gradients = tuple[list[Tensor], dict[int, Tensor]]


@dataclass
class Call:
    """One call of a layer: what went in and out, and which samples its rows are."""

    module: nn.Module
    blocks: list[tuple[int, Block]]
    x: Tensor
    output: Tensor
    levels: Levels
    versions: tuple[int, int]

    def modified(self) -> bool:
        """Tell whether a later operation overwrote input or output in place."""
        return (self.x._version, self.output._version) != self.versions


@dataclass
class Layers:
    """The layers of a model whose calls are to be captured: module -> [(index of the parameter, block), ...].

    ``copies`` keeps copies of inputs and outputs, for models that overwrite them in place; ``keywords`` names the type of a layer
    that was called with its input as a keyword argument, if there was one.
    """

    blocks: dict[nn.Module, list[tuple[int, Block]]] = field(default_factory=dict)
    copies: bool = False
    keywords: str | None = None

    def call(self, module: nn.Module, x: Tensor, output: Tensor) -> Call:
        """Keep a call that is being made."""
        x = x.clone() if self.copies else x
        return Call(
            module, self.blocks[module], x, output, current_levels(), (x._version, output._version)
        )

    @contextmanager
    def capture(self) -> Iterator[list[Call]]:
        """Collect the calls of a forward pass."""
        calls: list[Call] = []

        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor | None:
            if not args:
                self.keywords = type(module).__name__
            calls.append(
                self.call(module, args[0] if args else next(iter(kwargs.values())), output)
            )
            return output.clone() if self.copies else None

        handles = [module.register_forward_hook(hook, with_kwargs=True) for module in self.blocks]
        try:
            yield calls
        finally:
            for handle in handles:
                handle.remove()

    def check(self, calls: list[Call]) -> None:
        """Complain of calls that are not as they were made; copies are kept from now on."""
        if not self.copies and any(call.modified() for call in calls):
            self.copies = True
            raise RuntimeError(
                "the model overwrote a layer's input or output in place, which it had not done before"
            )


class Trace:
    """A forward pass of a batch: outputs ``[batch, C]`` and the calls, from which curvature is made column by column.

    Args:
        outputs: the model's outputs.
        calls: what :meth:`Layers.capture` collected.
        others: parameters without a rule, differentiated by autograd; the batch must then be a single input.
        create_graph: whether the curvature will be differentiated.
    """

    def __init__(
        self,
        outputs: Tensor,
        calls: list[Call],
        others: Sequence[tuple[int, Tensor]] = (),
        create_graph: bool = False,
    ) -> None:
        self.outputs = outputs
        self.calls = calls
        self.others = others
        self.create_graph = create_graph
        self.batch = len(outputs)

    def gradients(self, columns: Sequence[Tensor]) -> Iterator[Gradients]:
        """Yield, for each column, the gradients of ``sum(outputs * column)`` in the calls' outputs and in the others."""
        tensors = [call.output for call in self.calls] + [parameter for _, parameter in self.others]
        for column in columns:
            gradients = torch.autograd.grad(
                self.outputs,
                tensors,
                column.contiguous(),
                retain_graph=True,
                create_graph=self.create_graph,
                allow_unused=True,
                materialize_grads=True,
            )
            yield self._sorted(gradients)

    def _sorted(self, gradients: Sequence[Tensor]) -> Gradients:
        """Split gradients of the calls' outputs from those of the others, by index and ``[1, numel]``."""
        n = len(self.calls)
        others = {
            index: g.reshape(1, -1)
            for (index, _), g in zip(self.others, gradients[n:], strict=True)
        }
        return list(gradients[:n]), others

    def _rows_per_input(self, x: Tensor) -> int:
        """Return how many rows of ``x`` belong to one input: more than one where positions were moved into the batch axis."""
        if len(x) % self.batch:
            raise ValueError(
                f"a layer was called with {len(x)} rows for a batch of {self.batch}; the first axis must be the batch, or a "
                "multiple of it (batch_first=True)"
            )
        return len(x) // self.batch

    def _per_input(self, x: Tensor) -> Tensor:
        """Join such positions with the others: ``[batch * inner, R, ...] -> [batch, inner * R, ...]``."""
        return x.reshape(self.batch, self._rows_per_input(x) * x.shape[1], *x.shape[2:])

    def averaged_inputs(self) -> dict[int, Tensor]:
        """Return, for every matrix, what it is applied to, averaged over samples: ``[batch, R, (slots,) d_in]``."""
        inputs: dict[int, list[Tensor]] = {}
        for call in self.calls:
            folded = None
            for index, block in call.blocks:
                if block.elementwise:
                    continue
                if block.linear:
                    folded = kfac.fold_inputs(call.x, call.levels) if folded is None else folded
                    a = block.a(folded)
                else:
                    a = kfac.fold_inputs(block.a(call.x), call.levels)
                inputs.setdefault(index, []).append(self._per_input(a))
        return {index: _cat(tensors, dim=1) for index, tensors in inputs.items()}

    def averaged_gradients(self, columns: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return gradients of every parameter, the material of Kronecker factors.

        For a matrix, those of its outputs, summed over samples, ``[batch, column, R, (slots,) d_out]``; for all other
        parameters their exact gradients ``[batch, column, numel]``.
        """
        folded: list[list[Tensor]] = [[] for _ in self.calls]
        exact: dict[int, list[Tensor]] = {}
        rows = [
            [(i, b, b.a(call.x)) for i, b in call.blocks if b.elementwise and b.a is not None]
            for call in self.calls
        ]
        for gradients, products in self.gradients(columns):
            for call, call_rows, gradient, sums in zip(
                self.calls, rows, gradients, folded, strict=True
            ):
                sums.append(kfac.fold_gradients(gradient, call.levels))
                for (
                    index,
                    block,
                    a,
                ) in call_rows:  # elementwise products are exact only sample by sample
                    product = kfac.jacobian(a, block.g(gradient), self.batch, elementwise=True)
                    products[index] = products[index] + product if index in products else product
            for index, product in products.items():
                exact.setdefault(index, []).append(product)
        result = {index: torch.stack(tensors, dim=1) for index, tensors in exact.items()}
        positions: dict[int, list[Tensor]] = {}
        for call, sums in zip(self.calls, folded, strict=True):
            inner = self._rows_per_input(sums[0])
            stacked = torch.stack([g.unflatten(0, (self.batch, inner)) for g in sums], dim=1)
            for index, block in call.blocks:
                if block.elementwise and block.a is not None:
                    continue
                g = block.g(stacked.flatten(0, 2))
                g = g.reshape(self.batch, len(columns), inner * g.shape[1], *g.shape[2:])
                positions.setdefault(index, []).append(
                    g.sum(2, keepdim=True) if block.elementwise else g
                )
        for index, tensors in positions.items():
            joined = _cat(tensors, dim=2)
            result[index] = joined.sum(2) if self._is_elementwise(index) else joined
        return result

    def _is_elementwise(self, index: int) -> bool:
        return next(
            block.elementwise for call in self.calls for i, block in call.blocks if i == index
        )

    def jacobian_columns(self, columns: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return, by parameter, the exact gradients ``[batch, column, numel]`` of ``sum_c outputs_c column_c`` per input."""
        inputs = [
            [None if block.a is None else block.a(call.x) for _, block in call.blocks]
            for call in self.calls
        ]
        gathered: dict[int, list[Tensor]] = {}
        for gradients, exact in self.gradients(columns):
            for call, call_inputs, gradient in zip(self.calls, inputs, gradients, strict=True):
                for (index, block), a in zip(call.blocks, call_inputs, strict=True):
                    g = block.g(gradient)
                    self._rows_per_input(g)
                    product = kfac.jacobian(a, g, self.batch, **block.kinds)
                    exact[index] = exact[index] + product if index in exact else product
            for index, tensor in exact.items():
                gathered.setdefault(index, []).append(tensor)
        return {index: torch.stack(tensors, dim=1) for index, tensors in gathered.items()}


def _cat(tensors: list[Tensor], dim: int) -> Tensor:
    """Join the positions of several calls: the calls of a layer are further shared positions."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
