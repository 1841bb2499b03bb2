"""Subsampling that keeps symmetries, and pooling over a group.

Keeping every other position is not equivariant to shifts: which positions are kept depends on
where the image starts. The ``stride^2`` grids of positions to choose from are the *polyphase
components* of a feature map; a shift exchanges them, and so do rotations and flips if the
stride divides height and width. Choosing by a norm, which none of these changes, is therefore
equivariant: the same component is kept wherever the image starts, and shifts along with it
(Chaman and Dokmanic, 2021).
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

__all__ = ["GroupPool", "PolyphasePool2d"]

REDUCTIONS = ("mean", "max")


class PolyphasePool2d(nn.Module):
    """Keep, for each image, the polyphase component of the largest l-infinity norm.

    The norm is taken over channels, group and positions. Maps ``[n, C, H, W]`` to ``[n, C, H /
    stride, W / stride]``, and features on a group ``[n, C, order, H, W]`` likewise. Equivariant
    unless components differ and yet have the same norms, as in an image that is its own mirror
    image; of these, one is chosen by its place.

    Args:
        stride: Distance of the positions of a component; it must divide height and width.
    """

    def __init__(self, stride: int = 2) -> None:
        super().__init__()
        if not isinstance(stride, int) or stride < 1:
            raise ValueError(f"stride must be a positive integer, got {stride!r}")
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim not in (4, 5):
            raise ValueError(
                "PolyphasePool2d needs [n, channels, height, width] or "
                f"[n, channels, group, height, width], got shape {list(x.shape)}"
            )
        height, width = x.shape[-2:]
        stride = self.stride
        if height % stride or width % stride:
            raise ValueError(
                f"stride {stride} must divide height and width, got {height} x {width}"
            )
        components = rearrange(x, "n ... (h i) (w j) -> n (i j) ... h w", i=stride, j=stride)
        images = torch.arange(len(x), device=x.device)
        return components[images, self._choose(components.detach())]

    @staticmethod
    def _choose(components: Tensor) -> Tensor:
        """Return the index of the component to keep, ``[n]``."""
        values = components.flatten(2)
        largest = values.abs().amax(-1)
        # Several components may share the largest value, as where the background has it. The first
        # of them would be another one after a shift, so the l2 norm, which a shift does not change,
        # decides. That background may have been computed with rounding that differs from place to
        # place, so equal means equal up to rounding. In half precision few values differ by less
        # than 100 eps, so it is 2 eps there.
        eps = torch.finfo(values.dtype).eps
        rounding = 100 * eps if eps < 1e-5 else 2 * eps
        tied = largest >= (1 - rounding) * largest.amax(-1, keepdim=True)
        return torch.where(tied, torch.linalg.vector_norm(values, dim=-1), -1).argmax(-1)

    def extra_repr(self) -> str:
        return f"stride={self.stride}"


class GroupPool(nn.Module):
    """Pool over the group, ``[n, C, order, H, W]`` to ``[n, C, H, W]``.

    Group elements then act on positions alone.

    Args:
        reduce: ``"mean"`` or ``"max"``.
    """

    def __init__(self, reduce: str = "mean") -> None:
        super().__init__()
        if reduce not in REDUCTIONS:
            raise ValueError(f"reduce must be one of {', '.join(REDUCTIONS)}, got {reduce!r}")
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 5:
            raise ValueError(
                f"GroupPool needs [n, channels, group, height, width], got shape {list(x.shape)}"
            )
        if self.reduce == "mean":
            return x.mean(2)
        return x.amax(2)

    def extra_repr(self) -> str:
        return f"reduce={self.reduce!r}"
