"""Kinds of paths, and layers that are sums of them.

A *path* is one of the layers that a :class:`ResidualPathway` adds up. All that the package knows of
a kind of path is one entry of :data:`PATHS`: how it is built, what it is called in reports and
which colour it has in pictures. A kind of one's own is one more entry::

    PATHS["blur"] = PathKind("BLUR", "C4", "a fixed filter", lambda spec: Blur(spec.gain), (Blur,))
    net = equivariant_cnn("f_fc+blur", in_channels=3, n_classes=10)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from laplace_invariance.layers.factored import FactoredLinear2d, Linear2d, Map2d
from laplace_invariance.layers.group import GroupConv2d, GroupConvolution, LiftingConv2d
from laplace_invariance.layers.pooling import PolyphasePool2d
from laplace_invariance.layers.residual import OnGroup, ResidualPathway
from laplace_invariance.layers.sparse import SparseConv2d, SparseLinear2d
from laplace_invariance.layers.sparse_group import SparseGroupConv2d, SparseLiftingConv2d
from laplace_invariance.layers.symmetry import Group

__all__ = [
    "HE_GAIN",
    "PATHS",
    "PathKind",
    "PathSpec",
    "label_of",
    "parse_kind",
    "pathway",
    "rescaled",
]

HE_GAIN = math.sqrt(2)  # keeps the variance behind a ReLU


@dataclass(frozen=True)
class PathSpec:
    """What a path is built for.

    Attributes:
        in_channels: Channels of the input, per element of the group if there is one.
        out_channels: Channels of the output, per element of the group if there is one.
        in_shape: Height and width of the input.
        out_shape: Height and width of the layer's output, after pooling.
        gain: Scale of the initial weights, which have variance ``gain^2 / fan_in``.
        group: Group of the features; None for plain feature maps.
        kernel: Kernel of group convolutions.
        lift: Whether the input is an image, not on the group yet.
        omega: What the inverse width of basis functions is, as ``learn_omega`` of sparse layers.
        elements: What elements of the group are to a layer that does not work on a group itself:
            further ``"channels"`` or, for free paths, further ``"positions"``.
    """

    in_channels: int
    out_channels: int
    in_shape: tuple[int, int]
    out_shape: tuple[int, int]
    gain: float
    group: Group | None = None
    kernel: str = "pointwise"
    lift: bool = False
    omega: str = "fixed"
    elements: str = "channels"

    @property
    def group_in(self) -> Group | None:
        """Group of the input, which an image has none of."""
        return None if self.lift else self.group

    @property
    def n_in(self) -> int:
        """Channels of the input, with elements of the group if these are channels."""
        return self.in_channels * self._copies(self.group_in, "channels")

    @property
    def n_out(self) -> int:
        """Channels of the output, with elements of the group if these are channels."""
        return self.out_channels * self._copies(self.group, "channels")

    @property
    def grid_in(self) -> tuple[int, int]:
        """Height and width of the input, elements one below the other if these are positions."""
        height, width = self.in_shape
        return height * self._copies(self.group_in, "positions"), width

    @property
    def grid_out(self) -> tuple[int, int]:
        """Height and width of the output, elements one below the other if these are positions."""
        height, width = self.out_shape
        return height * self._copies(self.group, "positions"), width

    def _copies(self, group: Group | None, elements: str) -> int:
        """Return the order of the group if its elements are of that kind, or 1."""
        return 1 if group is None or self.elements != elements else group.order


@dataclass(frozen=True)
class PathKind:
    """A kind of path.

    Attributes:
        label: Name in reports and pictures.
        colour: Colour in pictures, as matplotlib names it.
        symmetry: What kind of layer it is, and what it is equivariant to, in a few words.
        build: Makes the layer for a :class:`PathSpec`. It maps ``[n, n_in, *in_shape]`` to ``[n,
            n_out, *in_shape]`` or, if free, ``[n, n_in, *grid_in]`` to ``[n, n_out, *grid_out]``.
        types: Module types by which a path of this kind is recognised.
        free: Whether the path has no symmetry. Free paths come after all others, map to the size
            after pooling themselves, and :func:`convert` can put them beside any convolution.
        on_group: Whether the layer works on features on a group itself, ``[n, in_channels, order,
            *in_shape]``. For other layers, elements of the group are further channels or positions.
    """

    label: str
    colour: str
    symmetry: str
    build: Callable[[PathSpec], nn.Module]
    types: tuple[type[nn.Module], ...]
    free: bool = False
    on_group: bool = False


@torch.no_grad()
def rescaled(layer: nn.Module, gain: float) -> nn.Module:
    """Return a convolution with weights of variance ``gain^2 / fan_in`` and no bias, in place.

    It must be as torch initialises it, with variance ``1 / (3 fan_in)``. Of the weights of a
    convolution that is a product, the last takes the gain.
    """
    parameters = dict(layer.named_parameters())
    weights = [parameter for name, parameter in parameters.items() if name.endswith("weight")]
    for weight in weights:
        weight.mul_(math.sqrt(3))
    weights[-1].mul_(gain)
    for name, parameter in parameters.items():
        if name.endswith("bias"):
            parameter.zero_()
    return layer


def _convolution(spec: PathSpec) -> nn.Module:
    layer = nn.Conv2d(spec.n_in, spec.n_out, 3, padding=1, padding_mode="circular")
    return rescaled(layer, spec.gain)


def _sparse_convolution(spec: PathSpec) -> nn.Module:
    layer = SparseConv2d(
        spec.n_in, spec.n_out, 3, padding=1, padding_mode="circular", learn_omega=spec.omega
    )
    return rescaled(layer, spec.gain)


def _group_convolution(spec: PathSpec) -> nn.Module:
    if spec.lift:
        return _on_group(spec, LiftingConv2d)
    return _on_group(spec, GroupConv2d, kernel=spec.kernel)


def _sparse_group_convolution(spec: PathSpec) -> nn.Module:
    if spec.lift:
        return _on_group(spec, SparseLiftingConv2d, learn_omega=spec.omega)
    return _on_group(spec, SparseGroupConv2d, kernel=spec.kernel, learn_omega=spec.omega)


def _on_group(spec: PathSpec, layer: type[GroupConvolution], **options: Any) -> nn.Module:
    if spec.group is None:
        raise ValueError("a group convolution needs a group: pathway(..., group=Group.of('p4'))")
    options |= {"padding": 1, "padding_mode": "circular", "group": spec.group}
    return rescaled(layer(spec.in_channels, spec.out_channels, 3, **options), spec.gain)


def _connected(layer: type[Map2d]) -> Callable[[PathSpec], nn.Module]:
    """Return the builder of a fully connected kind."""

    def build(spec: PathSpec) -> nn.Module:
        return layer(spec.n_in, spec.n_out, spec.grid_in, spec.grid_out, scale=spec.gain)

    return build


def _sparse_connected(spec: PathSpec) -> nn.Module:
    groups = (None, None) if spec.elements == "channels" else (spec.group_in, spec.group)
    return SparseLinear2d(
        spec.n_in,
        spec.n_out,
        spec.grid_in,
        spec.grid_out,
        scale=spec.gain,
        learn_omega=spec.omega,
        group=groups,
    )


# From the strictest symmetry to none.
PATHS: dict[str, PathKind] = {
    "gconv": PathKind(
        "GCONV",
        "C2",
        "group convolution: equivariant to shifts and quarter turns",
        _group_convolution,
        (LiftingConv2d, GroupConv2d),
        on_group=True,
    ),
    "s_gconv": PathKind(
        "S-GCONV",
        "C8",
        "group convolution with a sparse filter",
        _sparse_group_convolution,
        (SparseLiftingConv2d, SparseGroupConv2d),
        on_group=True,
    ),
    "conv": PathKind(
        "CONV", "C0", "convolution: equivariant to shifts", _convolution, (nn.Conv2d,)
    ),
    "s_conv": PathKind(
        "S-CONV", "C9", "convolution with a sparse filter", _sparse_convolution, (SparseConv2d,)
    ),
    "f_fc": PathKind(
        "F-FC",
        "C1",
        "fully connected, factored over positions",
        _connected(FactoredLinear2d),
        (FactoredLinear2d,),
        free=True,
    ),
    "s_fc": PathKind(
        "S-FC",
        "C6",
        "fully connected, factored and sparse",
        _sparse_connected,
        (SparseLinear2d,),
        free=True,
    ),
    "fc": PathKind(
        "FC", "C3", "fully connected", _connected(Linear2d), (Linear2d, nn.Linear), free=True
    ),
}


def parse_kind(kind: str) -> list[str]:
    """Return the paths of a kind such as ``"f_fc+conv"``, from the strictest to the freest.

    Paths with a symmetry come first, then free ones, both in the order of :data:`PATHS`.

    Raises:
        ValueError: If a path is unknown, or is there twice.
    """
    names = kind.split("+")
    unknown = [name for name in names if name not in PATHS]
    if unknown or len(set(names)) < len(names):
        found = f"{kind!r}, which has a path twice"
        if unknown:
            found = f"{unknown[0]!r} in {kind!r}"
        raise ValueError(f"a kind is one or more of {', '.join(PATHS)}, joined by '+'; got {found}")
    order = list(PATHS)
    return sorted(names, key=lambda name: (PATHS[name].free, order.index(name)))


def label_of(path: nn.Module) -> str:
    """Return the label of a path, by its first module of a known kind, or the name of its class."""
    labels = {cls: kind.label for kind in PATHS.values() for cls in kind.types}
    for module in path.modules():
        if type(module) in labels:
            return labels[type(module)]
    return type(path).__name__


def pathway(
    kind: str,
    in_channels: int,
    out_channels: int,
    in_shape: Sequence[int],
    pool: int = 1,
    *,
    scale: float = 0.01,
    group: Group | None = None,
    kernel: str = "pointwise",
    lift: bool = False,
    omega: str = "fixed",
    elements: str = "channels",
) -> ResidualPathway:
    """Return a layer of :func:`equivariant_cnn`: a 3 x 3 convolution, freer paths, or their sum.

    Args:
        kind: Names of paths in :data:`PATHS`, joined by ``"+"``, such as ``"f_fc+conv"``.
        in_channels: Channels of the input, per element of the group if there is one.
        out_channels: Channels of the output, per element of the group if there is one.
        in_shape: Height and width of the input.
        pool: Stride of the polyphase pooling of equivariant paths; free paths map to the smaller
            size themselves.
        scale: Scale of the initial weights of all paths but the strictest, which starts at He's.
        group: Group of the features; None for plain feature maps.
        kernel: Kernel of group convolutions, as of :class:`GroupConv2d`.
        lift: Whether the input is an image, not on the group yet.
        omega: What the inverse width of basis functions of sparse paths is: ``"fixed"``, a
            ``"weight"`` with a prior of its own, or a ``"hyperparameter"``.
        elements: What elements of the group are to free paths, further ``"channels"`` or
            ``"positions"``. To convolutions without the group they are channels.
    """
    height, width = in_shape
    smaller = height // pool, width // pool
    paths: dict[str, nn.Module] = {}
    gain = HE_GAIN
    for name in parse_kind(kind):
        spec = PathSpec(
            in_channels,
            out_channels,
            (height, width),
            smaller,
            gain,
            group=group,
            kernel=kernel,
            lift=lift,
            omega=omega,
            elements=elements if PATHS[name].free else "channels",
        )
        path = PATHS[name].build(spec)
        if group is not None and not PATHS[name].on_group:
            path = OnGroup(path, group.order, spec.elements)
        paths[name] = path
        gain = scale  # of all but the first
    strictest = PATHS[next(iter(paths))]
    pooling = None if pool == 1 or strictest.free else PolyphasePool2d(pool)
    return ResidualPathway(pool=pooling, **paths)
