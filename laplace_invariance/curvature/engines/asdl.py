"""ASDL as the engine: its hooks bring what a layer sees, and one operation hands it to the rules.

ASDL detaches what it keeps, so it computes values; gradients to hyperparameters are those of
autograd. Its table of layers is closed, and leaves out layers whose parameters are not called
``weight`` or ``bias``. Two functions of it are therefore replaced while hooks are being put in
place, and put back before the model runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from asdl import core
from asdl.operations import OP_SAVE_INPUTS, OP_SAVE_OUTGRADS, Operation
from torch import Tensor, nn

from laplace_invariance.curvature.ggn import AugmentedEF, AugmentedGGN
from laplace_invariance.curvature.trace.calls import Call, Gradients, Layers, Trace, backpropagate
from laplace_invariance.curvature.trace.matching import Match

__all__ = ["AsdlAugmentedEF", "AsdlAugmentedGGN"]

_LOCK = Lock()  # what is replaced is shared by all threads


class _RuleOperation(Operation):
    """What ASDL does at any layer that has a rule: keep its calls, and their gradients."""

    def __init__(
        self, module: nn.Module, op_names: list[str], model_for_kernel: nn.Module | None = None
    ) -> None:
        # of the layer itself ASDL would demand a parameter called ``weight``
        super().__init__(nn.Identity(), op_names)
        self._module = module
        self.calls: list[Call] = []
        self.gradients: list[Tensor] = []
        self.keep: Callable[[nn.Module, Tensor, Tensor], Call] | None = None

    def forward_post_process(self, in_data: Tensor, out_data: Tensor) -> None:
        """Keep a call, in the forward pass."""
        if self.keep is not None:
            self.calls.append(self.keep(self._module, in_data, out_data))

    def backward_pre_process(self, out_grads: Tensor, vector: Tensor | None = None) -> None:
        """Keep the gradient of a call's output."""
        self.gradients.append(out_grads)

    @property
    def kind(self) -> str:
        """Name of the layer's type."""
        return type(self._module).__name__

    def is_silent(self) -> bool:
        """Return whether the layer was called, but its hook did not run in the backward pass."""
        return bool(self.calls) and not self.gradients

    def indices(self) -> set[int]:
        """Return the indices of the layer's parameters, if it was called."""
        return {index for call in self.calls for index, _ in call.blocks}

    def by_call(self) -> dict[int, Tensor]:
        """Return the gradients by ``id`` of the call; autograd visits calls in reverse."""
        if not self.gradients:
            return {}
        n_gradients, n_calls = len(self.gradients), len(self.calls)
        if n_gradients != n_calls:
            raise NotImplementedError(
                f"ASDL cannot tell which {n_gradients} of {n_calls} calls of "
                f"{self.kind} the model's output depends on; AugmentedGGN and "
                "AugmentedEF can"
            )
        pairs = zip(self.calls, reversed(self.gradients), strict=True)
        return {id(call): gradient for call, gradient in pairs}


@contextmanager
def _for_layers_with_rules(layers: Layers) -> Iterator[None]:
    """Let ``asdl.core.extend`` find exactly these layers, and our operation for all of them."""

    def assignments(model: nn.Module, *names: str, **_: Any) -> list[tuple[nn.Module, list[str]]]:
        return [(module, list(names)) for module in layers.blocks]

    with _LOCK:
        theirs = core.module_wise_assignments, core.get_op_class
        core.module_wise_assignments = assignments
        core.get_op_class = lambda module: _RuleOperation
        try:
            yield
        finally:
            core.module_wise_assignments, core.get_op_class = theirs


@contextmanager
def _operations(model: nn.Module, layers: Layers) -> Iterator[list[_RuleOperation]]:
    """Put ASDL's hooks in place; afterwards layers are free for either kind of backward hook."""
    kinds = {module: module._is_full_backward_hook for module in layers.blocks}
    if any(kind and module._backward_hooks for module, kind in kinds.items()):
        raise NotImplementedError(
            "layers with full backward hooks cannot have those of ASDL as well; AugmentedGGN and "
            "AugmentedEF need none"
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


@contextmanager
def _copied_outputs(layers: Layers) -> Iterator[None]:
    """Let layers return copies inside the context if the model overwrites what they return.

    What overwrites a view takes the place of the operation that ASDL's hook is on.
    """
    modules = list(layers.blocks) if layers.copies else []
    handles = [module.register_forward_hook(_clone) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _clone(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.clone()


@dataclass(eq=False)
class _AsdlTrace(Trace):
    """A trace whose gradients come from ASDL's hooks.

    Hooks run where autograd passes, so it is asked for a parameter of every layer, the smallest;
    or for all, if it did not pass where it should.
    """

    operations: Sequence[_RuleOperation] = ()
    ask_for_all: bool = False

    def gradients(self, columns: Sequence[Tensor]) -> Iterator[Gradients]:
        """Yield the gradients of each column, as :meth:`Trace.gradients`."""
        for column in columns:
            self._pass_back(column)
            if self._silent():
                self.ask_for_all = True
                self._check_silent(self._pass_back(column))
            found: dict[int, Tensor] = {}
            for operation in self.operations:
                found |= operation.by_call()
            gradients = []
            for call in self.calls:
                gradient = found.get(id(call))
                gradients.append(torch.zeros_like(call.output) if gradient is None else gradient)
            yield gradients, {}

    def _silent(self) -> list[_RuleOperation]:
        """Return the operations of layers that were called, but not in the backward pass."""
        return [operation for operation in self.operations if operation.is_silent()]

    def _check_silent(self, gradients: dict[int, Tensor]) -> None:
        """Raise if a hook did not run although its layer's parameters have these gradients.

        Raises:
            NotImplementedError: The gradient is not one of another layer with the same parameter.
        """
        silent = self._silent()
        explained: set[int] = set()
        for operation in self.operations:
            if operation not in silent:
                explained |= operation.indices()
        for operation in silent:
            for index in operation.indices() - explained:
                if gradients[index].any():
                    raise NotImplementedError(
                        f"ASDL's hook at {operation.kind} did not run although its parameters have "
                        "a gradient; AugmentedGGN and AugmentedEF need no hooks there"
                    )

    def _pass_back(self, column: Tensor) -> dict[int, Tensor]:
        """Let autograd pass, and return the gradients of some or all parameters, by index."""
        for operation in self.operations:
            operation.gradients = []
        asked: list[int] = []
        for call in self.calls:
            own = sorted((i for i, _ in call.blocks), key=lambda i: self.parameters[i].numel())
            asked += own if self.ask_for_all else own[:1]
        tensors = [self.parameters[index] for index in asked]
        try:
            gradients = backpropagate(self.outputs, tensors, column)
        except AttributeError as error:  # of ASDL's hook
            raise NotImplementedError(
                "ASDL found no gradient at the output of a layer, one of several that an operation "
                "returned, or passed through a function without gradient; AugmentedGGN and "
                "AugmentedEF need no hooks there"
            ) from error
        return dict(zip(asked, gradients, strict=True))


class AsdlEngine:
    """Hooks of ASDL keep the calls of layers, and the gradients of their outputs."""

    @contextmanager
    def run(self, forward: Callable[[Any], Tensor], x: Any, match: Match) -> Iterator[Trace]:
        """Run a forward pass, as :meth:`~laplace_invariance.curvature.engines.Engine.run`."""
        layers = match.layers
        calls: list[Call] = []
        if layers.keywords:
            raise NotImplementedError(
                f"ASDL does not see what {layers.keywords} receives by keyword; AugmentedGGN and "
                "AugmentedEF do"
            )

        def keep(module: nn.Module, x: Tensor, output: Tensor) -> Call:
            calls.append(layers.call(layers.blocks[module], x, output))
            return calls[-1]

        with _operations(match.model, layers) as operations:
            for operation in operations:
                operation.keep = keep
            with _copied_outputs(layers), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Using a non-full backward hook")
                outputs = forward(x)
            # layers may run once more in the backward pass, from checkpoints of the model's own
            for operation in operations:
                operation.keep = None
            layers.check(calls)
            yield _AsdlTrace(outputs, calls, match.parameters, operations=operations)


class AsdlAugmentedGGN(AugmentedGGN):
    """:class:`AugmentedGGN` with ASDL's hooks as the engine."""

    engine = AsdlEngine()


class AsdlAugmentedEF(AugmentedEF):
    """:class:`AugmentedEF` with ASDL's hooks as the engine."""

    engine = AsdlEngine()
