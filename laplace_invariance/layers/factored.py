"""Fully connected layers on feature maps: dense (FC), and factored over positions (F-FC).

The dense layer has one weight for every pair of channels and positions. Factored, that weight is

    theta(c', c, x', x) = theta_1(c', c, x') theta_2(c', c, x),

so that the layer is two small ones after another, each a matrix per channel:

    z(c', c) = sum_x theta_2(c', c, x) X(c, x),
    y(c', x') = sum_c theta_1(c', c, x') z(c', c).

Both are :class:`SlotLinear`, which has the curvature rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from laplace_invariance.curvature.rules import (
    AnyBlock,
    ElementwiseBlock,
    MatrixBlock,
    register_rule,
)
from laplace_invariance.layers.shapes import pair

__all__ = ["FactoredLinear2d", "FactoredMap2d", "Linear2d", "Map2d", "SlotLinear"]


class SlotLinear(nn.Module):
    """A matrix of its own for each slot, ``y(q, :) = W_q x(q, :) + bias``.

    Maps ``[n, slots, in_features]`` to ``[n, slots, out_features]``. The matrices lie side by
    side in ``weight`` ``[out_features, slots * in_features]``; the bias ``[out_features]`` is
    shared by all slots.

    Args:
        slots: Number of matrices.
        in_features: Number of columns of each matrix.
        out_features: Number of rows of each matrix.
        bias: Whether there is a bias, zero at first.
    """

    def __init__(self, slots: int, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.slots = slots
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, slots * in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, scale: float = 1.0) -> None:
        """Draw weights of variance ``scale^2 / in_features``, and set the bias to zero."""
        nn.init.normal_(self.weight, std=scale / math.sqrt(self.in_features))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        # einsum("nqi,oqi->nqo"), a third faster on contiguous matrices
        weight = rearrange(self.weight, "o (q i) -> q o i", q=self.slots).contiguous()
        x = x.transpose(0, 1).contiguous()
        if self.bias is None:
            return torch.bmm(x, weight.mT).transpose(0, 1)
        return torch.baddbmm(self.bias, x, weight.mT).transpose(0, 1)

    def extra_repr(self) -> str:
        return (
            f"slots={self.slots}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )


@register_rule(SlotLinear)
def slot_linear(module: SlotLinear) -> Iterator[AnyBlock]:
    """Shared over slots, each of which meets its own columns."""
    yield MatrixBlock(
        "weight",
        lambda x: x.unsqueeze(1),
        lambda g: g.unsqueeze(1),
        slots=module.slots,
        slotted_columns=True,
    )
    if module.bias is not None:
        yield ElementwiseBlock("bias", None, lambda g: g)


class Map2d(nn.Module):
    """Base class of layers between feature maps of known size.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        in_shape: Height and width of the input; one number stands for both.
        out_shape: Height and width of the output; None is that of the input.
        bias: Whether there are biases, zero at first.
        scale: Scale of the initial outputs for inputs of unit variance. Beside an equivariant path
            a layer should start near zero (0.01), alone at 1.
        **options: Further options of a subclass.

    Raises:
        ValueError: If there are no channels, or a size is not positive.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: int | Sequence[int],
        out_shape: int | Sequence[int] | None = None,
        bias: bool = True,
        scale: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.in_shape = pair("in_shape", in_shape)
        self.out_shape = self.in_shape if out_shape is None else pair("out_shape", out_shape)
        if min(in_channels, out_channels) < 1:
            raise ValueError(
                f"{type(self).__name__} needs channels, got {in_channels} and {out_channels}"
            )
        self._add_layers(bias, scale, **options)

    def _add_layers(self, bias: bool, scale: float, *args: Any, **options: Any) -> None:
        raise NotImplementedError

    def _check(self, x: Tensor) -> None:
        expected = (self.in_channels, *self.in_shape)
        if x.ndim != 4 or tuple(x.shape[1:]) != expected:
            raise ValueError(
                f"{type(self).__name__} was built for [n, {', '.join(map(str, expected))}], "
                f"got shape {list(x.shape)}"
            )

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, "
            f"in_shape={self.in_shape}, out_shape={self.out_shape}"
        )


class Linear2d(Map2d):
    """Dense layer between feature maps (FC): a weight for every pair of channels and positions.

    Arguments are those of :class:`Map2d`. There is a bias for every channel and position, and
    weights have variance ``scale^2 / (in_channels * positions)``.
    """

    def _add_layers(self, bias: bool, scale: float) -> None:
        n_in = self.in_channels * math.prod(self.in_shape)
        n_out = self.out_channels * math.prod(self.out_shape)
        self.linear = nn.Linear(n_in, n_out, bias)
        nn.init.normal_(self.linear.weight, std=scale / math.sqrt(n_in))
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        return self.linear(x.flatten(1)).unflatten(1, (self.out_channels, *self.out_shape))


class FactoredMap2d(Map2d):
    """Base class of layers between feature maps with two factors, ``theta_1`` and ``theta_2``.

    The output is a product of both, so where one vanishes the other has no gradient. Arguments are
    those of :class:`Map2d`; ``scale`` is that of ``theta_1``.
    """

    theta_1: SlotLinear
    theta_2: SlotLinear

    @property
    def closed_precisions(self) -> dict[str, float]:
        """Initial prior precision of parts that stay open when :func:`closed_paths` closes a path.

        For ``theta_2`` it is four times its number of inputs, which for ``FactoredLinear2d`` is
        four times the precision of its initial weights, whatever its size.
        """
        return {"theta_2": 4.0 * self.theta_2.in_features}


class FactoredLinear2d(FactoredMap2d):
    """Fully connected layer between feature maps, factored over positions (F-FC).

    ``y(c', x') = sum_c theta_1(c', c, x') sum_x theta_2(c', c, x) X(c, x)``, with
    ``theta_2.weight`` stored as ``[c', c x]`` and ``theta_1.weight`` as ``[x', c' c]``. Arguments
    are those of :class:`Map2d`. There is a bias per output channel on ``z``, shared by input
    channels, and one per output position, shared by channels.
    """

    def _add_layers(self, bias: bool, scale: float) -> None:
        n_in, n_out = self.in_channels, self.out_channels
        self.theta_2 = SlotLinear(n_in, math.prod(self.in_shape), n_out, bias)
        self.theta_1 = SlotLinear(n_out, n_in, math.prod(self.out_shape), bias)
        self.theta_1.reset_parameters(scale)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        z = self.theta_2(x.flatten(2)).mT
        return self.theta_1(z).unflatten(2, self.out_shape)
