"""ASDL as the engine: its hooks bring what a layer sees, and one operation for all layers hands it to the rules.

ASDL detaches what it keeps, so it computes values; gradients to hyperparameters are those of the native recomputation. Its
table of layers is closed, and passes over layers whose parameters are not called ``weight`` or ``bias``. Two functions of it
are therefore replaced while hooks are being put in place, and put back before the model runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from asdl import core
from asdl.operations import OP_SAVE_INPUTS, OP_SAVE_OUTGRADS, Operation
from torch import Tensor, nn

from laplace_invariance.curvature.capture import Call, Gradients, Layers, Trace
from laplace_invariance.curvature.native import AugmentedEF, AugmentedGGN

__all__ = ["AsdlAugmentedEF", "AsdlAugmentedGGN"]


class _RuleOperation(Operation):
    """What ASDL does at any layer that has a rule: keep its calls, and the gradients of their outputs."""

    def __init__(self, module: nn.Module, op_names: list[str], model_for_kernel: nn.Module | None = None) -> None:
        super().__init__(nn.Identity(), op_names)  # of the layer itself it would demand a parameter called ``weight``
        self._module = module

    def follow(self, layers: Layers, calls: list[Call]) -> None:
        """Say where calls go, and how they are kept."""
        self._layers, self._calls = layers, calls
        self._own: list[Call] = []
        self.rewind()

    def rewind(self) -> None:
        """Forget the gradients of the last backward pass."""
        self.gradients: list[Tensor] = []

    def forward_post_process(self, in_data: Tensor, out_data: Tensor) -> None:
        self._own.append(self._layers.call(self._module, in_data, out_data))
        self._calls.append(self._own[-1])

    def backward_pre_process(self, out_grads: Tensor, vector: Tensor | None = None) -> None:
        self.gradients.append(out_grads)

    def by_call(self) -> dict[int, Tensor]:
        """Return the gradients by ``id`` of the call; autograd walks back through calls in reverse."""
        if self.gradients and len(self.gradients) != len(self._own):
            raise NotImplementedError(
                f"ASDL cannot tell which {len(self.gradients)} of {len(self._own)} calls of {type(self._module).__name__} the "
                "model's output depends on; AugmentedGGN and AugmentedEF can"
            )
        return {id(call): g for call, g in zip(self._own, reversed(self.gradients), strict=False)}


@contextmanager
def _for_layers_with_rules(layers: Layers) -> Iterator[None]:
    """Let ``asdl.core.extend`` find exactly these layers, and our operation for all of them."""
    theirs = core.module_wise_assignments, core.get_op_class
    core.module_wise_assignments = lambda model, *names, **_: [(module, list(names)) for module in layers.blocks]
    core.get_op_class = lambda module: _RuleOperation
    try:
        yield
    finally:
        core.module_wise_assignments, core.get_op_class = theirs


@contextmanager
def _operations(model: nn.Module, layers: Layers, calls: list[Call]) -> Iterator[list[_RuleOperation]]:
    """Put ASDL's hooks in place."""
    with ExitStack() as stack:
        with _for_layers_with_rules(layers):
            context = stack.enter_context(core.extend(model, OP_SAVE_INPUTS, OP_SAVE_OUTGRADS))
        operations = [context.get_operation(module) for module in layers.blocks]
        for operation in operations:
            operation.follow(layers, calls)
        yield operations


class _AsdlTrace(Trace):
    def __init__(
        self,
        outputs: Tensor,
        calls: list[Call],
        others: Sequence[tuple[int, Tensor]],
        parameters: Sequence[Tensor],
        operations: Sequence[_RuleOperation],
    ) -> None:
        super().__init__(outputs, calls, others)
        self._operations = operations
        # Hooks run where autograd passes, so it is asked for the smallest parameter of every layer.
        self._smallest = [min((parameters[i] for i, _ in call.blocks), key=Tensor.numel) for call in calls]

    def gradients(self, columns: Sequence[Tensor]) -> Iterator[Gradients]:
        tensors = [*self._smallest, *(parameter for _, parameter in self.others)]
        for column in columns:
            for operation in self._operations:
                operation.rewind()
            others = torch.autograd.grad(
                self.outputs, tensors, column.contiguous(), retain_graph=True, allow_unused=True, materialize_grads=True
            )[len(self.calls) :]
            found: dict[int, Tensor] = {}
            for operation in self._operations:
                found |= operation.by_call()
            gradients = [found[id(call)] if id(call) in found else torch.zeros_like(call.output) for call in self.calls]
            yield self._sorted([*gradients, *others])


class _Asdl:
    @contextmanager
    def _by_engine(self, forward: Callable[[Any], Tensor], x: Any) -> Iterator[Trace]:
        layers, calls = self._match.layers, []
        with _operations(self.model, layers, calls) as operations:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Using a non-full backward hook")
                outputs = forward(x)
            layers.check(calls)
            yield _AsdlTrace(outputs, calls, self._match.others, self.params, operations)


class AsdlAugmentedGGN(_Asdl, AugmentedGGN):
    """:class:`AugmentedGGN` with ASDL's hooks as the engine."""


class AsdlAugmentedEF(_Asdl, AugmentedEF):
    """:class:`AugmentedEF` with ASDL's hooks as the engine."""
