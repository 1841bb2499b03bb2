"""What a convolution multiplies with its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

__all__ = ["extract_patches", "pad", "padding_sides"]


def padding_sides(
    padding: str | Sequence[int], kernel_size: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the padding before and after each axis; the odd one of ``"same"`` comes after."""
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel_size, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if isinstance(padding, str):  # "valid"
        return [(0, 0)] * len(kernel_size)
    return [(p, p) for p in padding]


def pad(x: Tensor, module: Any) -> Tensor:
    """Return ``x`` ``[rows, channels, ...]``, padded as a convolution pads it."""
    sides = padding_sides(module.padding, module.kernel_size, module.dilation)
    if not any(map(any, sides)):
        return x
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, [side for pair in reversed(sides) for side in pair], mode=mode)


def extract_patches(x: Tensor, module: Any) -> Tensor:
    """Return what a convolution multiplies with its weights.

    Args:
        x: Inputs ``[rows, channels, *positions]``.
        module: Convolution of torch, or any module with the settings of one.

    Returns:
        Patches ``[rows, positions, groups, channels / groups * kernel]``.
    """
    n = len(module.kernel_size)
    x = pad(x, module)
    for i in range(n):
        span = module.dilation[i] * (module.kernel_size[i] - 1) + 1
        x = x.unfold(2 + i, span, module.stride[i])[..., :: module.dilation[i]]
    patches = x.flatten(2, 1 + n).flatten(3)  # [rows, channels, positions, taps of the kernel]
    return rearrange(patches, "rows (g c) p taps -> rows p g (c taps)", g=module.groups)
