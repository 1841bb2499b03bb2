"""BackPACK as the engine: columns are passed back from module to module, all at once.

A *link* is a module that takes the batch from its predecessor and hands it to its successor: the
members of an ``nn.Sequential``, and the mean over samples of an ``InvariantModel``. Columns go back
through a link by BackPACK's derivatives where it has them, and by autograd elsewhere, through a
whole block or network of one's own if need be. Where there is no such chain, or it was lost,
autograd does it all. Layers are known by their rules, as in every engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import add
from typing import Any

import torch
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.batchnorm_nd import BatchNormNdDerivatives
from backpack.core.derivatives.conv1d import Conv1DDerivatives
from backpack.core.derivatives.conv2d import Conv2DDerivatives
from backpack.core.derivatives.conv3d import Conv3DDerivatives
from backpack.core.derivatives.elu import ELUDerivatives
from backpack.core.derivatives.flatten import FlattenDerivatives
from backpack.core.derivatives.leakyrelu import LeakyReLUDerivatives
from backpack.core.derivatives.linear import LinearDerivatives
from backpack.core.derivatives.maxpool2d import MaxPool2DDerivatives
from backpack.core.derivatives.relu import ReLUDerivatives
from backpack.core.derivatives.selu import SELUDerivatives
from backpack.core.derivatives.sigmoid import SigmoidDerivatives
from backpack.core.derivatives.tanh import TanhDerivatives
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.module_extension import ModuleExtension
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from laplace_invariance.curvature.engines.autograd import AutogradEngine
from laplace_invariance.curvature.ggn import AugmentedEF, AugmentedGGN
from laplace_invariance.curvature.trace.calls import Call, Gradients, Trace, backpropagate
from laplace_invariance.curvature.trace.matching import Match
from laplace_invariance.invariant import InvariantModel, SampleMean

__all__ = ["BackPackAugmentedEF", "BackPackAugmentedGGN"]

logger = logging.getLogger(__name__)


class _SampleMeanDerivatives(BaseDerivatives):
    """Derivatives of the mean over samples: each sample receives its weight's share."""

    def _jac_t_mat_prod(
        self, module: SampleMean, g_inp: Any, g_out: Any, mat: Tensor, subsampling: Any = None
    ) -> Tensor:
        weights = module.input1.to(mat.dtype)
        return torch.einsum("s,kn...->kns...", weights, mat).flatten(1, 2)


DERIVATIVES: dict[type[nn.Module], BaseDerivatives] = {
    nn.Linear: LinearDerivatives(),
    nn.Conv1d: Conv1DDerivatives(),
    nn.Conv2d: Conv2DDerivatives(),
    nn.Conv3d: Conv3DDerivatives(),
    nn.BatchNorm1d: BatchNormNdDerivatives(),
    nn.BatchNorm2d: BatchNormNdDerivatives(),
    nn.BatchNorm3d: BatchNormNdDerivatives(),
    nn.MaxPool2d: MaxPool2DDerivatives(),
    nn.Flatten: FlattenDerivatives(),
    nn.ReLU: ReLUDerivatives(),
    nn.LeakyReLU: LeakyReLUDerivatives(),
    nn.ELU: ELUDerivatives(),
    nn.SELU: SELUDerivatives(),
    nn.Sigmoid: SigmoidDerivatives(),
    nn.Tanh: TanhDerivatives(),
    SampleMean: _SampleMeanDerivatives(),
}


def _derivatives(module: nn.Module) -> BaseDerivatives | None:
    """Return BackPACK's derivatives of a module where they cover it as it is configured."""
    usual_padding = getattr(module, "padding_mode", "zeros") == "zeros"
    usual_padding &= not isinstance(getattr(module, "padding", 0), str)
    usual_forward = getattr(module, "affine", True) and "forward" not in vars(module)
    if usual_padding and usual_forward:
        return DERIVATIVES.get(type(module))
    return None


class _Link:
    """A module as BackPACK sees it, with what it received and returned.

    These are thereby kept off the module itself, on which BackPACK would put them.
    """

    input0: Any
    output: Any

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.n_calls = 0
        self.inside: list[Call] = []  # calls of layers made by the module, or its own
        self.extension: _Columns | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def follow(self, calls: list[Call]) -> list[RemovableHandle]:
        """Put hooks on the module; ``calls`` is where those of layers appear."""
        start = 0

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            nonlocal start
            start = len(calls)
            self.n_calls += 1
            for i, argument in enumerate(args):
                setattr(self, f"input{i}", argument)
            self._entered = getattr(self.input0, "_version", None)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.output = output
            self.inside = calls[start:]
            self._left = getattr(output, "_version", None)
            if isinstance(output, Tensor) and output.requires_grad:
                self._handle = output.register_hook(self.run)

        return [
            self.module.register_forward_pre_hook(before),
            self.module.register_forward_hook(after),
        ]

    def run(self, gradient: Tensor) -> None:
        """Run BackPACK's extension when autograd arrives at the output."""
        if self.extension is not None:
            self.extension(self, (None,), (gradient,))

    def regular(self) -> bool:
        """Return whether the module was called once, with tensors that nothing overwrote."""
        if self.n_calls != 1:
            return False
        if not isinstance(self.input0, Tensor) or not isinstance(self.output, Tensor):
            return False
        return (self.input0._version, self.output._version) == (self._entered, self._left)

    def release(self) -> None:
        """Let go of the tensors, which otherwise keep each other alive through the hook."""
        if "_handle" in vars(self):
            self._handle.remove()
        for name in set(vars(self)) - {"module", "extension"}:
            delattr(self, name)


class _Pass(ModuleExtension):
    """Pass columns back through any link, and keep those that arrive at layers with a rule."""

    def __call__(
        self, extension: _Columns, link: _Link, g_inp: tuple[Any, ...], g_out: tuple[Any, ...]
    ) -> None:
        columns = extension.saved_quantities.retrieve_quantity(id(link.output), delete_old=True)
        # No columns: the graph is cut off here, or autograd passes through the next link, which
        # asks for the gradient of what this one returned; columns will arrive after that.
        if columns is None or link not in extension.pending:
            return
        wanted = extension.pending.pop(link)
        x = link.input0
        derivatives = _derivatives(link.module)
        if derivatives is None:
            tensors = [*wanted, x] if x.requires_grad else wanted
            found = _by_autograd(link.output, columns, tensors)
        else:
            found = [columns] * len(wanted)
            if x.requires_grad:
                found.append(derivatives.jac_t_mat_prod(link, g_inp, g_out, columns))
        extension.found |= {id(tensor): g for tensor, g in zip(wanted, found, strict=False)}
        if x.requires_grad:
            extension.saved_quantities.save_quantity(id(x), found[-1], add)


def _by_autograd(output: Tensor, columns: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return the gradients ``[column, ...]`` of ``sum(output * column)`` in each tensor."""
    if not tensors:
        return []
    rows = [backpropagate(output, tensors, column) for column in columns]
    return [torch.stack(row) for row in zip(*rows, strict=True)]


class _Columns(BackpropExtension):
    """The columns that are passed back, and what of them was found at the layers.

    Args:
        columns: Columns at the outputs of the last link, ``[column, batch, C]``.
        outputs: These outputs.
        links: For each link, the outputs of calls inside, whose gradients are wanted.
    """

    def __init__(self, columns: Tensor, outputs: Tensor, links: dict[_Link, list[Tensor]]) -> None:
        super().__init__("laplace_invariance", {})
        self.set_module_extension(_Link, _Pass())
        # by tensor, not by its memory, which a view shares with what it is a view of
        self.saved_quantities.save_quantity(id(outputs), columns, add)
        self.pending = dict(links)
        self.found: dict[int, Tensor] = {}

    def expects_backpropagation_quantities(self) -> bool:
        """Return that columns are passed from module to module."""
        return True


@dataclass(eq=False)
class _BackPackTrace(Trace):
    """A trace whose gradients are passed back from link to link."""

    links: Sequence[_Link] = ()

    def gradients(self, columns: Sequence[Tensor]) -> Iterator[Gradients]:
        """Yield the gradients of each column, as :meth:`Trace.gradients`."""
        tensors = [call.output for call in self.calls]
        found = self._pass_back(torch.stack(list(columns)), tensors)
        if found is None:
            logger.info("BackPACK lost track of the batch between two modules; autograd takes over")
            yield from super().gradients(columns)
            return
        for k, _ in enumerate(columns):
            gradients = []
            for tensor in tensors:
                arrived = found.get(id(tensor))
                gradients.append(torch.zeros_like(tensor) if arrived is None else arrived[k])
            yield gradients, {}

    def _pass_back(self, columns: Tensor, tensors: list[Tensor]) -> dict[int, Tensor] | None:
        """Return gradients by ``id`` of the tensor, None if they did not arrive as autograd's."""
        wanted = {link: [call.output for call in link.inside] for link in self.links}
        extension = _Columns(columns, self.outputs, wanted)
        for link in self.links:
            link.extension = extension
        try:
            reached = torch.autograd.grad(
                self.outputs.sum(), tensors, retain_graph=True, allow_unused=True
            )
        finally:
            for link in self.links:
                link.extension = None
        for tensor, gradient in zip(tensors, reached, strict=True):
            if gradient is not None and id(tensor) not in extension.found:
                return None
        return extension.found


def _chain(model: nn.Module) -> list[nn.Module]:
    """Return the modules through which a batch passes one after the other."""
    if type(model) is InvariantModel:
        return [*_members(model.net), model.mean]
    return _members(model)


def _members(module: nn.Module) -> list[nn.Module]:
    if type(module) is not nn.Sequential:
        return [module]
    return [member for child in module for member in _members(child)]


def _hooked(model: nn.Module) -> bool:
    """Return whether hooks of others might replace what passes from module to module."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(torch_module, f"_global{name}") for name in names):
        return True
    return any(getattr(module, name) for module in model.modules() for name in names)


@contextmanager
def _following(links: Sequence[_Link], calls: list[Call]) -> Iterator[None]:
    """Let links see their modules run; not in place, after which their input would be lost."""
    in_place = [link.module for link in links if getattr(link.module, "inplace", False)]
    handles = [handle for link in links for handle in link.follow(calls)]
    try:
        for module in in_place:
            vars(module)["inplace"] = False
        yield
    finally:
        for module in in_place:
            vars(module)["inplace"] = True
        for handle in handles:
            handle.remove()


class BackPackEngine:
    """BackPACK passes columns from module to module, through a chain of these."""

    @contextmanager
    def run(self, forward: Callable[[Any], Tensor], x: Any, match: Match) -> Iterator[Trace]:
        """Run a forward pass, as :meth:`~laplace_invariance.curvature.engines.Engine.run`."""
        modules = _chain(match.model)
        layers = match.layers
        if _hooked(match.model) or len(set(modules)) < len(modules):
            with AutogradEngine().run(forward, x, match) as trace:
                yield trace
            return
        links = [_Link(module) for module in modules]
        try:
            # in this order: what is captured may be replaced by a copy, which is then what the
            # link returned
            with layers.capture() as calls, _following(links, calls):
                outputs = forward(x)
            layers.check(calls)
            if all(link.regular() for link in links):
                yield _BackPackTrace(outputs, calls, match.parameters, links=links)
            else:
                yield Trace(outputs, calls, match.parameters)
        finally:
            for link in links:
                link.release()


class BackPackAugmentedGGN(AugmentedGGN):
    """:class:`AugmentedGGN` with BackPACK as the engine."""

    engine = BackPackEngine()


class BackPackAugmentedEF(AugmentedEF):
    """:class:`AugmentedEF` with BackPACK as the engine."""

    engine = BackPackEngine()
