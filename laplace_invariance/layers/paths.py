"""Kinds of paths, and layers that are sums of them.

A *path* is one of the layers that a :class:`ResidualPathway` adds up. All that the package knows of a
kind of path is one entry of :data:`PATHS`: how it is built, what it is called in reports and which
colour it has in pictures. A kind of one's own is registered in the same way as those below::

    register_path(
        "shift", PathKind("SHIFT", "C4", "moves pixels", lambda spec: Shift(spec.gain), (Shift,))
    )
    net = equivariant_cnn("f_fc+shift", in_channels=3, n_classes=10)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from laplace_invariance.layers.factored import FactoredLinear2d, Linear2d
from laplace_invariance.layers.group import GroupConv2d, LiftingConv2d
from laplace_invariance.layers.pooling import PolyphasePool2d
from laplace_invariance.layers.residual import OnGroup, ResidualPathway
from laplace_invariance.layers.sparse import SparseConv2d, SparseLinear2d
from laplace_invariance.layers.symmetry import Group

__all__ = [
    "HE_GAIN",
    "PATHS",
    "PathKind",
    "PathSpec",
    "label_of",
    "parse_kind",
    "pathway",
    "register_path",
    "rescale_",
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
        gain: Scale of the initial weights: ``gain^2 / fan_in`` is their variance.
        group: Group of the features; None for plain feature maps.
        kernel: Kernel of group convolutions in the group axis.
        lift: Whether the input is an image, not on the group yet.
    """

    in_channels: int
    out_channels: int
    in_shape: tuple[int, int]
    out_shape: tuple[int, int]
    gain: float = 1.0
    group: Group | None = None
    kernel: str = "pointwise"
    lift: bool = False

    @property
    def order(self) -> int:
        """Number of elements of the group."""
        return 1 if self.group is None else self.group.order

    @property
    def n_in(self) -> int:
        """Channels of the input, where elements of the group are further channels."""
        return self.in_channels if self.lift else self.in_channels * self.order

    @property
    def n_out(self) -> int:
        """Channels of the output, where elements of the group are further channels."""
        return self.out_channels * self.order


@dataclass(frozen=True)
class PathKind:
    """A kind of path.

    Attributes:
        label: Name in reports and pictures.
        colour: Colour in pictures, as matplotlib knows it.
        symmetry: What the path is equivariant to, in a few words.
        build: Returns the layer for a :class:`PathSpec`. It maps ``[n, n_in, *in_shape]`` to ``[n,
            n_out, *in_shape]`` or, if it is free, to ``[n, n_out, *out_shape]``.
        types: Module types by which a path of this kind is recognised.
        free: Whether the path has no symmetry. Free paths map to the size behind the pooling, come
            after all others, and may be put beside any convolution by
            :func:`~laplace_invariance.layers.convert`.
        on_group: Whether the layer itself works on features on a group, ``[n, in_channels, order,
            *in_shape]``. Of others, elements of the group are further channels.
    """

    label: str
    colour: str
    symmetry: str
    build: Callable[[PathSpec], nn.Module]
    types: tuple[type[nn.Module], ...]
    free: bool = False
    on_group: bool = False


PATHS: dict[str, PathKind] = {}


def register_path(name: str, kind: PathKind) -> None:
    """Add a kind of path to :data:`PATHS`.

    Paths of a layer are sorted from the strictest to the freest: first those with a symmetry, then
    free ones, both in the order in which they were registered.

    Args:
        name: Name by which kinds are joined, as in ``"f_fc+conv"``.
        kind: The kind.

    Raises:
        ValueError: If the name is taken, or is not one that a module and ``"+"`` allow.
    """
    if name in PATHS:
        raise ValueError(f"there is a path {name!r} already; choose another name")
    if not name.isidentifier() or name == "pool":
        raise ValueError(f"a path needs a name like a variable's, other than 'pool', got {name!r}")
    PATHS[name] = kind


def parse_kind(kind: str) -> list[str]:
    """Return the paths of a kind such as ``"f_fc+conv"``, from the strictest to the freest.

    Raises:
        ValueError: If a path is unknown, or is there twice.
    """
    names = kind.split("+")
    unknown = [name for name in names if name not in PATHS]
    found = f"{kind!r}, which has a path twice"
    if unknown:
        found = f"{unknown[0]!r} in {kind!r}"
    if unknown or len(set(names)) < len(names):
        raise ValueError(f"a kind is one or more of {', '.join(PATHS)}, joined by '+'; got {found}")
    order = list(PATHS)
    return sorted(names, key=lambda name: (PATHS[name].free, order.index(name)))


def label_of(path: nn.Module) -> str:
    """Return the label of a path, by the first of its modules that belongs to a kind.

    Args:
        path: Any module; if it holds no layer of a known kind, its label is the name of its class.
    """
    labels = {cls: kind.label for kind in PATHS.values() for cls in kind.types}
    for module in path.modules():
        if type(module) in labels:
            return labels[type(module)]
    return type(path).__name__


@torch.no_grad()
def rescale_(layer: nn.Module, gain: float) -> None:
    """Give the weights of a convolution variance ``gain^2 / fan_in``, and no bias.

    Args:
        layer: A convolution as torch initialises it, with variance ``1 / (3 fan_in)``. Of the two
            weights of a separable group convolution, the last takes the gain.
        gain: Scale of the weights.
    """
    parameters = dict(layer.named_parameters())
    weights = [parameter for name, parameter in parameters.items() if name.endswith("weight")]
    for weight in weights:
        weight.mul_(math.sqrt(3))
    weights[-1].mul_(gain)
    for name, parameter in parameters.items():
        if name.endswith("bias"):
            parameter.zero_()


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
) -> ResidualPathway:
    """Return a 3 x 3 convolution with circular padding, freer paths, or their sum.

    It is the layer of :func:`~laplace_invariance.layers.equivariant_cnn`.

    Args:
        kind: Paths joined by ``"+"``, such as ``"f_fc+conv"``; names are those of :data:`PATHS`.
        in_channels: Channels of the input, per element of the group if there is one.
        out_channels: Channels of the output, per element of the group if there is one.
        in_shape: Height and width of the input.
        pool: Stride of the polyphase pooling of equivariant paths; free paths map to the smaller size
            themselves.
        scale: Scale of the initial weights of all paths but the strictest, which starts at He's.
        group: Group of the features; None for plain feature maps.
        kernel: Kernel of group convolutions in the group axis.
        lift: Whether the input is an image, not on the group yet.

    Raises:
        ValueError: If a path is unknown, or is there twice.
    """
    names = parse_kind(kind)
    height, width = in_shape
    paths: dict[str, nn.Module] = {}
    for name in names:
        spec = PathSpec(
            in_channels,
            out_channels,
            in_shape=(height, width),
            out_shape=(height // pool, width // pool),
            gain=HE_GAIN if name == names[0] else scale,
            group=group,
            kernel=kernel,
            lift=lift,
        )
        path = PATHS[name].build(spec)
        if group is not None and not PATHS[name].on_group:
            path = OnGroup(path, group.order)
        paths[name] = path
    pooling = None
    if pool > 1 and not PATHS[names[0]].free:
        pooling = PolyphasePool2d(pool)
    return ResidualPathway(pool=pooling, **paths)


def _group_convolution(spec: PathSpec) -> nn.Module:
    if spec.group is None:
        raise ValueError("a group convolution needs a group: pathway(..., group=Group.of('p4'))")
    layer: nn.Module
    if spec.lift:
        layer = LiftingConv2d(
            spec.in_channels,
            spec.out_channels,
            kernel_size=3,
            padding=1,
            padding_mode="circular",
            group=spec.group,
        )
    else:
        layer = GroupConv2d(
            spec.in_channels,
            spec.out_channels,
            kernel_size=3,
            padding=1,
            padding_mode="circular",
            group=spec.group,
            kernel=spec.kernel,
        )
    rescale_(layer, spec.gain)
    return layer


def _convolution(spec: PathSpec) -> nn.Module:
    layer = nn.Conv2d(spec.n_in, spec.n_out, 3, padding=1, padding_mode="circular")
    rescale_(layer, spec.gain)
    return layer


def _sparse_convolution(spec: PathSpec) -> nn.Module:
    layer = SparseConv2d(spec.n_in, spec.n_out, 3, padding=1, padding_mode="circular")
    rescale_(layer, spec.gain)
    return layer


def _factored(spec: PathSpec) -> nn.Module:
    return FactoredLinear2d(spec.n_in, spec.n_out, spec.in_shape, spec.out_shape, scale=spec.gain)


def _sparse_factored(spec: PathSpec) -> nn.Module:
    return SparseLinear2d(spec.n_in, spec.n_out, spec.in_shape, spec.out_shape, scale=spec.gain)


def _dense(spec: PathSpec) -> nn.Module:
    return Linear2d(spec.n_in, spec.n_out, spec.in_shape, spec.out_shape, scale=spec.gain)


register_path(
    "gconv",
    PathKind(
        label="GCONV",
        colour="C2",
        symmetry="group convolution: equivariant to shifts and quarter turns",
        build=_group_convolution,
        types=(LiftingConv2d, GroupConv2d),
        on_group=True,
    ),
)
register_path(
    "conv",
    PathKind(
        label="CONV",
        colour="C0",
        symmetry="convolution: equivariant to shifts",
        build=_convolution,
        types=(nn.Conv2d,),
    ),
)
register_path(
    "s_conv",
    PathKind(
        label="S-CONV",
        colour="C9",
        symmetry="convolution with a sparse filter",
        build=_sparse_convolution,
        types=(SparseConv2d,),
    ),
)
register_path(
    "f_fc",
    PathKind(
        label="F-FC",
        colour="C1",
        symmetry="fully connected, factored over positions",
        build=_factored,
        types=(FactoredLinear2d,),
        free=True,
    ),
)
register_path(
    "s_fc",
    PathKind(
        label="S-FC",
        colour="C6",
        symmetry="fully connected, factored and sparse",
        build=_sparse_factored,
        types=(SparseLinear2d,),
        free=True,
    ),
)
register_path(
    "fc",
    PathKind(
        label="FC",
        colour="C3",
        symmetry="fully connected",
        build=_dense,
        types=(Linear2d, nn.Linear),
        free=True,
    ),
)
