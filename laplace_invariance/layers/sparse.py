"""Layers on feature maps with fewer weights than positions: S-FC and S-CONV.

Weights that depend on a position are sums ``u Phi`` of basis functions (:class:`Basis`). For a
convolution these are its filters,

    filter(c', c, x) = sum_m u(c', c, m) phi_m(x),

for a factored layer (:class:`FactoredLinear2d`) both of its parts,

    theta_2(c', c, x) = sum_m u_2(c', c, m) phi_m(x),
    theta_1(c', c, x') = sum_m u_1(c', c, m) phi'_m(x').

Both are linear in ``u``, which therefore meets what the weights of the dense layer meet, times
the basis: curvature is that of the dense layer, projected, ``A = Phi A_dense Phi^T``, always.
An ``omega`` that is a weight is one number that all entries of the output share, in the
direction ``u dPhi / domega``: its block is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace_invariance.curvature.rules import (
    AnyBlock,
    ElementwiseBlock,
    MatrixBlock,
    convolution,
    pad,
    register_rule,
)
from laplace_invariance.layers.basis import Basis, HasBasis
from laplace_invariance.layers.factored import FactoredMap2d, SlotLinear
from laplace_invariance.layers.shapes import every_entry
from laplace_invariance.layers.symmetry import Group

__all__ = ["FromBasis", "OntoBasis", "SparseConv2d", "SparseLinear2d", "sparse_blocks"]

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class OntoBasis(Basis):
    """Products of functions with the basis functions, ``x Phi^T``.

    Maps ``[n, channels, T]`` to ``[n, channels, M]``. It is built like a :class:`Basis`.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix().mT


class FromBasis(Basis):
    """Sums of basis functions, ``u Phi + bias``.

    Maps ``[n, channels, M]`` to ``[n, channels, T]``.

    Args:
        shape: Height and width of the grid of ``T`` points.
        channels: Number of functions.
        bias: Whether there is a bias, a constant per channel, zero at first.
        **basis: Options of :class:`Basis`.
    """

    def __init__(
        self, shape: Sequence[int], channels: int, bias: bool = True, **basis: Any
    ) -> None:
        super().__init__(shape, **basis)
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, u: Tensor) -> Tensor:
        y = u @ self.matrix()
        if self.bias is None:
            return y
        return y + self.bias.unsqueeze(-1)


def _omega(module: HasBasis, directional: Callable[[Tensor], Tensor]) -> Iterator[AnyBlock]:
    """Yield the block of a weight ``omega``; ``directional`` is the derivative of the output."""
    if module.learn_omega == "weight":
        yield ElementwiseBlock("omega", lambda x: every_entry(directional(x)), every_entry)


@register_rule(OntoBasis)
def onto_basis(module: OntoBasis) -> Iterator[AnyBlock]:
    """Exact: one number."""
    yield from _omega(module, lambda x: x @ module.derivative().mT)


@register_rule(FromBasis)
def from_basis(module: FromBasis) -> Iterator[AnyBlock]:
    """Exact: one number, and a bias shared over grid points."""
    yield from _omega(module, lambda u: u @ module.derivative())
    if module.bias is not None:
        yield ElementwiseBlock("bias", None, lambda g: g.mT)


class SparseLinear2d(FactoredMap2d):
    """Fully connected layer between feature maps, factored, of basis functions (S-FC).

    ``theta_2.weight`` is ``u_2`` as ``[c', c m]``, ``theta_1.weight`` ``u_1`` as ``[m', c' c]``.
    Input and output have bases of their own, ``basis_in`` and ``basis_out``, which hold their
    ``omega`` and ``anchors``; ``basis_out`` holds the bias, too, one number per output channel.

    Args:
        n_anchors: Number of anchors on the input and on the output; one number stands for both,
            None for half of the positions.
        group: Group that input and output are on, as of :class:`Basis`; one stands for both.
        **basis: Options of :class:`Basis`, for both of them: ``kind``, ``anchors``, ``omega``,
            ``learn_omega``, ``generator``. All other arguments are those of :class:`Map2d`.
    """

    def _add_layers(
        self,
        bias: bool,
        scale: float,
        n_anchors: int | Sequence[int | None] | None = None,
        group: Group | Sequence[Group | None] | None = None,
        **basis: Any,
    ) -> None:
        before, after = n_anchors if isinstance(n_anchors, Sequence) else (n_anchors, n_anchors)
        group_in, group_out = group if isinstance(group, Sequence) else (group, group)
        n_in, n_out = self.in_channels, self.out_channels
        self.basis_in = OntoBasis(self.in_shape, n_anchors=before, group=group_in, **basis)
        self.theta_2 = SlotLinear(n_in, self.basis_in.n_anchors, n_out, bias=False)
        self.basis_out = FromBasis(
            self.out_shape, n_out, bias, n_anchors=after, group=group_out, **basis
        )
        self.theta_1 = SlotLinear(n_out, n_in, self.basis_out.n_anchors, bias=False)
        self.reset_parameters(scale)

    def reset_parameters(self, scale: float = 1.0) -> None:
        """Draw weights of variance ``1 / positions`` and ``scale^2 / in_channels``; no bias."""
        density = self.basis_in.n_anchors / self.basis_in.n_points
        self.theta_2.reset_parameters(math.sqrt(density) / self.basis_in.amplitude())
        self.theta_1.reset_parameters(scale / self.basis_out.amplitude())
        if self.basis_out.bias is not None:
            nn.init.zeros_(self.basis_out.bias)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        z = self.theta_2(self.basis_in(x.flatten(2))).mT
        return self.basis_out(self.theta_1(z)).unflatten(2, self.out_shape)


class SparseConv2d(Basis):
    """Convolution whose filters are sums of basis functions (S-CONV).

    Built like ``nn.Conv2d``; ``weight`` ``[out_channels, in_channels / groups, M]`` holds
    ``u``, and :meth:`filters` are what it stands for. With ``padding_mode="circular"``, stride
    1 and the padding that keeps the size, shifts of the input around the edges are shifts of
    the output.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Height and width of the filters; one number stands for both.
        stride: Stride as of ``nn.Conv2d``.
        padding: Padding as of ``nn.Conv2d``.
        dilation: Distance of the taps, as of ``nn.Conv2d``.
        groups: Groups of channels, as of ``nn.Conv2d``.
        bias: Whether there is a bias, one number per output channel.
        padding_mode: Padding mode as of ``nn.Conv2d``.
        **basis: Options of :class:`Basis` on the grid of the kernel: ``kind``, ``n_anchors``,
            ``anchors``, ``omega``, ``learn_omega``, ``generator``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        **basis: Any,
    ) -> None:
        # torch checks its arguments, and makes pairs of numbers
        dense = nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias=False,
            padding_mode=padding_mode,
            device="meta",
        )
        super().__init__(dense.kernel_size, **basis)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = dense.kernel_size
        self.stride = dense.stride
        self.padding = dense.padding
        self.dilation = dense.dilation
        self.groups = groups
        self.padding_mode = padding_mode
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, self.n_anchors))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights such that filters have the variance of ``nn.Conv2d``, and biases like it."""
        fan_in = self.weight.shape[1] * self.n_points
        nn.init.normal_(self.weight, std=1 / (math.sqrt(3 * fan_in) * self.amplitude()))
        if self.bias is not None:
            nn.init.uniform_(self.bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def filters(self) -> Tensor:
        """Return the filters ``[out_channels, in_channels / groups, height, width]``."""
        return (self.weight @ self.matrix()).unflatten(-1, self.kernel_size)

    def convolve(self, x: Tensor, filters: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the convolution of ``x`` with other filters than the layer's own."""
        padding = self.padding
        if self.padding_mode != "zeros":
            x = pad(x, self)
            padding = (0, 0)
        return F.conv2d(x, filters, bias, self.stride, padding, self.dilation, self.groups)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"SparseConv2d was built for [n, {self.in_channels}, height, width], "
                f"got shape {list(x.shape)}"
            )
        return self.convolve(x, self.filters(), self.bias)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"groups={self.groups}, bias={self.bias is not None}, "
            f"padding_mode={self.padding_mode!r}, {super().extra_repr()}"
        )


def sparse_blocks(
    module: HasBasis, dense: Iterable[AnyBlock], directional: Callable[[Tensor], Tensor]
) -> Iterator[AnyBlock]:
    """Yield the blocks of a layer whose filters are sums of basis functions.

    Args:
        module: The layer.
        dense: Blocks of the layer with a weight for every grid point, that weight first.
        directional: Maps the input to the derivative of the output in ``omega``.
    """
    weight, *others = dense
    assert isinstance(weight, MatrixBlock)
    patches_of = weight.a

    def projected(x: Tensor) -> Tensor:
        patches = patches_of(x).unflatten(-1, (-1, module.n_points))
        return (patches @ module.matrix().mT).flatten(-2)

    yield replace(weight, a=projected)
    yield from _omega(module, directional)
    yield from others


@register_rule(SparseConv2d)
def sparse_convolution(module: SparseConv2d) -> Iterator[AnyBlock]:
    """As a convolution, with patches times the basis; exact for the one number ``omega``."""

    def directional(x: Tensor) -> Tensor:
        filters = (module.weight @ module.derivative()).unflatten(-1, module.kernel_size)
        return module.convolve(x, filters)

    return sparse_blocks(module, convolution(module), directional)
