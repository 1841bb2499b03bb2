"""Layers on feature maps with fewer weights than positions: factored (S-FC) and convolutional (S-CONV).

Weights that depend on a position are sums ``u Phi`` of basis functions (:class:`Basis`). For a convolution these are its
filters,

    filter(c', c, x) = sum_m u(c', c, m) phi_m(x),

for a factored layer (:class:`FactoredLinear2d`) both of its parts,

    theta_2(c', c, x) = sum_m u_2(c', c, m) phi_m(x),       theta_1(c', c, x') = sum_m u_1(c', c, m) phi'_m(x').

Both are linear in ``u``, which therefore meets what the weights of the dense layer meet, times the basis: curvature is that of
the dense layer, projected, ``A = Phi A_dense Phi^T``, always. An ``omega`` that is a weight is one number that all entries of
the output share, in the direction ``u dPhi / domega``: its block is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace_invariance.curvature.rules import Block, convolution, register_rule
from laplace_invariance.layers.basis import Basis
from laplace_invariance.layers.factored import Map2d, SlotLinear

__all__ = ["FromBasis", "OntoBasis", "SparseConv2d", "SparseLinear2d"]


class OntoBasis(Basis):
    """Products of functions with the basis functions, ``x Phi^T``, from ``[n, channels, T]`` to ``[n, channels, M]``.

    Args: as for :class:`Basis`.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix().mT


class FromBasis(Basis):
    """Sums of basis functions, ``u Phi + bias``, from ``[n, channels, M]`` to ``[n, channels, T]``.

    Args:
        shape: height and width of the grid of ``T`` points.
        channels: number of functions.
        bias: whether there is one, a constant per channel, zero at first.
        **basis: options of :class:`Basis`.
    """

    def __init__(
        self, shape: Sequence[int], channels: int, bias: bool = True, **basis: Any
    ) -> None:
        super().__init__(shape, **basis)
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, u: Tensor) -> Tensor:
        y = u @ self.matrix()
        return y if self.bias is None else y + self.bias.unsqueeze(-1)


def _every_entry(x: Tensor) -> Tensor:
    """Bring ``[rows, ...]`` to ``[rows, shared, 1]``: all entries share the number."""
    return x.reshape(len(x), -1, 1)


def _omega(module: Basis, directional: Callable[[Tensor], Tensor]) -> Iterable[Block]:
    """The block of ``omega`` if that is a weight; ``directional`` maps the input to the derivative of the output."""
    if module.learn_omega == "weight":
        yield Block("omega", lambda x: _every_entry(directional(x)), _every_entry, elementwise=True)


@register_rule(OntoBasis)
def onto_basis(module: OntoBasis) -> Iterable[Block]:
    """Exact: one number."""
    yield from _omega(module, lambda x: x @ module.derivative().mT)


@register_rule(FromBasis)
def from_basis(module: FromBasis) -> Iterable[Block]:
    """Exact: one number, and a bias shared over grid points."""
    yield from _omega(module, lambda u: u @ module.derivative())
    if module.bias is not None:
        yield Block("bias", None, lambda g: g.mT, elementwise=True)


class SparseLinear2d(Map2d):
    """Fully connected layer between feature maps, factored over positions, of basis functions (S-FC).

    ``theta_2.weight`` is ``u_2`` as ``[c', c m]``, ``theta_1.weight`` ``u_1`` as ``[m', c' c]``. Input and output have bases of
    their own, ``basis_in`` and ``basis_out``, which hold their ``omega`` and ``anchors``; ``basis_out`` holds the bias, too.

    Args:
        in_channels, out_channels: channels of input and output.
        in_shape, out_shape: height and width of input and output; None is that of the input.
        bias: one per output channel.
        scale: of the initial ``theta_1``. Beside an equivariant path the layer should start near zero (0.01), alone at 1.
        n_anchors: on the input and on the output; a number stands for both, None for half of each.
        **basis: further options of :class:`Basis`, for both of them: ``kind``, ``anchors``, ``omega``, ``learn_omega``,
            ``generator``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        in_shape: int | Sequence[int],
        out_shape: int | Sequence[int] | None = None,
        bias: bool = True,
        scale: float = 1.0,
        n_anchors: int | Sequence[int | None] | None = None,
        **basis: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, in_shape, out_shape)
        n_in, n_out = n_anchors if isinstance(n_anchors, Sequence) else (n_anchors, n_anchors)
        self.basis_in = OntoBasis(self.in_shape, n_anchors=n_in, **basis)
        self.theta_2 = SlotLinear(in_channels, self.basis_in.n_anchors, out_channels, bias=False)
        self.basis_out = FromBasis(self.out_shape, out_channels, bias, n_anchors=n_out, **basis)
        self.theta_1 = SlotLinear(out_channels, in_channels, self.basis_out.n_anchors, bias=False)
        self.reset_parameters(scale)

    def reset_parameters(self, scale: float = 1.0) -> None:
        """Draw weights such that ``theta_2`` has variance ``1 / positions`` and ``theta_1`` ``scale^2 / in_channels``."""
        self.theta_2.reset_parameters(
            math.sqrt(self.basis_in.n_anchors / self.basis_in.n_points) / self.basis_in.amplitude()
        )
        self.theta_1.reset_parameters(scale / self.basis_out.amplitude())
        if self.basis_out.bias is not None:
            nn.init.zeros_(self.basis_out.bias)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        z = self.theta_2(self.basis_in(x.flatten(2))).mT
        return self.basis_out(self.theta_1(z)).unflatten(2, self.out_shape)


class SparseConv2d(Basis):
    """Convolution whose filters are sums of basis functions (S-CONV).

    Built like ``nn.Conv2d``; ``weight`` ``[out_channels, in_channels / groups, M]`` holds ``u``, and :meth:`filters` are what it
    stands for. With ``padding_mode="circular"``, stride 1 and the padding that keeps the size, shifts of the input around the
    edges are shifts of the output.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: as in ``nn.Conv2d``.
        **basis: options of :class:`Basis` on the grid of the kernel: ``kind``, ``n_anchors``, ``anchors``, ``omega``,
            ``learn_omega``, ``generator``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
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
            False,
            padding_mode,
            device="meta",
        )
        super().__init__(dense.kernel_size, **basis)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.dilation = (
            dense.kernel_size,
            dense.stride,
            dense.dilation,
        )
        self.padding, self.padding_mode = dense.padding, padding_mode
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, self.n_anchors))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights such that filters have the variance that ``nn.Conv2d`` gives them, and biases like it."""
        fan_in = self.weight.shape[1] * self.n_points
        nn.init.normal_(self.weight, std=1 / (math.sqrt(3 * fan_in) * self.amplitude()))
        if self.bias is not None:
            nn.init.uniform_(self.bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def filters(self) -> Tensor:
        """Return the filters ``[out_channels, in_channels / groups, height, width]``."""
        return (self.weight @ self.matrix()).unflatten(-1, self.kernel_size)

    def _convolve(self, x: Tensor, filters: Tensor, bias: Tensor | None = None) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            x = F.pad(x, self._sides(), mode=self.padding_mode)
            padding = 0
        return F.conv2d(x, filters, bias, self.stride, padding, self.dilation, self.groups)

    def _sides(self) -> list[int]:
        """Return the padding left, right, above and below."""
        if self.padding == "valid":
            return [0, 0, 0, 0]
        if self.padding == "same":
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
        return [p for p in reversed(self.padding) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"SparseConv2d was built for [n, {self.in_channels}, height, width], got shape {list(x.shape)}"
            )
        return self._convolve(x, self.filters(), self.bias)

    def extra_repr(self) -> str:
        sizes = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        more = f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, bias={self.bias is not None}"
        return f"{sizes}, {more}, padding_mode={self.padding_mode!r}, {super().extra_repr()}"


@register_rule(SparseConv2d)
def sparse_convolution(module: SparseConv2d) -> Iterable[Block]:
    """As a convolution, with patches times the basis; exact for the one number ``omega``."""
    weight, *bias = convolution(module)

    def projected(x: Tensor) -> Tensor:
        patches = weight.a(x).unflatten(-1, (-1, module.n_points))
        return (patches @ module.matrix().mT).flatten(-2)

    def directional(x: Tensor) -> Tensor:
        return module._convolve(
            x, (module.weight @ module.derivative()).unflatten(-1, module.kernel_size)
        )

    yield replace(weight, a=projected)
    yield from _omega(module, directional)
    yield from bias
