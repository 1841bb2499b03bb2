"""Our layers in ASDL, for laplace's ``AsdlGGN`` and ``AsdlEF``.

ASDL's table of layers is closed, so two of its functions are replaced while layers are registered.
What it keeps of a layer is called ``weight`` or ``bias``, and laplace takes the block of a bias to
be the gradient factor of the weight beside it: layers with other parameters are refused where their
curvature would silently be left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asdl import core
from asdl.operations import (
    OP_BATCH_GRADS,
    OP_COV_DIAG,
    OP_COV_KRON,
    OP_SAVE_INPUTS,
    OP_SAVE_OUTGRADS,
    Operation,
)
from torch import Tensor, nn

from laplace_invariance.curvature.plugins import Registration, dense
from laplace_invariance.curvature.rules import AnyBlock, MatrixBlock, blocks_of, rules

__all__ = ["register_asdl"]

PARAMETERS = ("weight", "bias")


def _block(module: nn.Module, name: str) -> AnyBlock:
    blocks, reason = blocks_of(module)
    for block in blocks:
        if block.parameter == name:
            return block
    raise NotImplementedError(f"{name} of {type(module).__name__} has no rule: {reason}")


def _matrix(module: nn.Module) -> MatrixBlock:
    block = _block(module, "weight")
    if not isinstance(block, MatrixBlock) or block.transposed:
        raise NotImplementedError(f"the weight of {type(module).__name__} is not a matrix for ASDL")
    return block


class RuleOperation(Operation):
    """What ASDL computes at a layer with a rule; matrices are those of :mod:`..kfac`, expanded."""

    supported_operations = frozenset(
        (OP_COV_KRON, OP_COV_DIAG, OP_BATCH_GRADS, OP_SAVE_INPUTS, OP_SAVE_OUTGRADS)
    )

    def __init__(self, module: nn.Module, op_names: list[str], model_for_kernel: Any = None):
        if OP_COV_KRON in op_names:
            _check_kron(module)
        super().__init__(module, op_names, model_for_kernel)

    @staticmethod
    def cov_kron_A(module: nn.Module, in_data: Tensor) -> Tensor:
        """Return the sum of ``a a^T`` over inputs and positions."""
        block = _matrix(module)
        a = block.a(in_data)
        g = a.new_zeros(len(a), 1, *a.shape[1:-1], 1)  # which has no part in it
        return dense(block.factors(a, g, None, 1, "expand", False)[1])

    @staticmethod
    def cov_kron_B(module: nn.Module, out_grads: Tensor) -> Tensor:
        """Return the sum of ``g g^T`` over inputs, averaged over positions."""
        block = _matrix(module)
        g = block.g(out_grads).unsqueeze(1)
        a = g.new_zeros(len(g), *g.shape[2:-1], 1)
        return dense(block.factors(a, g, None, 1, "expand", False)[0])

    @classmethod
    def cov_diag_weight(cls, module: nn.Module, in_data: Tensor, out_grads: Tensor) -> Tensor:
        """Return the squares of each input's gradient, summed."""
        return cls.batch_grads_weight(module, in_data, out_grads).square().sum(0)

    @classmethod
    def cov_diag_bias(cls, module: nn.Module, out_grads: Tensor) -> Tensor:
        """Return the squares of each input's gradient, summed."""
        return cls.batch_grads_bias(module, out_grads).square().sum(0)

    @staticmethod
    def batch_grads_weight(module: Any, in_data: Tensor, out_grads: Tensor) -> Tensor:
        """Return the gradient of each input."""
        block = _block(module, "weight")
        return block.gradient_map(in_data, len(in_data))(out_grads).unflatten(
            1, module.weight.shape
        )

    @staticmethod
    def batch_grads_bias(module: Any, out_grads: Tensor) -> Tensor:
        """Return the gradient of each input; a bias does not depend on the layer's input."""
        block = _block(module, "bias")
        if not isinstance(block, MatrixBlock) and block.a is None:
            return block.gradient_map(out_grads, len(out_grads))(out_grads).unflatten(
                1, module.bias.shape
            )
        raise NotImplementedError(f"the bias of {type(module).__name__} is not one for ASDL")


def _own(module: nn.Module) -> list[str]:
    """Return the names of the parameters that a module itself has and trains."""
    own = module.named_parameters(recurse=False)
    return [name for name, parameter in own if parameter.requires_grad]


def _check_kron(module: nn.Module) -> None:
    """Raise unless laplace makes one block of each of a layer's parameters."""
    names = _own(module)
    if names not in (["weight"], ["weight", "bias"]):
        raise NotImplementedError(
            f"{type(module).__name__} has parameters {', '.join(names)}, of which ASDL's Kronecker "
            "factors know a weight and a bias beside it only; use AsdlAugmentedGGN, or diag"
        )
    _matrix(module)


_theirs = core.named_supported_modules, core.get_op_class


def _has_rule(module: nn.Module) -> bool:
    known = rules()
    return any(cls in known for cls in type(module).__mro__)


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield ASDL's own layers and ours, in the order of the model.

    Raises:
        NotImplementedError: One of ours has parameters that ASDL would silently leave out.
    """
    theirs = {module for _, module in _theirs[0](model)}
    for name, module in model.named_modules():
        if module in theirs:
            yield name, module
        elif _own(module) and _has_rule(module):
            unknown = [own for own in _own(module) if own not in PARAMETERS]
            if unknown:
                raise NotImplementedError(
                    f"ASDL knows parameters that are called weight or bias, and would leave out "
                    f"{name}.{unknown[0]} of {type(module).__name__}; use AsdlAugmentedGGN"
                )
            yield name, module


def _operation(module: nn.Module) -> type[Operation] | None:
    if isinstance(module, core._supported_module_classes):
        return _theirs[1](module)
    return RuleOperation


_registrations: list[object] = []


def register_asdl() -> Registration:
    """Let ASDL, and hence laplace's ``AsdlGGN`` and ``AsdlEF``, work on layers with a rule.

    From now on, ASDL finds every layer that has one of our rules and that it does not know itself,
    with parameters called ``weight`` and ``bias``. Others are refused: a basis whose ``omega`` is a
    weight, scalars and, for Kronecker factors, biases without a weight in the same layer. Curvature
    is ours but for one thing: laplace takes the gradient factor of a weight for the block of the
    bias beside it, which is exact where the layer has one position only::

        with register_asdl():
            la = laplace.Laplace(net, "classification", "all", "kron", backend=AsdlGGN)
            la.fit(loader)

    Returns:
        Handle whose :meth:`~laplace_invariance.curvature.plugins.Registration.remove` undoes it,
        also as a context manager.
    """
    token = object()
    core.named_supported_modules, core.get_op_class = _named_modules, _operation
    _registrations.append(token)

    def undo() -> None:
        _registrations.remove(token)
        if not _registrations:
            core.named_supported_modules, core.get_op_class = _theirs

    return Registration(undo)
