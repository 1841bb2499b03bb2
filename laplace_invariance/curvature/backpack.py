"""BackPACK as the engine: all columns at once, passed back from module to module by its derivatives.

A *link* is a module that takes the batch from its predecessor and hands it to its successor: the members of an
``nn.Sequential``, and the mean over samples of an ``InvariantModel``. Columns go back through a link by BackPACK's derivatives
where it has them, and by autograd elsewhere, also through a whole block or network of one's own, which is then a single link.
Layers are known by their rules, as in every engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import add
from typing import Any

import torch
from backpack import backpack, hook_run_extensions, hook_store_io, memory_cleanup
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
from backpack.extensions.backprop_extension import FAIL_SILENT, BackpropExtension
from backpack.extensions.module_extension import ModuleExtension
from torch import Tensor, nn

from laplace_invariance.curvature.capture import Call, Gradients, Trace
from laplace_invariance.curvature.native import AugmentedEF, AugmentedGGN
from laplace_invariance.invariant import InvariantModel, SampleMean

__all__ = ["BackPackAugmentedEF", "BackPackAugmentedGGN"]


class _SampleMeanDerivatives(BaseDerivatives):
    """Of the mean over samples: each sample receives its weight's share."""

    def _jac_t_mat_prod(self, module: SampleMean, g_inp, g_out, mat, subsampling=None) -> Tensor:
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
    usual = (
        getattr(module, "padding_mode", "zeros") == "zeros"
        and not isinstance(getattr(module, "padding", 0), str)
        and not getattr(module, "ceil_mode", False)
        and getattr(module, "affine", True)
    )
    return DERIVATIVES.get(type(module)) if usual else None


class _Pass(ModuleExtension):
    """Pass columns back through any link, and keep those that arrive at layers with a rule."""

    def __call__(self, extension: _Columns, module: nn.Module, g_inp: tuple, g_out: tuple) -> None:
        if module not in extension.links:  # inside a link, and extended by someone else
            return
        wanted = extension.links.pop(module)
        columns = extension.saved_quantities.retrieve_quantity(module.output.data_ptr(), delete_old=True)
        if columns is None:
            raise RuntimeError(
                f"what {type(module).__name__} returned is not what the next module received, so BackPACK lost track of it; "
                "AugmentedGGN and AugmentedEF do not need to follow it"
            )
        x = module.input0
        onward = [x] if isinstance(x, Tensor) and x.requires_grad else []
        derivatives = _derivatives(module)
        if derivatives is None or any(isinstance(tensor, nn.Parameter) for tensor in wanted):
            extension.found |= _by_autograd(module.output, columns, [*wanted, *onward])
            passed = extension.found.pop(id(x), None)
        else:
            extension.found |= {id(tensor): columns for tensor in wanted}
            passed = derivatives.jac_t_mat_prod(module, g_inp, g_out, columns) if onward else None
        if onward:
            extension.saved_quantities.save_quantity(x.data_ptr(), passed, add)


def _by_autograd(output: Tensor, columns: Tensor, tensors: list[Tensor]) -> dict[int, Tensor]:
    """Return the gradients of ``sum(output * column)`` for each column, ``[column, ...]`` by ``id`` of the tensor."""
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    rows = [torch.autograd.grad(output, tensors, column, **options) for column in columns] if tensors else []
    return {id(tensor): torch.stack(row) for tensor, row in zip(tensors, zip(*rows, strict=True), strict=False)}


class _Columns(BackpropExtension):
    """The columns that BackPACK passes back, and what of them was found at the layers.

    Args:
        links: what gradients are wanted of in each link, outputs of calls and parameters without a rule.
    """

    def __init__(self, links: dict[nn.Module, list[Tensor]]) -> None:
        super().__init__("laplace_invariance", {}, fail_mode=FAIL_SILENT)
        self.links = links
        self.found: dict[int, Tensor] = {}
        for kind in {type(link) for link in links}:
            self.set_module_extension(kind, _Pass())

    def expects_backpropagation_quantities(self) -> bool:
        return True


class _BackPackTrace(Trace):
    def __init__(
        self,
        outputs: Tensor,
        calls: list[Call],
        others: Sequence[tuple[int, Tensor]],
        links: Sequence[nn.Module],
    ) -> None:
        super().__init__(outputs, calls, others)
        self._links = links
        # BackPACK's hooks run where autograd passes, so it is asked for the parameters that it reaches last.
        parameters = ([p for p in link.parameters() if p.requires_grad] for link in links)
        self._reached = next(filter(None, parameters))

    def gradients(self, columns: Sequence[Tensor]) -> Iterator[Gradients]:
        inside = {link: set(link.modules()) for link in self._links}
        links = {link: [call.output for call in self.calls if call.module in inside[link]] for link in self._links}
        others = [parameter for _, parameter in self.others]
        links[self._links[0]] += others  # if there are any, the network is one link
        extension = _Columns(links)
        extension.saved_quantities.save_quantity(self.outputs.data_ptr(), torch.stack(list(columns)), add)
        with backpack(extension, retain_graph=True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")  # where inputs need no gradient
            torch.autograd.grad(self.outputs.sum(), self._reached, retain_graph=True, allow_unused=True)
        tensors = [*(call.output for call in self.calls), *others]
        for k, _ in enumerate(columns):
            yield self._sorted(
                [extension.found[id(t)][k] if id(t) in extension.found else torch.zeros_like(t) for t in tensors]
            )


def _links(model: nn.Module, whole: bool) -> list[nn.Module]:
    """Return the modules through which a batch passes one after the other; all of a network as one if it is to be ``whole``."""
    if type(model) is InvariantModel:
        return [*_links_of_network(model.net, whole), model.mean]
    return _links_of_network(model, whole)


def _links_of_network(net: nn.Module, whole: bool) -> list[nn.Module]:
    links = _chain(net)
    modules = [module for link in links for module in link.modules()]
    repeated = len(set(modules)) < len(modules)  # BackPACK knows one call of a module
    hooked = any(
        module._forward_hooks or module._forward_pre_hooks for module in net.modules()
    )  # passes who knows what
    return [net] if whole or repeated or hooked else links


def _chain(module: nn.Module) -> list[nn.Module]:
    return [link for child in module for link in _chain(child)] if type(module) is nn.Sequential else [module]


def _clashes(links: Sequence[nn.Module]) -> list[str]:
    """Say which modules have attributes of their own where BackPACK keeps what they receive and return."""
    found = []
    for link in links:
        taken = " and ".join(repr(name) for name in ("input0", "output") if hasattr(link, name))
        if taken and not getattr(link, "_backpack_extend", False):  # else they are BackPACK's, of an earlier pass
            found.append(
                f"BackPACK keeps what {type(link).__name__} receives and returns as its attributes 'input0' and 'output', but "
                f"it has {taken} already. Rename that, or use AugmentedGGN or AugmentedEF."
            )
    return found


@contextmanager
def _extended(links: Sequence[nn.Module]) -> Iterator[None]:
    """Let BackPACK see these modules run; not in place, which its hooks do not permit."""
    handles = [link.register_forward_hook(hook_store_io) for link in links]
    handles += [link.register_full_backward_hook(hook_run_extensions) for link in links]
    in_place = [link for link in links if getattr(link, "inplace", False)]
    try:
        for link in in_place:
            link.inplace = False
        yield
    finally:
        for link in in_place:
            link.inplace = True
        for handle in handles:
            handle.remove()


class _BackPack:
    @classmethod
    def objections(cls, model: nn.Module) -> list[str]:
        return _clashes(_links(model, whole=False))

    @contextmanager
    def _by_engine(self, forward: Callable[[Any], Tensor], x: Any) -> Iterator[Trace]:
        layers, others = self._match.layers, self._match.others
        links = _links(self.model, whole=bool(others))
        if clashes := _clashes(links):
            raise ValueError("\n".join(clashes))
        try:
            with (
                layers.capture() as calls,
                _extended(links),
            ):  # in this order: a captured output may be replaced by a copy
                outputs = forward(x.detach() if isinstance(x, Tensor) else x)
            layers.check(calls)
            yield _BackPackTrace(outputs, calls, others, links)
        finally:
            for link in links:
                memory_cleanup(link)


class BackPackAugmentedGGN(_BackPack, AugmentedGGN):
    """:class:`AugmentedGGN` with BackPACK as the engine."""


class BackPackAugmentedEF(_BackPack, AugmentedEF):
    """:class:`AugmentedEF` with BackPACK as the engine."""
