"""Group convolutions whose filters are sums of basis functions (S-GCONV).

The filter of a group convolution is a function of position and, if the kernel is full, of the
group element. As in :class:`SparseConv2d` it is a sum of basis functions,

    W(d, c, s, u) = sum_m weight(d, c, m) phi_m(s, u),

here on the group and the grid of the kernel (:mod:`laplace_invariance.layers.basis`). Whatever the
basis, the convolution is equivariant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from laplace_invariance.curvature.rules import AnyBlock, register_rule
from laplace_invariance.layers.basis import HasBasis
from laplace_invariance.layers.group import (
    GroupConv2d,
    GroupConvolution,
    LiftingConv2d,
    group_convolution,
)
from laplace_invariance.layers.kernels import FACTORS
from laplace_invariance.layers.sparse import sparse_blocks

__all__ = ["SparseGroupConv2d", "SparseLiftingConv2d"]


class _SparseFilter(GroupConvolution, HasBasis):
    """Weight ``[out_channels, in_channels / groups, M]`` of a filter, instead of its entries."""

    def _add_parameters(self, n_columns: int, columns: Tensor, bias: bool, **options: Any) -> None:
        n_channels = self.in_channels // self.groups
        n_elements = n_columns // n_channels  # 1 or, of a full kernel, the order of the group
        height, width = self.kernel_size
        on_group = self.group if n_elements > 1 else None
        self._add_basis((n_elements * height, width), group=on_group, **options)
        self.weight = nn.Parameter(torch.empty(self.out_channels, n_channels, self.n_anchors))
        self.bias = nn.Parameter(torch.empty(self.out_channels)) if bias else None
        self.register_buffer("columns", columns, persistent=False)
        self.reset_parameters()

    def reset_parameters(self, gain: float = 1.0) -> None:
        """Draw weights such that filters have the variance of dense ones, and biases like these."""
        bound = gain / math.sqrt(self.weight.shape[1] * self.n_points)
        nn.init.normal_(self.weight, std=bound / (math.sqrt(3) * self.amplitude()))
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def dense_weight(self) -> Tensor:
        """Return the filter ``[out_channels, in_channels / groups, points of the grid]``."""
        return self.weight @ self.matrix()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_cache": None}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {HasBasis.extra_repr(self)}"


class SparseLiftingConv2d(_SparseFilter, LiftingConv2d):
    """Convolution from images to features on a group, with filters of basis functions.

    Arguments are those of :class:`LiftingConv2d` and, for the basis on the grid of the kernel, of
    :class:`Basis`: ``kind``, ``n_anchors``, ``anchors``, ``omega``, ``learn_omega``,
    ``generator``.
    """


class SparseGroupConv2d(_SparseFilter, GroupConv2d):
    """Convolution of features on a group whose filters are sums of basis functions (S-GCONV).

    With a full kernel these are functions of group element and position, with a pointwise one of
    the position alone.

    Args:
        kernel: ``"full"`` (the default) or ``"pointwise"``. All other arguments are those of
            :class:`GroupConvolution` and, for the basis, of :class:`Basis`: ``kind``,
            ``n_anchors``, ``anchors``, ``omega``, ``learn_omega``, ``generator``.
    """

    def _add_layers(self, bias: bool, kernel: str = "full", **options: Any) -> None:
        if kernel in FACTORS:
            raise ValueError(
                f"the kernel of SparseGroupConv2d must be full or pointwise, got {kernel!r}"
            )
        super()._add_layers(bias, kernel, **options)


@register_rule(SparseLiftingConv2d, SparseGroupConv2d)
def sparse_group_convolution(module: _SparseFilter) -> Iterator[AnyBlock]:
    """As a group convolution, with patches times the basis; exact for the one number ``omega``."""

    def directional(x: Tensor) -> Tensor:
        return module.convolve(x, module.weight @ module.derivative())

    return sparse_blocks(module, group_convolution(module), directional)
