"""Our layers in BackPACK's own extensions, for ``backpack.extend`` and laplace's ``BackPackGGN``.

BackPACK passes columns of the loss Hessian from module to module. A module that it does not know is
run once more on its input, by itself, and our rules make of the columns what the extension wants;
autograd passes them on. That holds for a layer as for a block of several, which BackPACK sees as
one module: what is inside of it is left to the block.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from backpack import backpack, disable
from backpack.extensions import (
    KFAC,
    KFLR,
    BatchGrad,
    DiagGGNExact,
    DiagGGNMC,
    SumGradSquared,
)
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.module_extension import ModuleExtension
from backpack.utils.module_classification import is_no_op
from torch import Tensor, nn

from laplace_invariance.curvature import kfac
from laplace_invariance.curvature.ggn import AugmentedGGN
from laplace_invariance.curvature.loss_hessian import Columns
from laplace_invariance.curvature.plugins import Registration, dense
from laplace_invariance.curvature.trace.calls import backpropagate
from laplace_invariance.curvature.trace.chunks import AnyTrace
from laplace_invariance.curvature.trace.matching import Match
from laplace_invariance.invariant import InvariantModel

__all__ = ["register_backpack"]


class _Flat(nn.Module):
    """A module whose outputs are flattened to ``[batch, C]``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x).flatten(1)


class _ModuleCurvature(AugmentedGGN):
    """Curvature of a module alone; the columns at its outputs take the place of targets.

    Args:
        module: The module, with parameters that require grad.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(_Flat(module), "regression")

    def _columns(self, trace: AnyTrace, y: Tensor) -> Columns:
        return list(y), None

    def factors(self, trace: AnyTrace, columns: Tensor, matched: Match) -> list[list[Tensor]]:
        """Return Kronecker factors by parameter, scaled as BackPACK's."""
        if matched.objection is not None:
            raise NotImplementedError(matched.objection)
        found = self._factors(trace, columns, matched, N=len(trace.outputs))
        return [[dense(factor) for factor in own] for own in self._by_parameter(found)]

    def jacobian(self, trace: AnyTrace, columns: Tensor) -> list[Tensor]:
        """Return the derivatives ``[batch, column, numel]`` in each parameter."""
        sizes = [parameter.numel() for parameter in self.params]
        return list(self._jacobian(trace, list(columns)).split(sizes, dim=-1))


def _kron(own: _ModuleCurvature, trace: AnyTrace, columns: Tensor, matched: Match) -> list[Any]:
    return own.factors(trace, columns, matched)


def _diagonal(own: _ModuleCurvature, trace: AnyTrace, columns: Tensor, matched: Match) -> list[Any]:
    jacobians = own.jacobian(trace, columns)
    pairs = zip(own.params, jacobians, strict=True)
    return [kfac.weighted_diagonal(jacobian).view_as(p) for p, jacobian in pairs]


def _per_input(
    own: _ModuleCurvature, trace: AnyTrace, columns: Tensor, matched: Match
) -> list[Any]:
    jacobians = own.jacobian(trace, columns)
    return [j.squeeze(1).unflatten(1, p.shape) for p, j in zip(own.params, jacobians, strict=True)]


# What each extension keeps of a parameter; those of gradients have these as their only column
QUANTITIES: dict[type[BackpropExtension], Callable[..., list[Any]]] = {
    KFAC: _kron,
    KFLR: _kron,
    DiagGGNExact: _diagonal,
    DiagGGNMC: _diagonal,
    BatchGrad: _per_input,
    SumGradSquared: _diagonal,
}


class _ByRules(ModuleExtension):
    """Extension of all modules that BackPACK does not know, by the rules of their layers."""

    def __call__(
        self,
        extension: BackpropExtension,
        module: nn.Module,
        g_inp: tuple[Any, ...],
        g_out: tuple[Any, ...],
    ) -> None:
        if not any(module in models.known for models in _registered):
            raise NotImplementedError(
                f"this {type(module).__name__} is in no model that was registered; call "
                "register_backpack(model) before its backward pass, for copies as well"
            )
        if hasattr(module, "input1"):
            raise NotImplementedError(
                f"{type(module).__name__} has several inputs; BackPackAugmentedGGN can follow them"
            )
        x: Any = module.input0
        output: Any = module.output
        columns = g_out[0].unsqueeze(0)
        if extension.expects_backpropagation_quantities():
            columns = extension.saved_quantities.retrieve_quantity(output.data_ptr(), True)
        columns = columns.detach().flatten(2)
        with _rerun(module, x, output) as (own, inputs, outputs, trace, matched):
            if own is not None:
                found = QUANTITIES[type(extension)](own, trace, columns, matched)
                for parameter, quantity in zip(own.params, found, strict=True):
                    setattr(parameter, extension.savefield, quantity)
            if extension.expects_backpropagation_quantities() and x.requires_grad:
                passed = [backpropagate(outputs, [inputs], column)[0] for column in columns]
                extension.saved_quantities.save_quantity(
                    x.data_ptr(),
                    torch.stack(passed),
                    extension.accumulate_backpropagated_quantities,
                )


@contextmanager
def _rerun(module: nn.Module, x: Tensor, output: Tensor) -> Iterator[tuple[Any, ...]]:
    """Run a module once more, unseen by BackPACK, as the graph of its first run is gone by now.

    Yields:
        Its curvature, None if it has no parameters; input and flattened output of this run; trace
        and match.
    """
    inputs = x.detach()
    if x.requires_grad:
        inputs.requires_grad_()
    # no extensions, and hooks that neither store tensors on modules nor take them off
    with torch.enable_grad(), backpack(retain_graph=True), disable(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        own = _curvature_of(module)
        if own is None:
            outputs = module(inputs).flatten(1)
            _check_same(module, outputs, output)
            yield None, inputs, outputs, None, None
            return
        matched = own._prepare(inputs.detach())
        with own._trace(inputs, matched) as trace:
            _check_same(module, trace.outputs, output)
            yield own, inputs, trace.outputs, trace, matched


def _check_same(module: nn.Module, outputs: Tensor, before: Tensor) -> None:
    if not torch.allclose(outputs, before.flatten(1), rtol=1e-3, atol=1e-5):
        raise RuntimeError(
            f"{type(module).__name__} returns something else when it is run again; call "
            "model.eval(), or take what is random out of it"
        )


_curvatures: WeakKeyDictionary[nn.Module, _ModuleCurvature] = WeakKeyDictionary()


def _curvature_of(module: nn.Module) -> _ModuleCurvature | None:
    """Return the curvature of a module, whose layers are matched once, None without parameters."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        return None
    own = _curvatures.get(module)
    if own is None or [*map(id, own.params)] != [*map(id, trained)]:
        own = _curvatures[module] = _ModuleCurvature(module)
    return own


class _Models:
    """The modules of models as BackPACK sees them.

    Attributes:
        known: Modules that it is called for.
        inside: Modules inside of those, to which it is not to look.
        classes: Classes of the former.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.known: WeakSet[nn.Module] = WeakSet()
        self.inside: WeakSet[nn.Module] = WeakSet()
        for model in models:
            self._add(model)
        self.classes = {type(module) for module in self.known}

    def _add(self, module: nn.Module) -> None:
        if isinstance(module, InvariantModel):
            raise NotImplementedError(
                "BackPACK's own extensions know nothing of samples, which an InvariantModel "
                "averages; use BackPackAugmentedGGN, or register its net"
            )
        if is_no_op(module):
            for child in module.children():
                self._add(child)
            return
        self.known.add(module)
        self.inside.update(inner for inner in module.modules() if inner is not module)


_registered: list[_Models] = []
_theirs = BackpropExtension.__init__, BackpropExtension.__call__


@wraps(_theirs[0])
def _initialise(extension: BackpropExtension, *args: Any, **kwargs: Any) -> None:
    _theirs[0](extension, *args, **kwargs)
    if type(extension) not in QUANTITIES:
        return
    for cls in {cls for models in _registered for cls in models.classes}:
        try:
            extension.set_module_extension(cls, _ByRules())
        except ValueError:  # BackPACK knows it
            continue


@wraps(_theirs[1])
def _call(extension: BackpropExtension, module: nn.Module, *args: Any) -> None:
    inside = any(module in models.inside for models in _registered)
    if not (inside and type(extension) in QUANTITIES):
        _theirs[1](extension, module, *args)


def register_backpack(*models: nn.Module) -> Registration:
    """Let BackPACK's own extensions work on models with layers that it does not know.

    From now on, new instances of ``KFAC``, ``KFLR``, ``DiagGGNExact``, ``DiagGGNMC``, ``BatchGrad``
    and ``SumGradSquared`` have an extension for every class of module in these models that they had
    none for (``set_module_extension``), by the rules of our layers, and by autograd where there are
    no parameters. So ``backpack.extend(model)`` and laplace's ``BackPackGGN`` work::

        with register_backpack(net):
            la = laplace.Laplace(net, "classification", "all", "kron", backend=BackPackGGN)
            la.fit(loader)

    Layers that BackPACK knows stay its own, and nothing is overwritten. A module with others inside
    of it, such as a ``ResidualPathway``, is one module to BackPACK, and all of its layers follow
    our rules. Extensions that exist already, and other kinds of them, stay as they are.

    Args:
        *models: Models with layers of this package, or any that have rules. Copies are models of
            their own.

    Returns:
        Handle whose :meth:`~laplace_invariance.curvature.plugins.Registration.remove` undoes it,
        also as a context manager.

    Raises:
        NotImplementedError: A model averages over samples.
    """
    found = _Models(models)
    if not _registered:
        BackpropExtension.__init__ = _initialise
        BackpropExtension.__call__ = _call
    _registered.append(found)

    def undo() -> None:
        _registered.remove(found)
        if not _registered:
            BackpropExtension.__init__, BackpropExtension.__call__ = _theirs

    return Registration(undo)
