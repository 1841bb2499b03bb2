"""ASDL as the engine: its hooks bring what a layer sees, and one operation for all layers hands it to the rules.

ASDL detaches what it keeps, so it computes values; gradients to hyperparameters are those of the native recomputation. Its
table of layers is closed, and passes over layers whose parameters are not called ``weight`` or ``bias``. Two functions of it
are therefore replaced while hooks are being put in place, and put back before the model runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch
from asdl import core
from asdl.operations import OP_SAVE_INPUTS, OP_SAVE_OUTGRADS, Operation
from torch import Tensor, nn

from laplace_invariance.curvature.ggn import AugmentedEF, AugmentedGGN
from laplace_invariance.curvature.trace.calls import Call, Gradients, Layers, Trace

__all__ = ["AsdlAugmentedEF", "AsdlAugmentedGGN"]

_LOCK = Lock()  # what is replaced is one for all threads


class _RuleOperation(Operation):
    """What ASDL does at any layer that has a rule: keep its calls, and the gradients of their outputs."""

    def __init__(
        self, module: nn.Module, op_names: list[str], model_for_kernel: nn.Module | None = None
    ) -> None:
        super().__init__(
            nn.Identity(), op_names
        )  # of the layer itself it would demand a parameter called ``weight``
        self._module = module
        self.calls: list[Call] = []
        self.gradients: list[Tensor] = []
        self.keep: Callable[[nn.Module, Tensor, Tensor], Call] | None = (
            None  # None after the forward pass
        )

    def forward_post_process(self, in_data: Tensor, out_data: Tensor) -> None:
        if self.keep is not None:
            self.calls.append(self.keep(self._module, in_data, out_data))

    def backward_pre_process(self, out_grads: Tensor, vector: Tensor | None = None) -> None:
        self.gradients.append(out_grads)

    def by_call(self) -> dict[int, Tensor]:
        """Return the gradients by ``id`` of the call; autograd walks back through calls in reverse."""
        if not self.gradients:
            return {}
        if len(self.gradients) != len(self.calls):
            raise NotImplementedError(
                f"ASDL cannot tell which {len(self.gradients)} of {len(self.calls)} calls of {type(self._module).__name__} the "
                "model's output depends on; AugmentedGGN and AugmentedEF can"
            )
        return {id(call): g for call, g in zip(self.calls, reversed(self.gradients), strict=True)}


@contextmanager
def _for_layers_with_rules(layers: Layers) -> Iterator[None]:
    """Let ``asdl.core.extend`` find exactly these layers, and our operation for all of them."""
    with _LOCK:
        theirs = core.module_wise_assignments, core.get_op_class
        core.module_wise_assignments = lambda model, *names, **_: [
            (module, list(names)) for module in layers.blocks
        ]
        core.get_op_class = lambda module: _RuleOperation
        try:
            yield
        finally:
            core.module_wise_assignments, core.get_op_class = theirs


@contextmanager
def _operations(model: nn.Module, layers: Layers) -> Iterator[list[_RuleOperation]]:
    """Put ASDL's hooks in place; afterwards the layers are free for either kind of backward hooks, as before."""
    kinds = {module: module._is_full_backward_hook for module in layers.blocks}
    if any(kind and module._backward_hooks for module, kind in kinds.items()):
        raise NotImplementedError(
            "layers with full backward hooks cannot have those of ASDL as well; AugmentedGGN and AugmentedEF need none"
        )
    try:
        for module in kinds:
            module._is_full_backward_hook = False
        with ExitStack() as stack:
            with _for_layers_with_rules(layers):
                context = stack.enter_context(core.extend(model, OP_SAVE_INPUTS, OP_SAVE_OUTGRADS))
            yield [context.get_operation(module) for module in layers.blocks]
    finally:
        for module, kind in kinds.items():
            module._is_full_backward_hook = kind


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
        # Hooks run where autograd passes, so it is asked for a parameter of every layer, the smallest, or for all.
        self._own = [
            sorted((parameters[i] for i, _ in call.blocks), key=Tensor.numel) for call in calls
        ]
        self._asked = [own[0] for own in self._own]

    def gradients(self, columns: Sequence[Tensor]) -> Iterator[Gradients]:
        for column in columns:
            others = self._pass_back(column)
            if any(operation.calls and not operation.gradients for operation in self._operations):
                self._asked = [parameter for own in self._own for parameter in own]
                others = self._pass_back(column)
            found: dict[int, Tensor] = {}
            for operation in self._operations:
                found |= operation.by_call()
            gradients = [
                found[id(call)] if id(call) in found else torch.zeros_like(call.output)
                for call in self.calls
            ]
            yield self._sorted([*gradients, *others])

    def _pass_back(self, column: Tensor) -> tuple[Tensor, ...]:
        """Let autograd pass, and return the gradients of parameters without a rule."""
        for operation in self._operations:
            operation.gradients = []
        tensors = [*self._asked, *(parameter for _, parameter in self.others)]
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        try:
            gradients = torch.autograd.grad(self.outputs, tensors, column.contiguous(), **options)
        except AttributeError as error:  # of ASDL's hook
            raise NotImplementedError(
                "ASDL found no gradient at the output of a layer, one of several that an operation returned, or passed through "
                "a function without gradient; AugmentedGGN and AugmentedEF need no hooks there"
            ) from error
        return gradients[len(self._asked) :]


class _Asdl:
    @contextmanager
    def _by_engine(self, forward: Callable[[Any], Tensor], x: Any) -> Iterator[Trace]:
        layers, calls = self._match.layers, []
        if layers.keywords:
            raise NotImplementedError(
                f"ASDL does not see what {layers.keywords} receives by keyword; AugmentedGGN and AugmentedEF do"
            )

        def keep(module: nn.Module, x: Tensor, output: Tensor) -> Call:
            calls.append(layers.call(module, x, output))
            return calls[-1]

        with _operations(self.model, layers) as operations:
            for operation in operations:
                operation.keep = keep
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Using a non-full backward hook")
                outputs = forward(x)
            for (
                operation
            ) in operations:  # layers may run once more in the backward pass, from checkpoints
                operation.keep = None
            layers.check(calls)
            yield _AsdlTrace(outputs, calls, self._match.others, self.params, operations)


class AsdlAugmentedGGN(_Asdl, AugmentedGGN):
    """:class:`AugmentedGGN` with ASDL's hooks as the engine."""


class AsdlAugmentedEF(_Asdl, AugmentedEF):
    """:class:`AugmentedEF` with ASDL's hooks as the engine."""
