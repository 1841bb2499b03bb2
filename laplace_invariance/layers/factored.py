"""Fully connected layers on feature maps: dense (FC), and factored over input and output positions (F-FC).

The dense layer has one weight for every pair of channels and positions. Factored, that weight is

    theta(c', c, x', x) = theta_1(c', c, x') theta_2(c', c, x),

so that the layer is two small ones after another, each a matrix per channel: ``z(c', c) = sum_x theta_2(c', c, x) X(c, x)``
and ``y(c', x') = sum_c theta_1(c', c, x') z(c', c)``. Both are :class:`SlotLinear`, which has the curvature rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from laplace_invariance.curvature.rules import Block, register_rule

__all__ = ["FactoredLinear2d", "Linear2d", "Map2d", "SlotLinear"]


class SlotLinear(nn.Module):
    """A matrix of its own for each slot: ``y(q, :) = W_q x(q, :) + bias``, from ``[n, slots, d_in]`` to ``[n, slots, d_out]``.

    The matrices lie side by side in ``weight`` ``[d_out, slots * d_in]``; the bias ``[d_out]`` is shared by all slots.

    Args:
        slots: number of matrices.
        in_features: their columns.
        out_features: their rows.
        bias: whether there is one, zero at first.
    """

    def __init__(self, slots: int, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.slots, self.in_features, self.out_features = slots, in_features, out_features
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
        weight = (
            self.weight.unflatten(1, (self.slots, self.in_features)).transpose(0, 1).contiguous()
        )
        x = x.transpose(0, 1).contiguous()
        y = torch.bmm(x, weight.mT) if self.bias is None else torch.baddbmm(self.bias, x, weight.mT)
        return y.transpose(0, 1)

    def extra_repr(self) -> str:
        sizes = (
            f"slots={self.slots}, in_features={self.in_features}, out_features={self.out_features}"
        )
        return f"{sizes}, bias={self.bias is not None}"


@register_rule(SlotLinear)
def slot_linear(module: SlotLinear) -> Iterable[Block]:
    """Shared over slots, each of which meets its own columns."""
    yield Block(
        "weight",
        lambda x: x.unsqueeze(1),
        lambda g: g.unsqueeze(1),
        slots=module.slots,
        slotted_columns=True,
    )
    if module.bias is not None:
        yield Block("bias", None, lambda g: g, elementwise=True)


class Map2d(nn.Module):
    """What layers between feature maps of known size have in common.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        in_shape: height and width of the input; a number stands for both.
        out_shape: height and width of the output; None is that of the input.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: int | Sequence[int],
        out_shape: int | Sequence[int] | None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.in_shape = _pair("in_shape", in_shape)
        self.out_shape = self.in_shape if out_shape is None else _pair("out_shape", out_shape)
        if min(in_channels, out_channels) < 1:
            raise ValueError(
                f"{type(self).__name__} needs channels, got {in_channels} and {out_channels}"
            )

    def _check(self, x: Tensor) -> None:
        expected = (self.in_channels, *self.in_shape)
        if x.ndim != 4 or tuple(x.shape[1:]) != expected:
            raise ValueError(
                f"{type(self).__name__} was built for [n, {', '.join(map(str, expected))}], got shape {list(x.shape)}"
            )

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, in_shape={self.in_shape}, out_shape={self.out_shape}"


def _pair(name: str, shape: int | Sequence[int]) -> tuple[int, int]:
    pair = (shape, shape) if isinstance(shape, int) else tuple(shape)
    if len(pair) != 2 or min(pair) < 1:
        raise ValueError(f"{name} must be height and width, both positive, got {shape!r}")
    return pair


class Linear2d(Map2d):
    """Dense layer between feature maps (FC): a weight for every pair of channels and positions.

    Args:
        in_channels, out_channels: channels of input and output.
        in_shape, out_shape: height and width of input and output; None is that of the input.
        bias: one per channel and position.
        scale: of the initial weights, which have variance ``scale^2 / (in_channels * positions)``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: int | Sequence[int],
        out_shape: int | Sequence[int] | None = None,
        bias: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__(in_channels, out_channels, in_shape, out_shape)
        n_in, n_out = (
            in_channels * math.prod(self.in_shape),
            out_channels * math.prod(self.out_shape),
        )
        self.linear = nn.Linear(n_in, n_out, bias)
        nn.init.normal_(self.linear.weight, std=scale / math.sqrt(n_in))
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        return self.linear(x.flatten(1)).unflatten(1, (self.out_channels, *self.out_shape))


class FactoredLinear2d(Map2d):
    """Fully connected layer between feature maps, factored over positions (F-FC).

    ``y(c', x') = sum_c theta_1(c', c, x') sum_x theta_2(c', c, x) X(c, x)``, with ``theta_2.weight`` stored as
    ``[c', c x]`` and ``theta_1.weight`` as ``[x', c' c]``.

    Args:
        in_channels, out_channels: channels of input and output.
        in_shape, out_shape: height and width of input and output; None is that of the input.
        bias: one per output channel on ``z``, shared by input channels, and one per output position, shared by channels.
        scale: of the initial ``theta_1``. Beside an equivariant path the layer should start near zero (0.01), alone at 1.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: int | Sequence[int],
        out_shape: int | Sequence[int] | None = None,
        bias: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__(in_channels, out_channels, in_shape, out_shape)
        self.theta_2 = SlotLinear(in_channels, math.prod(self.in_shape), out_channels, bias)
        self.theta_1 = SlotLinear(out_channels, in_channels, math.prod(self.out_shape), bias)
        self.theta_1.reset_parameters(scale)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        z = self.theta_2(x.flatten(2)).mT
        return self.theta_1(z).unflatten(2, self.out_shape)
