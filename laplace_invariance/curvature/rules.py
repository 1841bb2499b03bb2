"""What KFAC must know of a layer: which matrix it applies, to what, and at which positions.

A *rule* maps a module to its :class:`Block` s, one per parameter. With ``x`` the module's input and ``g`` the gradient of
some scalar with respect to its output, the gradient with respect to the parameter is, for each row (one input, one
sample),

    matrix block:       sum_r g_r (x) a_r,      a = block.a(x)  [rows, shared, d_in],   g = block.g(g)  [rows, shared, d_out]
    elementwise block:  sum_r g_r * a_r,        both [rows, shared, d]

where ``r`` runs over the positions that share the parameter. Kronecker factors, diagonal, Jacobian and Gram matrices are
then computed once for all layers. Rules are looked up by the exact type of a module, since a subclass may compute anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "AnyBlock",
    "Block",
    "ElementwiseBlock",
    "MatrixBlock",
    "register_rule",
    "rule_of",
    "rules",
]


@dataclass(frozen=True)
class MatrixBlock:
    """How a parameter enters a layer's output as a matrix: ``sum_r g_r (x) a_r`` is its gradient.

    Attributes:
        parameter: Name of the parameter in the module, e.g. ``"weight"``.
        a: Maps the module's input ``[rows, ...]`` to ``[rows, shared, d_in]``.
        g: Maps gradients of the module's output ``[rows, ...]`` to ``[rows, shared, d_out]``; always
            linear.
        linear: Whether ``a`` is linear in the input, so that samples may be averaged before it
            instead of after.
        slots: Number of slots. Positions then have a further axis, ``[rows, shared, slots, d]``, and
            slot ``q`` meets only the ``q``-th part of the parameter's rows (groups of a convolution).
        slotted_columns: Whether slots split the columns of the parameter instead of its rows; the
            axis is then there even for one slot.
        transposed: Whether the parameter is stored as ``[d_in, d_out]``.
    """

    parameter: str
    a: Callable[[Tensor], Tensor]
    g: Callable[[Tensor], Tensor]
    linear: bool = True
    slots: int = 1
    slotted_columns: bool = False
    transposed: bool = False
    elementwise: ClassVar[bool] = False

    @property
    def kinds(self) -> dict[str, bool]:
        """How the parameter is laid out, as ``kfac.jacobian`` wants to know it."""
        return {
            "elementwise": False,
            "slotted_columns": self.slotted_columns,
            "transposed": self.transposed,
        }


@dataclass(frozen=True)
class ElementwiseBlock:
    """How a parameter enters a layer's output elementwise: ``sum_r g_r * a_r`` is its gradient.

    Attributes:
        parameter: Name of the parameter in the module, e.g. ``"bias"``.
        a: Maps the module's input ``[rows, ...]`` to ``[rows, shared, d]``; None stands for ones (a
            bias).
        g: Maps gradients of the module's output ``[rows, ...]`` to ``[rows, shared, d]``; always
            linear.
    """

    parameter: str
    a: Callable[[Tensor], Tensor] | None
    g: Callable[[Tensor], Tensor]
    elementwise: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    slots: ClassVar[int] = 1
    slotted_columns: ClassVar[bool] = False
    transposed: ClassVar[bool] = False

    @property
    def kinds(self) -> dict[str, bool]:
        """How the parameter is laid out, as ``kfac.jacobian`` wants to know it."""
        return {"elementwise": True, "slotted_columns": False, "transposed": False}


AnyBlock = MatrixBlock | ElementwiseBlock


def Block(
    parameter: str,
    a: Callable[[Tensor], Tensor] | None,
    g: Callable[[Tensor], Tensor],
    elementwise: bool = False,
    linear: bool = True,
    **layout: Any,
) -> AnyBlock:
    """Return a :class:`MatrixBlock` or an :class:`ElementwiseBlock`; deprecated, choose one of them."""
    if elementwise or a is None:
        return ElementwiseBlock(parameter, a, g)
    return MatrixBlock(parameter, a, g, linear, **layout)


Rule = Callable[[nn.Module], Iterable[Block]]
_rules: dict[type[nn.Module], Rule] = {}


def register_rule(*types: type[nn.Module], overwrite: bool = False) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of the given module types.

    The function takes the module and returns a Block for each of its own parameters; it may raise ``NotImplementedError``
    with a reason for a configuration that it does not cover. A scale layer ``y = s * x`` of width ``d`` would be::

        @register_rule(Scale)
        def scale(module):
            return [Block("s", a=lambda x: x.unsqueeze(1), g=lambda g: g.unsqueeze(1), elementwise=True)]

    Args:
        *types: module classes; instances of subclasses are not covered.
        overwrite: replace a rule that is there already instead of raising.
    """

    def decorate(rule: Rule) -> Rule:
        for cls in types:
            if cls in _rules and not overwrite:
                raise ValueError(
                    f"{cls.__name__} has a rule already; pass overwrite=True to replace it"
                )
            _rules[cls] = rule
        return rule

    return decorate


def rules() -> dict[type[nn.Module], Rule]:
    """Return a copy of the registry."""
    return dict(_rules)


def rule_of(module: nn.Module) -> Rule | None:
    """Return the rule registered for the exact type of ``module``."""
    return _rules.get(type(module))


def _positions_last(x: Tensor) -> Tensor:
    """Bring ``[rows, ..., d]`` to ``[rows, shared, d]``."""
    return x.flatten(1, -2) if x.ndim > 2 else x.unsqueeze(1)


def _channels_second(x: Tensor) -> Tensor:
    """Bring ``[rows, d, ...]`` to ``[rows, shared, d]``."""
    return x.flatten(2).mT if x.ndim > 2 else x.unsqueeze(1)


@register_rule(nn.Linear)
def linear(module: nn.Linear) -> Iterable[Block]:
    """Shared over all axes between the first and the last."""
    yield Block("weight", _positions_last, _positions_last)
    if module.bias is not None:
        yield Block("bias", None, _positions_last, elementwise=True)


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(module: nn.modules.conv._ConvNd) -> Iterable[Block]:
    """Shared over output positions; groups are slots."""
    groups = module.groups

    def gradients(g: Tensor) -> Tensor:
        return g.flatten(2).mT.unflatten(-1, (groups, -1)) if groups > 1 else _channels_second(g)

    def inputs(x: Tensor) -> Tensor:
        patches = extract_patches(x, module)
        return patches if groups > 1 else patches.squeeze(2)

    yield Block("weight", inputs, gradients, slots=groups)
    if module.bias is not None:
        yield Block("bias", None, _channels_second, elementwise=True)


def padding_sides(
    padding: str | Sequence[int], kernel_size: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the padding before and after each axis; the odd one of ``"same"`` comes after."""
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel_size, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if isinstance(padding, str):  # "valid"
        return [(0, 0)] * len(kernel_size)
    return [(p, p) for p in padding]


def pad(x: Tensor, module: Any) -> Tensor:
    """Return ``x`` ``[rows, channels, ...]``, padded as a convolution pads it."""
    sides = padding_sides(module.padding, module.kernel_size, module.dilation)
    if not any(map(any, sides)):
        return x
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, [side for pair in reversed(sides) for side in pair], mode=mode)


def extract_patches(x: Tensor, module: Any) -> Tensor:
    """Return what a convolution multiplies with its weights, ``[rows, positions, groups, channels / groups * kernel]``."""
    n = len(module.kernel_size)
    x = pad(x, module)
    for i in range(n):
        span = module.dilation[i] * (module.kernel_size[i] - 1) + 1
        x = x.unfold(2 + i, span, module.stride[i])[..., :: module.dilation[i]]
    # [rows, channels, *positions, *kernel] -> [rows, positions, groups, channels / groups * kernel]
    x = x.flatten(2, 1 + n).unflatten(1, (module.groups, -1)).permute(0, 3, 1, 2, *range(4, 4 + n))
    return x.flatten(3)


@register_rule(nn.Embedding)
def embedding(module: nn.Embedding) -> Iterable[Block]:
    """A matrix applied to one-hot vectors, stored ``[tokens, features]``."""
    if module.max_norm is not None:
        raise NotImplementedError("max_norm changes the weights in the forward pass")
    if module.sparse:
        raise NotImplementedError(
            "sparse=True has gradients that are not strided; sparse=False computes the same"
        )
    if module.scale_grad_by_freq:
        raise NotImplementedError(
            "scale_grad_by_freq makes gradients depend on the rest of the batch"
        )

    def one_hot(tokens: Tensor) -> Tensor:
        vectors = F.one_hot(tokens.flatten(1), module.num_embeddings).to(module.weight.dtype)
        if module.padding_idx is not None:
            vectors[..., module.padding_idx] = 0
        return vectors

    yield Block("weight", one_hot, lambda g: g.flatten(1, -2), linear=False, transposed=True)


def _affine_of_norm(
    module: nn.Module, normalise: Callable[[Tensor], Tensor], shape: Callable[[Tensor], Tensor]
) -> Iterable[Block]:
    """Blocks of ``weight * normalise(x) + bias``, exact: elementwise, hence one dense block each."""
    if module.weight is not None:
        yield Block("weight", lambda x: shape(normalise(x)), shape, elementwise=True, linear=False)
    if getattr(module, "bias", None) is not None:
        yield Block("bias", None, shape, elementwise=True)


@register_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm(module: nn.modules.batchnorm._BatchNorm) -> Iterable[Block]:
    """With the statistics of evaluation, an affine map per channel."""
    if module.training or not module.track_running_stats:
        raise NotImplementedError(
            "batch statistics tie the inputs of a batch together; call model.eval() with running statistics"
        )
    return _affine_of_norm(
        module,
        lambda x: F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps),
        _channels_second,
    )


@register_rule(nn.GroupNorm)
def group_norm(module: nn.GroupNorm) -> Iterable[Block]:
    """Shared over the axes after the channels."""
    return _affine_of_norm(
        module, lambda x: F.group_norm(x, module.num_groups, eps=module.eps), _channels_second
    )


def _last_axes(n: int) -> Callable[[Tensor], Tensor]:
    return lambda x: _positions_last(x.flatten(-n))


@register_rule(nn.LayerNorm)
def layer_norm(module: nn.LayerNorm) -> Iterable[Block]:
    """Shared over the axes before the normalised ones."""
    shape = module.normalized_shape
    return _affine_of_norm(
        module, lambda x: F.layer_norm(x, shape, eps=module.eps), _last_axes(len(shape))
    )


@register_rule(nn.RMSNorm)
def rms_norm(module: nn.RMSNorm) -> Iterable[Block]:
    """Shared over the axes before the normalised ones."""
    shape = module.normalized_shape
    return _affine_of_norm(
        module, lambda x: F.rms_norm(x, shape, eps=module.eps), _last_axes(len(shape))
    )


def blocks_of(module: nn.Module) -> list[Block] | str:
    """Return the blocks of a module's own parameters, or the reason why there are none."""
    rule = rule_of(module)
    if rule is None:
        return f"{type(module).__name__} has no rule"
    try:
        return list(rule(module))
    except NotImplementedError as error:
        return f"{type(module).__name__}: {error}"


@dataclass(frozen=True)
class Coverage:
    """What is known of one parameter: its block, or the reason why there is none."""

    name: str
    parameter: nn.Parameter
    modules: tuple[tuple[str, nn.Module], ...]
    reason: str | None

    @property
    def supported(self) -> bool:
        return self.reason is None


def coverage(model: nn.Module) -> list[Coverage]:
    """Match every parameter that requires grad, in the order of ``model.parameters()``, with the modules that own it."""
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((path, module, name))
    found = []
    for full_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        reason = None
        kinds = {
            (type(module), name, getattr(module, "groups", 1), getattr(module, "slots", 1))
            for _, module, name in owners[id(parameter)]
        }
        if len(kinds) > 1:
            where = " and ".join(
                f"{path or 'model'}.{name} ({type(m).__name__})"
                for path, m, name in owners[id(parameter)]
            )
            reason = f"shared by modules of different kinds: {where}"
        for _, module, name in owners[id(parameter)]:
            blocks = blocks_of(module)
            if isinstance(blocks, str):
                reason = reason or blocks
            elif name not in {block.parameter for block in blocks}:
                reason = reason or f"the rule of {type(module).__name__} has no block for it"
        modules = tuple((path, module) for path, module, _ in owners[id(parameter)])
        found.append(Coverage(full_name, parameter, modules, reason))
    return found
