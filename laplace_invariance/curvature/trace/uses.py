"""Parameters that a model uses as functions do, outside of the layers that rules know.

A class token that is concatenated, a position embedding that is added, a scale, a table of biases
that is gathered from, ``F.linear(x, self.weight)``: there is no module whose input and output would
explain such a parameter. But the operations can be seen while the model runs. Those that only
rearrange a parameter (views, gathers) are followed by a *map*, a tensor of integers that says for
each element which one of the parameter it is; operations in which a parameter, or a rearranged one,
meets data become calls with blocks, as those of layers are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from laplace_invariance.curvature.rules import (
    AnyBlock,
    ElementwiseBlock,
    Map,
    MatrixBlock,
    channels_second,
    convolution,
    last_axes,
    positions_last,
    standardised,
)
from laplace_invariance.curvature.trace.parts import ELSEWHERE, Answers, Part, whole

__all__ = ["Uses"]

# Operations that rearrange the elements of a tensor, by name.
REARRANGING = {
    "__getitem__",
    "chunk",
    "expand",
    "expand_as",
    "flatten",
    "flip",
    "index_select",
    "movedim",
    "permute",
    "repeat",
    "reshape",
    "reshape_as",
    "roll",
    "select",
    "split",
    "squeeze",
    "t",
    "tile",
    "transpose",
    "unbind",
    "unflatten",
    "unsqueeze",
    "view",
    "view_as",
}
# Those that change at most the type, the device or the layout.
COPYING = {"clone", "contiguous", "float", "double", "to", "type", "type_as"}
# Attributes that rearrange.
ATTRIBUTES = {"T", "mT", "data"}

Record = Callable[[Tensor, Tensor, list[tuple[int, AnyBlock]]], Tensor]


class Uses(TorchFunctionMode):
    """Sees every operation on some parameters, and records where they meet data.

    Args:
        parameters: Parameters by index.
        buffers: Tensors that are constants of the model, not data.
        record: Called with input, output and blocks of an operation; returns the output that the
            model goes on with.
        answers: What earlier passes found out about the parameters.
    """

    def __init__(
        self,
        parameters: Mapping[int, nn.Parameter],
        buffers: Sequence[Tensor],
        record: Record,
        answers: Answers,
    ) -> None:
        super().__init__()
        self._record = record
        self._answers = answers
        self._known: dict[int, list[Part]] = {}
        self._alive: list[Tensor] = []  # so that no other tensor gets the id of a known one
        self._constants = {id(buffer) for buffer in buffers}
        for index, parameter in parameters.items():
            self._know(parameter, [whole(index, parameter)])

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._among(args) and not self._among(kwargs.values()):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in ATTRIBUTES or name in REARRANGING or name in COPYING:
            return self._rearranged(name, func, args, kwargs)
        handle = getattr(self, f"_on_{name.strip('_')}", None)
        if handle is None:
            return func(*args, **kwargs)
        return handle(func, *args, **kwargs)

    # Following.

    def _among(self, values: Any) -> bool:
        """Return whether a known tensor is among arguments, or in a list of them."""
        for value in values:
            if id(value) in self._known and isinstance(value, Tensor):
                return True
            if isinstance(value, list | tuple) and self._among(value):
                return True
        return False

    def _know(self, tensor: Tensor, parts: list[Part]) -> None:
        self._known[id(tensor)] = parts
        self._alive.append(tensor)

    def _parts(self, tensor: Any) -> list[Part]:
        return self._known.get(id(tensor), []) if isinstance(tensor, Tensor) else []

    def _rearranged(self, name: str, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """Apply an operation to a known tensor and to its maps alike."""
        output = func(*args, **kwargs)
        tensor, *rest = args
        parts = self._parts(tensor)
        if not parts or self._among(rest):
            return output
        outputs = [output] if isinstance(output, Tensor) else list(output)
        found: list[list[Part]] = [[] for _ in outputs]
        for part in parts:
            moved = part.map
            if name not in COPYING and name != "data":
                moved = func(part.map, *rest, **kwargs)
            pieces = [moved] if isinstance(moved, Tensor) else list(moved)
            given = [tuple(rest[0].shape)] if name.endswith("_as") and rest else rest
            step = (name, self._named(given), self._named(kwargs))
            for i, (piece, own) in enumerate(zip(pieces, found, strict=True)):
                own.append(part.moved(piece, *step, i))
        for one, own in zip(outputs, found, strict=True):
            self._know(one, own)
        return output

    def _named(self, value: Any) -> Any:
        """Return arguments with constants of the model by their names, for histories."""
        if isinstance(value, Tensor) and id(value) in self._constants:
            return ("constant", id(value), value._version)
        if isinstance(value, list | tuple):
            return [self._named(entry) for entry in value]
        if isinstance(value, dict):
            return {name: self._named(entry) for name, entry in value.items()}
        return value

    def _on_embedding(
        self, func: Any, places: Tensor, weight: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """A gather of rows, where an embedding is called once for all inputs."""
        output = func(places, weight, *args, **kwargs)
        step = ("embedding", self._named(places))
        self._know(output, [part.moved(part.map[places], *step) for part in self._parts(weight)])
        return output

    # Meeting data.

    def _on_add(self, func: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        output = func(x, y, *args, **kwargs)
        if args or kwargs:
            return output
        return self._sum(output, x, y)

    _on_add_ = _on_iadd = _on_radd = _on_add

    def _on_sub(self, func: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        output = func(x, y, *args, **kwargs)
        if args or kwargs:
            return output
        if self._parts(y):
            return output if self._parts(x) else self._meet(output, x, self._parts(y), sign=-1)
        return self._sum(output, x, y)

    _on_sub_ = _on_isub = _on_sub

    def _sum(self, output: Tensor, x: Any, y: Any) -> Tensor:
        """Record a sum, or follow it if nothing in it is data."""
        terms = (x, y)
        parts = [part for term in terms for part in self._parts(term)]
        data = [t for t in terms if not self._parts(t) and not self._is_constant(t)]
        if data:
            return self._meet(output, data[0], parts)
        shape = tuple(output.shape)
        self._know(output, [part.moved(part.map.expand(shape), "sum", shape) for part in parts])
        return output

    def _is_constant(self, value: Any) -> bool:
        return not isinstance(value, Tensor) or id(value) in self._constants

    def _meet(
        self, output: Tensor, x: Tensor, parts: list[Part], sign: int = 1, is_factor: bool = False
    ) -> Tensor:
        """Record that parts were added to data, or multiplied with it."""
        found = [(p.index, self._answers.spread(p, output.shape, sign, is_factor)) for p in parts]
        return self._record(x, output, [(i, block) for i, block in found if block is not None])

    def _on_mul(self, func: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        output = func(x, y, *args, **kwargs)
        known = [self._parts(x), self._parts(y)]
        if all(known) or args or kwargs:
            return output
        parts, other = (known[0], y) if known[0] else (known[1], x)
        if not isinstance(other, Tensor) or self._is_constant(other):
            return output
        return self._meet(output, other.expand(output.shape), parts, is_factor=True)

    _on_mul_ = _on_imul = _on_rmul = _on_mul

    def _on_addcmul(self, func: Any, x: Tensor, y: Tensor, z: Tensor, **kwargs: Any) -> Any:
        output = func(x, y, z, **kwargs)
        if kwargs:
            return output
        known, other = (y, z) if self._parts(y) else (z, y)
        if self._parts(other):
            return output
        factor = other.expand(output.shape)
        output = self._meet(output, factor, self._parts(known), is_factor=True)
        return self._meet(output, output, self._parts(x))

    def _on_cat(self, func: Any, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Any:
        dim = kwargs.pop("axis", kwargs.pop("dim", dim))
        output = func(tensors, dim=dim)
        dim %= output.ndim
        start, found = 0, []
        for tensor in tensors:
            size = tensor.shape[dim]
            for part in self._parts(tensor):
                place = part.map.new_full(output.shape, ELSEWHERE)
                place.narrow(dim, start, size).copy_(part.map)
                found.append(part.moved(place, "cat", dim, start, tuple(output.shape)))
            start += size
        if all(self._parts(tensor) or self._is_constant(tensor) for tensor in tensors):
            self._know(output, found)
            return output
        return self._meet(output, output, found)

    _on_concat = _on_concatenate = _on_cat

    # Functions of layers.

    def _on_linear(self, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        output = func(x, weight, bias)
        return self._matrix(x, output, weight, bias)

    def _on_matmul(self, func: Any, x: Tensor, y: Tensor) -> Any:
        output = func(x, y)
        if self._parts(x) or y.ndim != 2:
            return output
        return self._matrix(x, output, y, None, transposed=True)

    _on_mm = _on_rmatmul = _on_matmul

    def _on_addmm(self, func: Any, bias: Tensor, x: Tensor, y: Tensor, **kwargs: Any) -> Any:
        output = func(bias, x, y, **kwargs)
        if kwargs or self._parts(x):
            return output
        return self._matrix(x, output, y, bias, transposed=True)

    def _matrix(
        self,
        x: Tensor,
        output: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool = False,
    ) -> Tensor:
        """Record a product with a matrix, stored ``[d_out, d_in]`` or transposed."""
        blocks: list[tuple[int, AnyBlock]] = []
        for part in self._parts(weight):
            is_matrix = self._answers.is_matrix(part)
            if is_matrix or self._answers.is_transposed(part):
                stored = transposed if is_matrix else not transposed
                matrix = MatrixBlock("", positions_last, positions_last, transposed=stored)
                blocks.append((part.index, matrix))
        for part in self._parts(bias):
            block = self._answers.spread(part, output.shape, 1, False)
            if block is not None:
                blocks.append((part.index, block))
        return self._record(x, output, blocks)

    def _on_conv(self, func: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        names = ("bias", "stride", "padding", "dilation", "groups")
        given = dict(zip(names, args, strict=False)) | kwargs
        output = func(x, weight, **given)
        axes = weight.ndim - 2
        module = SimpleNamespace(
            weight=weight,
            bias=given.get("bias"),
            kernel_size=tuple(weight.shape[2:]),
            stride=_tuple(given.get("stride", 1), axes),
            padding=_padding(given.get("padding", 0), axes),
            dilation=_tuple(given.get("dilation", 1), axes),
            groups=given.get("groups", 1),
            padding_mode="zeros",
        )
        blocks: list[tuple[int, AnyBlock]] = []
        for block in convolution(module):
            tensor = weight if isinstance(block, MatrixBlock) else module.bias
            found = [part for part in self._parts(tensor) if self._answers.is_in_order(part)]
            blocks += [(part.index, block) for part in found]
        return self._record(x, output, blocks)

    _on_conv1d = _on_conv2d = _on_conv3d = _on_conv

    def _on_layer_norm(
        self,
        func: Any,
        x: Tensor,
        shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Any:
        output = func(x, shape, weight, bias, eps)
        normalise = lambda x: F.layer_norm(x, shape, eps=eps)  # noqa: E731
        return self._affine(x, output, weight, bias, normalise, last_axes(len(shape)))

    def _on_rms_norm(
        self,
        func: Any,
        x: Tensor,
        shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Any:
        output = func(x, shape, weight, eps)
        normalise = lambda x: F.rms_norm(x, shape, eps=eps)  # noqa: E731
        return self._affine(x, output, weight, None, normalise, last_axes(len(shape)))

    def _on_group_norm(
        self,
        func: Any,
        x: Tensor,
        groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Any:
        output = func(x, groups, weight, bias, eps)
        normalise = lambda x: F.group_norm(x, groups, eps=eps)  # noqa: E731
        return self._affine(x, output, weight, bias, normalise, channels_second)

    def _on_batch_norm(
        self,
        func: Any,
        x: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        output = func(x, mean, var, weight, bias, training, momentum, eps)
        if training or mean is None or var is None:
            return output
        normalise = lambda x: standardised(x, mean, var, eps)  # noqa: E731
        return self._affine(x, output, weight, bias, normalise, channels_second)

    def _affine(
        self,
        x: Tensor,
        output: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        normalise: Map,
        shape: Map,
    ) -> Tensor:
        """Record ``weight * normalise(x) + bias``."""
        blocks: list[tuple[int, AnyBlock]] = []
        for part in self._parts(weight):
            if self._answers.is_in_order(part):
                block = ElementwiseBlock("", lambda x: shape(normalise(x)), shape)
                blocks.append((part.index, block))
        for part in self._parts(bias):
            if self._answers.is_in_order(part):
                blocks.append((part.index, ElementwiseBlock("", None, shape)))
        return self._record(x, output, blocks)

    # Attention.

    def _on_scaled_dot_product_attention(
        self, func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Attention to which a known tensor is added, in the steps that it stands for."""
        names = ("attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        mask = given.get("attn_mask")
        others = given.get("dropout_p") or given.get("is_causal") or given.get("enable_gqa")
        if not self._parts(mask) or others:
            return func(query, key, value, *args, **kwargs)
        scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
        scores = (scale * query) @ key.mT
        assert isinstance(mask, Tensor)
        return self._sum(scores + mask, scores, mask).softmax(-1) @ value

    def _on_multi_head_attention_forward(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Self-attention of ``nn.MultiheadAttention``, whose projections are linear layers."""
        given = dict(zip(MULTI_HEAD, args, strict=False)) | kwargs
        query, weight = given["query"], given["in_proj_weight"]
        plain = query is given["key"] is given["value"] and weight is not None and query.ndim == 3
        extras = ("bias_k", "bias_v", "add_zero_attn", "static_k", "static_v")
        if not plain or any(given.get(name) not in (None, False) for name in extras):
            return func(*args, **kwargs)
        if given.get("training") and given["dropout_p"]:
            return func(*args, **kwargs)
        x = query.transpose(0, 1)  # the batch first
        n, length, width = x.shape
        heads = given["num_heads"]
        packed = self._on_linear(F.linear, x, weight, given["in_proj_bias"])
        q, k, v = packed.reshape(n, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(width // heads)
        scores = scores + _mask(given, scores)
        shares = scores.softmax(-1)
        mixed = (shares @ v).transpose(1, 2).reshape(n, length, width)
        output = self._on_linear(
            F.linear, mixed, given["out_proj_weight"], given["out_proj_bias"]
        ).transpose(0, 1)
        if not given.get("need_weights", True):
            return output, None
        return output, shares.mean(1) if given.get("average_attn_weights", True) else shares


MULTI_HEAD = (
    "query",
    "key",
    "value",
    "embed_dim_to_check",
    "num_heads",
    "in_proj_weight",
    "in_proj_bias",
    "bias_k",
    "bias_v",
    "add_zero_attn",
    "dropout_p",
    "out_proj_weight",
    "out_proj_bias",
)


def _mask(given: Mapping[str, Any], scores: Tensor) -> Tensor:
    """Return what masks add to scores ``[batch, heads, queries, keys]``."""
    total = scores.new_zeros(())
    n, heads, *_ = scores.shape
    for name in ("attn_mask", "key_padding_mask"):
        mask = given.get(name)
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, -math.inf)
        if name == "key_padding_mask":
            mask = mask[:, None, None]
        elif mask.ndim == 3:
            mask = mask.unflatten(0, (n, heads))
        total = total + mask
    return total


def _tuple(value: Any, axes: int) -> tuple[int, ...]:
    values = (value,) * axes if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values


def _padding(value: Any, axes: int) -> Any:
    return value if isinstance(value, str) else _tuple(value, axes)
