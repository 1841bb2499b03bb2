"""Convolutions that know more symmetries than shifts: from images to features on a finite group (lifting), and on it (GCONV).

A group element ``r`` moves positions, and so acts on images by ``(r X)(x) = X(r^-1 x)`` and on features, which have a further
axis for the group, by ``(r X)(s, x) = X(r^-1 s, r^-1 x)``. With positions and taps ``u`` of a kernel counted from the centre,

    lifting:  y(d, r, x) = sum_{c, u} W(d, c, r^-1 u) X(c, x + u)
    full:     y(d, r, x) = sum_{c, s, u} W(d, c, r^-1 s, r^-1 u) X(c, s, x + u)

commute with that action. One filter is thus used at all positions in all orientations, and curvature sees one matrix, shared
over group elements and positions: element ``r`` meets the patches ``a_r(c, q, v) = X(c, r q, x + r v)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace_invariance.curvature.rules import Block, extract_patches, register_rule
from laplace_invariance.layers.symmetry import Group, check_features

__all__ = ["GroupConv2d", "LiftingConv2d"]

KERNELS = ("full", "pointwise", "separable")
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


def _pair(name: str, value: int | Sequence[int], least: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or not all(isinstance(i, int) and i >= least for i in pair):
        raise ValueError(f"{name} must be one or two integers of at least {least}, got {value!r}")
    return pair


class _GroupConvolution(nn.Module):
    """What convolutions with one filter per group element have in common.

    ``columns`` ``[order, taps]`` says which column of the weight, for one channel, is where in the filter of an element.
    """

    columns: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        padding: int | Sequence[int] | str,
        padding_mode: str,
        dilation: int | Sequence[int],
        groups: int,
        stride: int | Sequence[int],
        group: str | Group,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        if (
            min(in_channels, out_channels, groups) < 1
            or in_channels % groups
            or out_channels % groups
        ):
            raise ValueError(
                f"{who} needs channels that groups divide, got {in_channels} and {out_channels} with groups={groups}"
            )
        if padding_mode not in PADDING_MODES:
            raise ValueError(
                f"padding_mode must be one of {', '.join(PADDING_MODES)}, got {padding_mode!r}"
            )
        self.stride = _pair("stride", stride, 1)
        if self.stride != (1, 1):
            raise ValueError(
                f"{who} has no stride, which breaks equivariance, got {stride}; subsample by PolyphasePool2d"
            )
        self.group, self.padding_mode = Group.of(group), padding_mode
        self.kernel_size, self.dilation = (
            _pair("kernel_size", kernel_size, 1),
            _pair("dilation", dilation, 1),
        )
        if padding == "same":
            totals = [d * (k - 1) for k, d in zip(self.kernel_size, self.dilation, strict=True)]
            if any(total % 2 for total in totals):
                raise ValueError(
                    f"padding='same' would pad one side more for kernel_size {self.kernel_size}; give a number"
                )
            padding = [total // 2 for total in totals]
        elif padding == "valid":
            padding = 0
        self.padding = _pair("padding", padding, 0)
        for name in ("kernel_size", "padding", "dilation"):
            height, width = getattr(self, name)
            if self.group.turns and height != width:
                raise ValueError(
                    f"group {self.group.name!r} has quarter turns, so {name} must be the same in both directions, got "
                    f"{(height, width)}"
                )

    def _add_parameters(self, n_columns: int, columns: Tensor, bias: bool) -> None:
        self.weight = nn.Parameter(torch.empty(self.out_channels, n_columns, *self.kernel_size))
        self.bias = nn.Parameter(torch.empty(self.out_channels)) if bias else None
        self.register_buffer("columns", columns, persistent=False)
        self.reset_parameters()

    def reset_parameters(self, gain: float = 1.0) -> None:
        """Draw weights and bias uniformly from ``+-gain / sqrt(fan_in)``, for ``gain`` 1 as torch's convolutions do."""
        bound = gain / math.sqrt(self.weight[0].numel())
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

    def _filters(self) -> Tensor:
        """Return the filter of each element, ``[out_channels, order, channels, taps]``."""
        order, n_taps = self.columns.shape
        weight = self.weight.reshape(self.out_channels, -1, n_taps)
        return (
            weight.index_select(-1, self.columns.flatten())
            .unflatten(-1, (order, n_taps))
            .transpose(1, 2)
        )

    def _convolve(self, x: Tensor, filters: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        """Apply all filters ``[outputs, inputs / groups, ...]`` to ``x`` ``[n, inputs, height, width]`` at once."""
        filters = filters.reshape(filters.shape[:2].numel(), -1, *self.kernel_size)
        padding: Sequence[int] = self.padding
        if self.padding_mode != "zeros" and any(padding):
            x = F.pad(x, [padding[1], padding[1], padding[0], padding[0]], mode=self.padding_mode)
            padding = (0, 0)
        return F.conv2d(x, filters, bias, padding=padding, dilation=self.dilation, groups=groups)

    def extra_repr(self) -> str:
        sizes = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, padding={self.padding}"
        return f"{sizes}, padding_mode={self.padding_mode!r}, groups={self.groups}, group={self.group.name!r}"


class LiftingConv2d(_GroupConvolution):
    """Convolution from images to features on a group, ``[n, C, H, W]`` to ``[n, D, order, H', W']``.

    ``y(d, r, x) = bias(d) + sum_{c, u} W(d, c, r^-1 u) X(c, x + u)``: each filter in every orientation.

    Args:
        in_channels, out_channels: channels of input and output.
        kernel_size: height and width; a number stands for both. Square where the group has quarter turns.
        padding, padding_mode, dilation: as of ``nn.Conv2d``. Shifts need ``"circular"`` padding to be exact.
        bias: one per output channel, shared over the group.
        group: ``"p1"``, ``"p2"``, ``"p4"``, ``"pm"``, ``"p4m"`` or a :class:`Group`.
        stride: only 1; subsample by :class:`PolyphasePool2d`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        *,
        padding: int | Sequence[int] | str = 0,
        padding_mode: str = "zeros",
        dilation: int | Sequence[int] = 1,
        bias: bool = True,
        group: str | Group = "p4",
        stride: int | Sequence[int] = 1,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            padding,
            padding_mode,
            dilation,
            1,
            stride,
            group,
        )
        moved = self.group.taps(*self.kernel_size)[self.group.inverse]
        self._add_parameters(in_channels, moved, bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"LiftingConv2d needs [n, {self.in_channels}, height, width], got shape {list(x.shape)}"
            )
        order = self.group.order
        bias = None if self.bias is None else self.bias.repeat_interleave(order)
        return self._convolve(x, self._filters(), bias, 1).unflatten(1, (self.out_channels, order))

    def _patches(self, x: Tensor) -> Tensor:
        return extract_patches(x, self).unsqueeze(1)


class GroupConv2d(_GroupConvolution):
    """Convolution of features on a group (GCONV), ``[n, C, order, H, W]`` to ``[n, D, order, H', W']``.

    Three kinds of kernel:

    - ``"full"``: ``y(d, r, x) = bias(d) + sum_{c, s, u} W(d, c, r^-1 s, r^-1 u) X(c, s, x + u)``; the weight is stored with
      channels and elements in one axis, ``[D, C / groups * order, height, width]``.
    - ``"pointwise"``: only ``s = r`` contributes, ``W(d, c, r^-1 u)``, with weight ``[D, C / groups, height, width]``: each
      element is convolved on its own, with its own orientation of the filter.
    - ``"separable"``: the filter ``theta_1(d, u) theta_2(d, c, s)``, which is two convolutions after another: ``mixing``, full,
      with a 1 x 1 kernel and no bias, has ``theta_2``; ``spatial``, pointwise and one channel at a time, has ``theta_1`` and
      the bias. The layer itself then has no parameters.

    Args:
        in_channels, out_channels: channels of input and output.
        kernel_size: height and width; a number stands for both. Square where the group has quarter turns.
        padding, padding_mode, dilation, groups: as of ``nn.Conv2d``. Shifts need ``"circular"`` padding to be exact.
        bias: one per output channel, shared over the group.
        group: ``"p1"``, ``"p2"``, ``"p4"``, ``"pm"``, ``"p4m"`` or a :class:`Group`.
        kernel: ``"full"``, ``"pointwise"`` or ``"separable"``.
        stride: only 1; subsample by :class:`PolyphasePool2d`.
    """

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
        kernel: str = "full",
        stride: int | Sequence[int] = 1,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            padding,
            padding_mode,
            dilation,
            groups,
            stride,
            group,
        )
        if kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
        self.kernel, group = kernel, self.group
        if kernel == "separable":
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
            self.mixing = GroupConv2d(
                in_channels, out_channels, 1, groups=groups, bias=False, group=group
            )
            self.spatial = GroupConv2d(
                out_channels, out_channels, self.kernel_size, padding=self.padding, padding_mode=padding_mode,
                dilation=self.dilation, groups=out_channels, bias=bias, group=group, kernel="pointwise",
            )  # fmt: skip
            return
        moved, n_columns = group.taps(*self.kernel_size)[group.inverse], in_channels // groups
        if kernel == "full":  # the element s of the input is at r^-1 s, its taps likewise
            n_columns, n_taps = n_columns * group.order, moved.shape[1]
            moved = (
                group.table[group.inverse].unsqueeze(-1) * n_taps + moved.unsqueeze(1)
            ).flatten(1)
        self._add_parameters(n_columns, moved, bias)

    def reset_parameters(self, gain: float = 1.0) -> None:
        """Draw weights and bias uniformly from ``+-gain / sqrt(fan_in)``, for ``gain`` 1 as torch's convolutions do.

        In a separable layer, ``gain`` is that of ``spatial``.
        """
        if self.kernel == "separable":
            self.mixing.reset_parameters()
            self.spatial.reset_parameters(gain)
        else:
            super().reset_parameters(gain)

    def forward(self, x: Tensor) -> Tensor:
        order = self.group.order
        check_features("GroupConv2d", x, order, self.in_channels)
        if self.kernel == "separable":
            return self.spatial(self.mixing(x))
        filters, bias = self._filters(), self.bias
        if self.kernel == "full":
            bias = None if bias is None else bias.repeat_interleave(order)
            return self._convolve(x.flatten(1, 2), filters, bias, self.groups).unflatten(
                1, (self.out_channels, order)
            )
        # elements come first, so that each is a group of the convolution
        bias = None if bias is None else bias.repeat(order)
        y = self._convolve(
            x.transpose(1, 2).flatten(1, 2), filters.transpose(0, 1), bias, order * self.groups
        )
        return y.unflatten(1, (order, self.out_channels)).transpose(1, 2)

    def _patches(self, x: Tensor) -> Tensor:
        if self.kernel == "full":
            return extract_patches(x.flatten(1, 2), self).unsqueeze(1)
        patches = extract_patches(x.transpose(1, 2).flatten(0, 1), self)
        return patches.unflatten(0, (len(x), self.group.order))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kernel={self.kernel!r}"


@register_rule(LiftingConv2d, GroupConv2d)
def group_convolution(module: LiftingConv2d | GroupConv2d) -> Iterable[Block]:
    """Shared over elements of the group and output positions; groups are slots."""
    if module.weight is None:  # separable: see its two convolutions
        return
    groups, order = module.groups, module.group.order

    def positions(g: Tensor) -> Tensor:
        return g.flatten(2).mT

    def slots(g: Tensor) -> Tensor:
        return positions(g).unflatten(-1, (groups, -1))

    def permuted(x: Tensor) -> Tensor:
        # what takes patches to the weight is the inverse of what takes the weight to the filters
        back = module.columns[module.group.inverse].cpu()
        patches = module._patches(x)  # [rows, order or 1, positions, groups, channels * taps]
        patches = patches.unflatten(-1, (-1, back.shape[1])).take_along_dim(
            back.view(1, order, 1, 1, 1, -1), -1
        )
        return patches.flatten(4).flatten(1, 2)

    def inputs(x: Tensor) -> Tensor:
        # Every entry is one of x, or a zero of the padding, and for all rows the same: which one is found out for numbers
        # 1, 2, ... in the place of x, and then looked up in x. That is several times faster than to permute its patches.
        numbers = torch.arange(1, x.shape[1:].numel() + 1, dtype=torch.double).view(1, *x.shape[1:])
        index = permuted(numbers).long().to(x.device)
        values = F.pad(x.flatten(1), (1, 0)).gather(1, index.flatten().expand(len(x), -1))
        patches = values.unflatten(1, index.shape[1:])
        return patches if groups > 1 else patches.squeeze(2)

    yield Block("weight", inputs, slots if groups > 1 else positions, slots=groups)
    if module.bias is not None:
        yield Block("bias", None, positions, elementwise=True)
