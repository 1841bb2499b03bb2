"""Convolutions with more symmetries than shifts: onto a finite group (lifting), and on it (GCONV).

A group element ``r`` permutes positions, and so acts on images by ``(r X)(x) = X(r^-1 x)`` and
on features, which have a further axis for the group, by ``(r X)(s, x) = X(r^-1 s, r^-1 x)``.
With positions and taps ``u`` of a kernel counted from the centre,

    lifting:  y(d, r, x) = sum_{c, u} W(d, c, r^-1 u) X(c, x + u)
    full:     y(d, r, x) = sum_{c, s, u} W(d, c, r^-1 s, r^-1 u) X(c, s, x + u)

commute with that action. One filter is thus used at all positions in all orientations, and
curvature sees one matrix, shared over group elements and positions: element ``r`` meets the
patches ``a_r(c, q, v) = X(c, r q, x + r v)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from laplace_invariance.curvature.rules import (
    AnyBlock,
    ElementwiseBlock,
    MatrixBlock,
    extract_patches,
    pad,
    padding_sides,
    register_rule,
)
from laplace_invariance.layers.kernels import FACTORS, KERNELS, factors_of
from laplace_invariance.layers.shapes import check_features, pair
from laplace_invariance.layers.symmetry import Group

__all__ = ["GroupConv2d", "GroupConvolution", "LiftingConv2d"]

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
SPATIAL = ("kernel_size", "padding", "padding_mode", "dilation")
MAX_PATCH_INDICES = 8  # shapes of inputs whose index a layer keeps


class GroupConvolution(nn.Module):
    """Base class of convolutions with one filter per group element.

    ``columns`` ``[order, taps]`` holds, for one channel, the column of the weight that is at
    each tap of the filter of an element.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Height and width; one number stands for both. Square where the group has
            quarter turns.
        padding: As of ``nn.Conv2d``, the same on both sides.
        padding_mode: As of ``nn.Conv2d``. Shifts need ``"circular"`` padding to be exact.
        dilation: As of ``nn.Conv2d``.
        groups: Groups of channels, as of ``nn.Conv2d``.
        bias: Whether there is a bias, one number per output channel, shared over the group.
        group: ``"p1"``, ``"p2"``, ``"p4"``, ``"pm"``, ``"p4m"`` or a :class:`Group`.
        stride: Only 1; subsample by :class:`PolyphasePool2d`.
        **options: Further options of a subclass.

    Raises:
        ValueError: If a setting is unknown, or would break equivariance.
    """

    columns: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        *,
        padding: int | Sequence[int] | str = 0,
        padding_mode: str = "zeros",
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        group: str | Group = "p4",
        stride: int | Sequence[int] = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        if groups < 1 or any(n < 1 or n % groups for n in (in_channels, out_channels)):
            raise ValueError(
                f"{who} needs channels that groups divide, "
                f"got {in_channels} and {out_channels} with groups={groups}"
            )
        if padding_mode not in PADDING_MODES:
            raise ValueError(
                f"padding_mode must be one of {', '.join(PADDING_MODES)}, got {padding_mode!r}"
            )
        self.stride = pair("stride", stride)
        if self.stride != (1, 1):
            raise ValueError(
                f"{who} has no stride, which breaks equivariance, got {stride}; "
                "subsample by PolyphasePool2d"
            )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.groups = groups
        self.group = Group.of(group)
        self.kernel_size = pair("kernel_size", kernel_size)
        self.dilation = pair("dilation", dilation)
        self.padding = self._even_padding(padding)
        self.padding_mode = padding_mode
        for name in ("kernel_size", "padding", "dilation"):
            height, width = getattr(self, name)
            if self.group.swaps_axes and height != width:
                raise ValueError(
                    f"group {self.group.name!r} has quarter turns, so {name} must be the same in "
                    f"both directions, got {(height, width)}"
                )
        self._patch_indices: dict[tuple[torch.Size, torch.device], Tensor] = {}
        self._add_layers(bias, **options)

    def _even_padding(self, padding: int | Sequence[int] | str) -> tuple[int, int]:
        """Return the padding of height and width, the same on both sides."""
        if not isinstance(padding, str) or padding not in ("same", "valid"):
            return pair("padding", padding, least=0)
        rows, columns = padding_sides(padding, self.kernel_size, self.dilation)
        if rows[0] != rows[1] or columns[0] != columns[1]:
            raise ValueError(
                f"padding='same' would pad one side more for kernel_size {self.kernel_size}; "
                "give a number"
            )
        return rows[0], columns[0]

    def _add_layers(self, bias: bool, *args: Any, **options: Any) -> None:
        raise NotImplementedError

    def _add_parameters(self, n_columns: int, columns: Tensor, bias: bool) -> None:
        """Add a weight with this many entries per tap, and the bias."""
        self.weight = nn.Parameter(torch.empty(self.out_channels, n_columns, *self.kernel_size))
        self.bias = nn.Parameter(torch.empty(self.out_channels)) if bias else None
        self.register_buffer("columns", columns, persistent=False)
        self.reset_parameters()

    def reset_parameters(self, gain: float = 1.0) -> None:
        """Draw weights and bias uniformly from ``+-gain / sqrt(fan_in)``, as torch with gain 1."""
        bound = gain / math.sqrt(self.weight[0].numel())
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def dense_weight(self) -> Tensor:
        """Return all entries of the filter, which are the weight unless a subclass has fewer."""
        return self.weight

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the convolution of ``x`` with another filter than the layer's own."""
        raise NotImplementedError

    def _filters(self, weight: Tensor) -> Tensor:
        """Return the filter of each element, ``[out_channels, order, channels, taps]``."""
        order, n_taps = self.columns.shape
        weight = weight.reshape(self.out_channels, -1, n_taps)
        filters = weight.index_select(-1, self.columns.flatten())
        return rearrange(filters, "d c (r t) -> d r c t", r=order)

    def _convolve(self, x: Tensor, filters: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        """Apply all filters ``[a, b, ...]`` of ``a * b`` outputs to ``x`` at once."""
        filters = filters.reshape(filters.shape[:2].numel(), -1, *self.kernel_size)
        padding = self.padding
        if self.padding_mode != "zeros":
            x = pad(x, self)
            padding = (0, 0)
        return F.conv2d(x, filters, bias, padding=padding, dilation=self.dilation, groups=groups)

    def _mixed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return outputs ``[n, out_channels, order, ...]`` that each see all inputs of ``x``."""
        order = self.group.order
        bias = None if bias is None else bias.repeat_interleave(order)
        y = self._convolve(x, self._filters(weight), bias, self.groups)
        return y.unflatten(1, (self.out_channels, order))

    def _patches(self, x: Tensor) -> Tensor:
        """Return what filters see, ``[rows, order or 1, positions, groups, channels * taps]``."""
        raise NotImplementedError

    def patch_index(self, x: Tensor) -> Tensor:
        """Return which entries of a row of ``x``, numbered from 1, the weight meets; 0 is padding.

        Entries of patches are entries of the input, or zeros of the padding, in the same order
        for all rows. That order is found once for each shape of the input, by putting the
        numbers 1, 2, ... in the place of ``x``. Looking entries up is several times faster than
        to permute the patches of every row. For a lifting convolution with a 2 x 2 kernel,
        quarter turns and an image of 2 x 2 pixels, there is one position, at which the elements
        read ::

            1 2      r = 0: 1 2 3 4      r = 1: 3 1 4 2
            3 4      r = 2: 4 3 2 1      r = 3: 2 4 1 3

        Returns:
            Numbers ``[order * positions, groups, channels * taps]``.
        """
        key = x.shape[1:], x.device
        index = self._patch_indices.get(key)
        if index is None:
            # Not an inference tensor: later passes that are differentiated use it, too.
            with torch.inference_mode(False), torch.no_grad():
                index = self._find_patches(x.shape[1:]).to(x.device)
            if len(self._patch_indices) >= MAX_PATCH_INDICES:
                self._patch_indices.clear()
            self._patch_indices[key] = index
        return index

    def _find_patches(self, shape: torch.Size) -> Tensor:
        numbers = torch.arange(1, shape.numel() + 1, dtype=torch.double, device="cpu")
        patches = self._patches(numbers.view(1, *shape)).squeeze(0)
        # The inverse of what takes the weight to the filters takes patches to the weight.
        back = self.columns[self.group.inverse].cpu()
        order, n_taps = back.shape
        patches = patches.unflatten(-1, (-1, n_taps))
        met = patches.take_along_dim(back.view(order, 1, 1, 1, n_taps), -1)
        return rearrange(met, "r p g c t -> (r p) g (c t)").long()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_patch_indices": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._patch_indices = {}  # modules of earlier versions have none

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"padding={self.padding}, padding_mode={self.padding_mode!r}, groups={self.groups}, "
            f"group={self.group.name!r}"
        )


class LiftingConv2d(GroupConvolution):
    """Convolution from images to features on a group: each filter in every orientation.

    ``y(d, r, x) = bias(d) + sum_{c, u} W(d, c, r^-1 u) X(c, x + u)`` maps ``[n, C, H, W]`` to
    ``[n, D, order, H', W']``. Arguments are those of :class:`GroupConvolution`.
    """

    def _add_layers(self, bias: bool, **options: Any) -> None:
        columns = self.group.taps(*self.kernel_size)[self.group.inverse]
        self._add_parameters(self.in_channels // self.groups, columns, bias, **options)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"{type(self).__name__} needs [n, {self.in_channels}, height, width], "
                f"got shape {list(x.shape)}"
            )
        return self.convolve(x, self.dense_weight(), self.bias)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._mixed(x, weight, bias)

    def _patches(self, x: Tensor) -> Tensor:
        return extract_patches(x, self).unsqueeze(1)


class GroupConv2d(GroupConvolution):
    """Convolution of features on a group (GCONV), with one of five kinds of kernel.

    Maps ``[n, C, order, H, W]`` to ``[n, D, order, H', W']``.

    - ``"full"``: ``y(d, r, x) = bias(d) + sum_{c, s, u} W(d, c, r^-1 s, r^-1 u) X(c, s, x + u)``;
      the weight ``[D, C / groups * order, height, width]`` has channels and elements in one axis.
    - ``"pointwise"``: only ``s = r`` contributes, ``W(d, c, r^-1 u)``; each element is convolved
      on its own, with its own orientation of the filter; the weight is ``[D, C / groups, height,
      width]``.

    The filters ``W(d, c, s, s u)`` of the others are products, and the layers are one convolution
    after another, as named; the last has the bias, and the layer itself no parameters.

    - ``"separable"``: ``spatial(c, u) mixing(d, c, s)``.
    - ``"pairwise"``: ``spatial(d, c, u) mixing(d, c, s)``, separable for each pair of channels.
    - ``"depthwise"``: ``spatial(c, u) elements(c, s) channels(d, c)``.

    Args:
        kernel: ``"full"`` (the default), ``"pointwise"``, ``"separable"``, ``"pairwise"`` or
            ``"depthwise"``. All other arguments are those of :class:`GroupConvolution`.
    """

    def _add_layers(self, bias: bool, kernel: str = "full", **options: Any) -> None:
        if kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
        self.kernel = kernel
        if kernel in FACTORS:
            self._add_factors(bias, **options)
            return
        group = self.group
        n_columns = self.in_channels // self.groups
        columns = group.taps(*self.kernel_size)[group.inverse]  # [order, taps]
        if kernel == "full":  # element s of the input is at r^-1 s, and so are its taps
            n_columns *= group.order
            elements = group.table[group.inverse].unsqueeze(-1)
            columns = (elements * columns.shape[1] + columns.unsqueeze(1)).flatten(1)
        self._add_parameters(n_columns, columns, bias, **options)

    def _add_factors(self, bias: bool) -> None:
        """Add the convolutions whose product is the filter."""
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        layouts = factors_of(self.kernel, self.in_channels, self.out_channels, self.groups)
        spatial: dict[str, Any] = {name: getattr(self, name) for name in SPATIAL}
        *_, last = layouts
        for name, layout in layouts.items():
            settings = spatial if name == "spatial" else {"kernel_size": 1}
            factor = GroupConv2d(
                layout.in_channels,
                layout.out_channels,
                groups=layout.groups,
                kernel=layout.kernel,
                bias=bias and name == last,
                group=self.group,
                **settings,
            )
            self.add_module(name, factor)

    @property
    def factors(self) -> list[GroupConvolution]:
        """Convolutions whose product is the filter, in their order; none if it has a weight."""
        return [getattr(self, name) for name in FACTORS.get(self.kernel, ())]

    def reset_parameters(self, gain: float = 1.0) -> None:
        """Draw weights and bias as the base class does; of several, the last has the ``gain``."""
        if not self.factors:
            super().reset_parameters(gain)
            return
        for factor in self.factors:
            factor.reset_parameters(gain if factor is self.factors[-1] else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        check_features(type(self).__name__, x, self.group.order, self.in_channels)
        if not self.factors:
            return self.convolve(x, self.dense_weight(), self.bias)
        first, *others = self.factors
        x = first(x)
        if self.kernel == "pairwise":  # from the outputs of each input to the inputs of each output
            per_group = self.in_channels // self.groups
            x = rearrange(x, "n (q c d) ... -> n (q d c) ...", q=self.groups, c=per_group)
        for factor in others:
            x = factor(x)
        return x

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.kernel == "pointwise":
            return self._pointwise(x, weight, bias)
        return self._mixed(x.flatten(1, 2), weight, bias)

    def _pointwise(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Elements come first, so that each is a group of the convolution.
        order = self.group.order
        bias = None if bias is None else bias.repeat(order)
        x = rearrange(x, "n c r h w -> n (r c) h w")
        filters = self._filters(weight).transpose(0, 1)
        y = self._convolve(x, filters, bias, order * self.groups)
        return rearrange(y, "n (r d) h w -> n d r h w", r=order)

    def _patches(self, x: Tensor) -> Tensor:
        if self.kernel == "full":
            return extract_patches(x.flatten(1, 2), self).unsqueeze(1)
        patches = extract_patches(rearrange(x, "n c r h w -> (n r) c h w"), self)
        return patches.unflatten(0, (len(x), self.group.order))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kernel={self.kernel!r}"


@register_rule(LiftingConv2d, GroupConv2d)
def group_convolution(module: GroupConvolution) -> Iterator[AnyBlock]:
    """Shared over elements of the group and output positions; groups are slots."""
    if module.weight is None:  # a product: see its factors
        return
    groups = module.groups

    def positions(g: Tensor) -> Tensor:
        return rearrange(g, "n d r h w -> n (r h w) d")

    def slots(g: Tensor) -> Tensor:
        return rearrange(g, "n (q d) r h w -> n (r h w) q d", q=groups)

    def inputs(x: Tensor) -> Tensor:
        index = module.patch_index(x)
        padded = F.pad(x.flatten(1), (1, 0))  # entry 0 is the zero of the padding
        patches = padded.gather(1, index.flatten().expand(len(x), -1)).unflatten(1, index.shape)
        return patches if groups > 1 else patches.squeeze(2)

    yield MatrixBlock("weight", inputs, slots if groups > 1 else positions, slots=groups)
    if module.bias is not None:
        yield ElementwiseBlock("bias", None, positions)
