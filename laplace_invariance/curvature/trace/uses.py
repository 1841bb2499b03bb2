"""Parameters that a model uses as functions do, outside of the layers that rules know.

``F.linear(x, self.weight)``, ``F.conv2d``, norms and attention: functions in which a parameter, or
what became of it, does what it does in a layer. Other operations are followed by
:mod:`~laplace_invariance.curvature.trace.following`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
from laplace_invariance.curvature.trace.following import Following

__all__ = ["Uses"]


class Uses(Following):
    """Sees every operation on some parameters, and records where they meet data or make layers."""

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
