"""What KFAC must know of a layer: which matrix it applies, to what, and at which positions.

A *rule* maps a module to its blocks, one per parameter. With ``x`` the module's input and ``g``
the gradient of some scalar with respect to its output, the gradient with respect to the
parameter is, for each row (one input, one sample),

    MatrixBlock:       sum_r g_r (x) a_r,   a = block.a(x)  [rows, shared, d_in]
                                            g = block.g(g)  [rows, shared, d_out]
    ElementwiseBlock:  sum_r g_r * a_r,     both            [rows, shared, d]

where ``r`` runs over the positions that share the parameter. Kronecker factors, diagonal,
Jacobian and Gram matrices are then computed once for all layers. A subclass may compute anything,
but inherits the rule of its class: whether a rule explains the gradients of a module is verified
on the first inputs (``trace.matching``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace_invariance.curvature import kfac
from laplace_invariance.curvature.patches import extract_patches, pad, padding_sides

__all__ = [
    "AnyBlock",
    "Block",
    "ElementwiseBlock",
    "Map",
    "MatrixBlock",
    "blocks_of",
    "channels_second",
    "convolution",
    "extract_patches",
    "last_axes",
    "no_factors",
    "pad",
    "padding_sides",
    "positions_last",
    "register_rule",
    "rules",
    "standardised",
]


Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class MatrixBlock:
    """How a parameter enters a layer's output as a matrix: ``sum_r g_r (x) a_r`` is its gradient.

    Attributes:
        parameter: Name of the parameter in the module, e.g. ``"weight"``.
        a: Maps the module's input ``[rows, ...]`` to ``[rows, shared, d_in]``.
        g: Maps gradients of the module's output ``[rows, ...]`` to ``[rows, shared, d_out]``;
            always linear.
        linear: Whether ``a`` is linear in the input, so that samples may be averaged before it
            instead of after.
        slots: Number of slots. Positions then have a further axis, ``[rows, shared, slots, d]``,
            and slot ``q`` meets only the ``q``-th part of the parameter's rows (groups of a
            convolution).
        slotted_columns: Whether slots split the columns of the parameter instead of its rows;
            the axis is then there even for one slot.
        transposed: Whether the parameter is stored as ``[d_in, d_out]``.
        counts: For an ``a`` that is one-hot, or zero, maps the input to how often each of its
            entries is one, ``[d_in]``: the diagonal of ``A`` if there is one sample.
        rows: Number of rows of the matrix, if not the length of the parameter's first axis.
    """

    parameter: str
    a: Map
    g: Map
    linear: bool = True
    slots: int = 1
    slotted_columns: bool = False
    transposed: bool = False
    counts: Map | None = None
    rows: int | None = None

    def gradient_map(self, x: Tensor, batch: int) -> Map:
        """Return the map from gradients of the module's output to those of the parameter.

        Args:
            x: The module's input ``[rows, ...]``.
            batch: Number of inputs; samples and positions are summed over.

        Returns:
            A function from ``[rows, ...]`` to ``[batch, numel]``, exact for each input.
        """
        a = self.a(x)
        return lambda g: kfac.jacobian(
            a, self.g(g), batch, slotted_columns=self.slotted_columns, transposed=self.transposed
        )

    def factors(
        self, a: Tensor, g: Tensor, weights: Tensor | None, N: int, approx: str, per_slot: bool
    ) -> list[Tensor]:
        """Return :func:`kfac.factors`, in the order in which the parameter is stored."""
        slots = {"slotted_columns": self.slotted_columns, "per_slot": per_slot}
        outer, inner = kfac.factors(a, g, weights, N, approx, **slots)
        return [inner, outer] if self.transposed else [outer, inner]


@dataclass(frozen=True)
class ElementwiseBlock:
    """How a parameter enters a layer's output elementwise: ``sum_r g_r * a_r`` is its gradient.

    Attributes:
        parameter: Name of the parameter in the module, e.g. ``"bias"``.
        a: Maps the module's input ``[rows, ...]`` to ``[rows, shared, d]``; None stands for ones
            (a bias).
        g: Maps gradients of the module's output ``[rows, ...]`` to ``[rows, shared, d]``; always
            linear.
    """

    parameter: str
    a: Map | None
    g: Map

    def gradient_map(self, x: Tensor, batch: int) -> Map:
        """Return the map of gradients, as :meth:`MatrixBlock.gradient_map`."""
        a = None if self.a is None else self.a(x)
        return lambda g: kfac.elementwise_jacobian(a, self.g(g), batch)


AnyBlock = MatrixBlock | ElementwiseBlock


def no_factors(
    block: AnyBlock | None, parameter: Tensor, per_slot: bool, counts: bool
) -> list[Tensor]:
    """Return Kronecker factors of no curvature, in the shapes that others would have.

    Args:
        block: Block of the parameter, None for one without a rule.
        parameter: The parameter.
        per_slot: Whether matrices have a gradient factor for each slot of their columns.
        counts: Whether one-hot inputs are counted, which makes their factor a diagonal.
    """
    if block is None:
        return [parameter.new_zeros(parameter.numel())]
    if isinstance(block, ElementwiseBlock):
        return [parameter.new_zeros(parameter.numel(), parameter.numel())]
    rows = block.rows or len(parameter)
    columns = parameter.numel() // rows
    if counts and block.counts is not None:
        if block.transposed:
            return [parameter.new_zeros(rows), parameter.new_zeros(columns, columns)]
        return [parameter.new_zeros(rows, rows), parameter.new_zeros(columns)]
    slots = block.slots
    outer: tuple[int, ...] = (rows, rows)
    if block.slotted_columns:
        columns //= slots
        if per_slot:
            outer = (slots, rows, rows)
        return [parameter.new_zeros(outer), parameter.new_zeros(slots, columns, columns)]
    if slots == rows > 1:
        outer = (slots,)
    elif slots > 1:
        outer = (slots, rows // slots, rows // slots)
    return [parameter.new_zeros(outer), parameter.new_zeros(columns, columns)]


def Block(
    parameter: str,
    a: Map | None,
    g: Map,
    elementwise: bool = False,
    linear: bool = True,
    **layout: Any,
) -> AnyBlock:
    """Return a block of either kind. Deprecated: call its class instead."""
    warnings.warn(
        "Block is deprecated: return a MatrixBlock, or an ElementwiseBlock for elementwise=True",
        DeprecationWarning,
        stacklevel=2,
    )
    if elementwise or a is None:
        return ElementwiseBlock(parameter, a, g)
    return MatrixBlock(parameter, a, g, linear, **layout)


Module = TypeVar("Module", bound=nn.Module)
Rule = Callable[[Module], Iterable[AnyBlock]]
_rules: dict[type[nn.Module], Rule[Any]] = {}


def register_rule(
    *types: type[Module], overwrite: bool = False
) -> Callable[[Rule[Module]], Rule[Module]]:
    """Register the decorated function as the rule of the given module types.

    The function takes the module and returns a block for each of its own parameters; it may
    raise ``NotImplementedError`` with a reason for a configuration that it does not cover. A
    scale layer ``y = s * x`` of width ``d`` would be::

        @register_rule(Scale)
        def scale(module):
            return [ElementwiseBlock("s", lambda x: x.unsqueeze(1), lambda g: g.unsqueeze(1))]

    Args:
        *types: Module classes; subclasses without a rule of their own inherit it.
        overwrite: Replace a rule that is there already instead of raising.

    Returns:
        The decorator, which returns the function unchanged.

    Raises:
        ValueError: A type has a rule already, on decoration.
    """

    def decorate(rule: Rule[Module]) -> Rule[Module]:
        for cls in types:
            if cls in _rules and not overwrite:
                raise ValueError(
                    f"{cls.__name__} has a rule already; pass overwrite=True to replace it"
                )
            _rules[cls] = rule
        return rule

    return decorate


def rules() -> dict[type[nn.Module], Rule[Any]]:
    """Return a copy of the registry."""
    return dict(_rules)


def blocks_of(module: nn.Module) -> tuple[list[AnyBlock], str]:
    """Return the blocks of a module, and why parameters of it without a block have none."""
    kind = type(module).__name__
    rule = next((_rules[cls] for cls in type(module).__mro__ if cls in _rules), None)
    if rule is None:
        return [], f"{kind} has no rule"
    try:
        return list(rule(module)), f"the rule of {kind} has no block for it"
    except NotImplementedError as error:
        return [], f"{kind}: {error}"


def positions_last(x: Tensor) -> Tensor:
    """Bring ``[rows, ..., d]`` to ``[rows, shared, d]``."""
    return x.flatten(1, -2) if x.ndim > 2 else x.unsqueeze(1)


def channels_second(x: Tensor) -> Tensor:
    """Bring ``[rows, d, ...]`` to ``[rows, shared, d]``."""
    return x.flatten(2).mT if x.ndim > 2 else x.unsqueeze(1)


@register_rule(nn.Linear)
def linear(module: nn.Linear) -> Iterator[AnyBlock]:
    """Shared over all axes between the first and the last."""
    yield MatrixBlock("weight", positions_last, positions_last)
    if module.bias is not None:
        yield ElementwiseBlock("bias", None, positions_last)


def convolution(module: Any) -> Iterator[AnyBlock]:
    """Shared over output positions; groups are slots.

    Args:
        module: Convolution of torch, or any module with the settings of one.
    """
    groups = module.groups

    def inputs(x: Tensor) -> Tensor:
        patches = extract_patches(x, module)
        if groups == 1:
            return patches.squeeze(2)
        return patches

    def gradients(g: Tensor) -> Tensor:
        if groups == 1:
            return channels_second(g)
        return g.flatten(2).mT.unflatten(-1, (groups, -1))

    yield MatrixBlock("weight", inputs, gradients, slots=groups)
    if module.bias is not None:
        yield ElementwiseBlock("bias", None, channels_second)


register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)(convolution)


@register_rule(nn.Embedding)
def embedding(module: nn.Embedding) -> Iterator[AnyBlock]:
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

    def counts(tokens: Tensor) -> Tensor:
        # not bincount, which lets the host wait for the largest token
        flat = tokens.flatten().long()
        zeros = flat.new_zeros(module.num_embeddings)
        total = zeros.scatter_add_(0, flat, torch.ones_like(flat)).to(module.weight.dtype)
        if module.padding_idx is not None:
            total[module.padding_idx] = 0
        return total

    yield MatrixBlock(
        "weight",
        one_hot,
        lambda g: g.flatten(1, -2),
        linear=False,
        transposed=True,
        counts=counts,
    )


def _affine_of_norm(
    weight: Tensor | None, bias: Tensor | None, normalise: Map, shape: Map
) -> Iterator[AnyBlock]:
    """Yield the blocks of ``weight * normalise(x) + bias``, exact: one dense block each."""
    if weight is not None:
        yield ElementwiseBlock("weight", lambda x: shape(normalise(x)), shape)
    if bias is not None:
        yield ElementwiseBlock("bias", None, shape)


@register_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm(module: nn.modules.batchnorm._BatchNorm) -> Iterator[AnyBlock]:
    """With the statistics of evaluation, an affine map per channel."""
    if module.training or not module.track_running_stats:
        raise NotImplementedError(
            "batch statistics tie the inputs of a batch together; "
            "call model.eval() with running statistics"
        )
    return _affine_of_norm(
        module.weight,
        module.bias,
        lambda x: standardised(x, module.running_mean, module.running_var, module.eps),
        channels_second,
    )


def standardised(x: Tensor, mean: Tensor | None, var: Tensor | None, eps: float) -> Tensor:
    """Return what batch norm makes of channels ``[batch, channels, ...]`` with given statistics."""
    assert mean is not None
    assert var is not None
    shape = (-1, *[1] * (x.ndim - 2))
    return (x - mean.view(shape)) * (var + eps).rsqrt().view(shape)


@register_rule(nn.GroupNorm)
def group_norm(module: nn.GroupNorm) -> Iterator[AnyBlock]:
    """Shared over the axes after the channels."""
    return _affine_of_norm(
        module.weight,
        module.bias,
        lambda x: F.group_norm(x, module.num_groups, eps=module.eps),
        channels_second,
    )


def last_axes(n: int) -> Map:
    """Return the map that flattens the last ``n`` axes, and brings the rest to ``shared``."""
    return lambda x: positions_last(x.flatten(-n))


@register_rule(nn.LayerNorm)
def layer_norm(module: nn.LayerNorm) -> Iterator[AnyBlock]:
    """Shared over the axes before the normalised ones."""
    shape = module.normalized_shape
    return _affine_of_norm(
        module.weight,
        module.bias,
        lambda x: F.layer_norm(x, shape, eps=module.eps),
        last_axes(len(shape)),
    )


@register_rule(nn.RMSNorm)
def rms_norm(module: nn.RMSNorm) -> Iterator[AnyBlock]:
    """Shared over the axes before the normalised ones."""
    shape = module.normalized_shape
    return _affine_of_norm(
        module.weight,
        None,
        lambda x: F.rms_norm(x, shape, eps=module.eps),
        last_axes(len(shape)),
    )
