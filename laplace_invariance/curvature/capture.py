"""Run a model, keep what its layers saw, and turn gradients of their outputs into columns of curvature.

Plumbing only: the layers' rules say what to do with inputs and gradients, ``kfac`` does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from laplace_invariance.curvature import kfac
from laplace_invariance.curvature.rules import Block
from laplace_invariance.invariant import current_sample_weights

__all__ = ["Call", "Layers", "Trace"]


@dataclass
class Call:
    """One call of a layer: what went in and out, and the weights of the samples that its rows are."""

    blocks: list[tuple[int, Block]]
    x: Tensor
    output: Tensor
    weights: Tensor | None
    versions: tuple[int, int]

    def modified(self) -> bool:
        """Tell whether a later operation overwrote input or output in place."""
        return (self.x._version, self.output._version) != self.versions


@dataclass
class Layers:
    """The layers of a model whose calls are to be captured: module -> [(index of the parameter, block), ...].

    ``copies`` keeps copies of inputs and outputs, for models that overwrite them in place.
    """

    blocks: dict[nn.Module, list[tuple[int, Block]]] = field(default_factory=dict)
    copies: bool = False

    @contextmanager
    def capture(self) -> Iterator[list[Call]]:
        """Collect the calls of a forward pass."""
        calls: list[Call] = []

        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor | None:
            x = args[0] if args else next(iter(kwargs.values()))
            if self.copies:
                x = x.clone()
            calls.append(Call(self.blocks[module], x, output, current_sample_weights(), (x._version, output._version)))
            return output.clone() if self.copies else None

        handles = [module.register_forward_hook(hook, with_kwargs=True) for module in self.blocks]
        try:
            yield calls
        finally:
            for handle in handles:
                handle.remove()


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

    def _backpropagate(self, column: Tensor) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Return the gradients of ``sum(outputs * column)``: of the calls' outputs, and ``[1, numel]`` of the others."""
        tensors = [call.output for call in self.calls] + [parameter for _, parameter in self.others]
        gradients = torch.autograd.grad(
            self.outputs,
            tensors,
            column.contiguous(),
            retain_graph=True,
            create_graph=self.create_graph,
            allow_unused=True,
            materialize_grads=True,
        )
        n = len(self.calls)
        others = {index: g.reshape(1, -1) for (index, _), g in zip(self.others, gradients[n:], strict=True)}
        return list(gradients[:n]), others

    def _per_input(self, x: Tensor) -> Tensor:
        """Merge positions that the model moved into the batch axis: ``[batch * inner, R, ...] -> [batch, inner * R, ...]``."""
        if len(x) % self.batch:
            raise ValueError(
                f"a layer was called with {len(x)} rows for a batch of {self.batch}; the first axis must be the batch, or a "
                "multiple of it (batch_first=True)"
            )
        return x.reshape(self.batch, -1, *x.shape[2:])

    def factors_columns(self, columns: Sequence[Tensor]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return averaged inputs ``a`` and gradients ``g`` of every parameter, the material of Kronecker factors.

        Returns:
            a: ``[batch, R, (slots,) d_in]`` by parameter, for matrix blocks only.
            g: ``[batch, column, R, (slots,) d_out]`` for matrix blocks, else exact gradients ``[batch, column, numel]``.
        """
        inputs: dict[int, list[Tensor]] = {}
        rows: dict[tuple[int, int], Tensor] = {}
        for c, call in enumerate(self.calls):
            folded = None
            for index, block in call.blocks:
                if block.elementwise:
                    if block.a is not None:
                        rows[c, index] = block.a(call.x)
                elif block.linear:
                    folded = kfac.fold_inputs(call.x, self.batch, call.weights) if folded is None else folded
                    inputs.setdefault(index, []).append(self._per_input(block.a(folded)))
                else:
                    averaged = kfac.fold_inputs(block.a(call.x), self.batch, call.weights)
                    inputs.setdefault(index, []).append(self._per_input(averaged))
        gathered: dict[int, list[Tensor]] = {}
        for column in columns:
            gradients, exact = self._backpropagate(column)
            parts: dict[int, list[Tensor]] = {}
            for c, (call, gradient) in enumerate(zip(self.calls, gradients, strict=True)):
                folded = kfac.fold_gradients(gradient, self.batch, call.weights)
                for index, block in call.blocks:
                    if not block.elementwise:
                        parts.setdefault(index, []).append(self._per_input(block.g(folded)))
                    elif block.a is None:
                        _accumulate(exact, index, self._per_input(block.g(folded)).sum(1))
                    else:
                        product = kfac.jacobian(rows[c, index], block.g(gradient), self.batch, elementwise=True)
                        _accumulate(exact, index, product)
            exact.update({index: _cat(tensors) for index, tensors in parts.items()})
            for index, tensor in exact.items():
                gathered.setdefault(index, []).append(tensor)
        return (
            {index: _cat(tensors) for index, tensors in inputs.items()},
            {index: torch.stack(tensors, dim=1) for index, tensors in gathered.items()},
        )

    def jacobian_columns(self, columns: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return, by parameter, the exact gradients ``[batch, column, numel]`` of ``sum_c outputs_c column_c`` per input."""
        inputs = [[None if block.a is None else block.a(call.x) for _, block in call.blocks] for call in self.calls]
        gathered: dict[int, list[Tensor]] = {}
        for column in columns:
            gradients, exact = self._backpropagate(column)
            for call, call_inputs, gradient in zip(self.calls, inputs, gradients, strict=True):
                for (index, block), a in zip(call.blocks, call_inputs, strict=True):
                    g = block.g(gradient)
                    if len(g) % self.batch:
                        self._per_input(g)  # raises
                    kinds = {"elementwise": block.elementwise, "transposed": block.transposed}
                    _accumulate(exact, index, kfac.jacobian(a, g, self.batch, **kinds).flatten(1))
            for index, tensor in exact.items():
                gathered.setdefault(index, []).append(tensor)
        return {index: torch.stack(tensors, dim=1) for index, tensors in gathered.items()}


def _accumulate(totals: dict[int, Tensor], index: int, value: Tensor) -> None:
    totals[index] = totals[index] + value if index in totals else value


def _cat(tensors: list[Tensor]) -> Tensor:
    """Join the positions of several calls: the calls of a layer are further shared positions."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)

