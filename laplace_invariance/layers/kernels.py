"""Kinds of kernels of group convolutions, and the factors of those that are products.

The kernel of a group convolution is a function of output and input channel ``d`` and ``c``, group
element ``s`` and tap ``u``. A *full* one has a weight for each. A *pointwise* one is zero but for
the identity element. Others are products of kernels that are full or pointwise, for one tap or one
channel at a time, and the layer is one such convolution after another. The first is over positions,
in the orientation of the input's element: relative to that element, position and element of the
output are the arguments of the product.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FACTORS", "KERNELS", "Factor", "factors_of"]

# Names of the factors, in the order in which they are applied.
FACTORS: dict[str, tuple[str, ...]] = {
    "separable": ("spatial", "mixing"),
    "pairwise": ("spatial", "mixing"),
    "depthwise": ("spatial", "elements", "channels"),
}
KERNELS = ("full", "pointwise", *FACTORS)


@dataclass(frozen=True)
class Factor:
    """One convolution of several after another.

    Attributes:
        in_channels: Channels of its input.
        out_channels: Channels of its output.
        groups: Groups of channels.
        kernel: ``"full"`` or ``"pointwise"``.
    """

    in_channels: int
    out_channels: int
    groups: int
    kernel: str


def factors_of(kernel: str, in_channels: int, out_channels: int, groups: int) -> dict[str, Factor]:
    """Return the factors of a kernel by name, those of :data:`FACTORS`.

    Args:
        kernel: ``"separable"``, ``"pairwise"`` or ``"depthwise"``.
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        groups: Groups of channels.
    """
    per_channel = Factor(in_channels, in_channels, in_channels, "pointwise")
    if kernel == "separable":
        return {
            "spatial": per_channel,
            "mixing": Factor(in_channels, out_channels, groups, "full"),
        }
    if kernel == "depthwise":
        return {
            "spatial": per_channel,
            "elements": Factor(in_channels, in_channels, in_channels, "full"),
            "channels": Factor(in_channels, out_channels, groups, "pointwise"),
        }
    n_pairs = in_channels * out_channels // groups
    return {
        "spatial": Factor(in_channels, n_pairs, in_channels, "pointwise"),
        "mixing": Factor(n_pairs, out_channels, out_channels, "full"),
    }
