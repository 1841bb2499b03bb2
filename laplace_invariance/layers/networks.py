"""Networks for images, and the layer that standardises these."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from laplace_invariance.layers.factored import FactoredLinear2d, Linear2d
from laplace_invariance.layers.group import GroupConv2d, LiftingConv2d
from laplace_invariance.layers.pooling import GroupPool, PolyphasePool2d
from laplace_invariance.layers.residual import OnGroup, ResidualPathway
from laplace_invariance.layers.sparse import SparseConv2d, SparseLinear2d
from laplace_invariance.layers.symmetry import Group

__all__ = ["PATHS", "Standardise", "cnn", "equivariant_cnn", "mlp", "parse_kind", "pathway"]

# What a path may be, from the strictest symmetry to none.
PATHS = {
    "gconv": "group convolution: equivariant to shifts and quarter turns",
    "conv": "convolution: equivariant to shifts",
    "s_conv": "convolution with a sparse filter",
    "f_fc": "fully connected, factored over positions",
    "s_fc": "fully connected, factored and sparse",
    "fc": "fully connected",
}
FREE = ("f_fc", "s_fc", "fc")
# Of equivariant_cnn: channels as a multiple of the width, and the stride of the pooling.
LAYERS = ((1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (8, 2), (8, 2), (16, 2))


class Standardise(nn.Module):
    """Subtract a mean and divide by a standard deviation, both fixed, per channel of ``[n, channels, ...]``.

    As the first layer of a network it comes after the augmentation, so that images stay in [0, 1] with black = 0, which is
    what the augmentation puts outside of a moved image::

        net = nn.Sequential(Standardise.of(x_train), cnn(x_train.shape[1:], 10))

    Args:
        mean: ``[channels]``.
        std: ``[channels]``, positive.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        super().__init__()
        mean, std = (
            torch.as_tensor(t, dtype=torch.get_default_dtype()).detach().clone()
            for t in (mean, std)
        )
        if mean.ndim != 1 or mean.shape != std.shape:
            raise ValueError(
                f"mean and std must have one value per channel, got shapes {list(mean.shape)} and {list(std.shape)}"
            )
        if not (torch.isfinite(mean).all() and torch.isfinite(std).all() and (std > 0).all()):
            raise ValueError(
                f"mean must be finite and std positive, got {mean.tolist()} and {std.tolist()}"
            )
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    @classmethod
    def of(cls, images: Tensor, floor: float = 1e-2) -> Standardise:
        """Take mean and standard deviation from ``images`` ``[n, channels, ...]``, the latter no less than ``floor``."""
        values = images.detach().transpose(0, 1).flatten(1)
        return cls(values.mean(1), values.std(1, correction=0).clamp(min=floor))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != len(self.mean):
            raise ValueError(
                f"Standardise has {len(self.mean)} channels, got shape {list(x.shape)}"
            )
        shape = (-1, *[1] * (x.ndim - 2))
        return (x - self.mean.view(shape)) / self.std.view(shape)

    def extra_repr(self) -> str:
        return f"mean={[round(m, 4) for m in self.mean.tolist()]}, std={[round(s, 4) for s in self.std.tolist()]}"


def mlp(
    in_shape: Sequence[int],
    n_classes: int,
    width: int = 300,
    depth: int = 1,
    activation: Callable[[], nn.Module] = nn.Tanh,
) -> nn.Sequential:
    """Return a fully connected network with ``depth`` hidden layers of ``width`` units each.

    Args:
        in_shape: shape of one input, which is flattened.
        n_classes: number of outputs.
        width: units per hidden layer.
        depth: hidden layers; none is a linear model.
        activation: class of the nonlinearity, a module, so that its second derivative is cheap.
    """
    if depth < 0:
        raise ValueError(f"depth must not be negative, got {depth}")
    sizes = [math.prod(in_shape), *[width] * depth]
    layers: list[nn.Module] = [nn.Flatten()]
    for n_in, n_out in itertools.pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), activation()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], n_classes))


def cnn(in_shape: Sequence[int], n_classes: int, width: int = 8) -> nn.Sequential:
    """Return three 3 x 3 convolutions of ``width``, ``2 * width`` and ``4 * width`` channels, and a linear layer.

    Each convolution halves the size by its stride, which is several times cheaper than pooling after it, and is followed by
    a ReLU.

    Args:
        in_shape: channels, height and width; at least 8 x 8.
        n_classes: number of outputs.
        width: channels of the first convolution.
    """
    if len(in_shape) != 3 or min(in_shape[1:]) < 8:
        raise ValueError(
            f"cnn needs images [channels, height, width] of at least 8 x 8, got {list(in_shape)}"
        )
    channels, height, breadth = in_shape
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise([channels, width, 2 * width, 4 * width]):
        layers += [nn.Conv2d(n_in, n_out, 3, stride=2, padding=1), nn.ReLU()]
    positions = math.ceil(height / 8) * math.ceil(breadth / 8)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width * positions, n_classes))


def parse_kind(kind: str) -> list[str]:
    """Return the paths of a kind such as ``"f_fc+conv"``, from the strictest to the freest."""
    names = kind.split("+")
    unknown = [name for name in names if name not in PATHS]
    if unknown or len(set(names)) < len(names):
        found = f"{unknown[0]!r} in {kind!r}" if unknown else f"{kind!r}, which has a path twice"
        raise ValueError(f"a kind is one or more of {', '.join(PATHS)}, joined by '+'; got {found}")
    return sorted(names, key=list(PATHS).index)


@torch.no_grad()
def _rescale(layer: nn.Module, gain: float) -> None:
    """Give weights of a convolution, drawn by torch with variance ``1 / (3 fan_in)``, variance ``gain^2 / fan_in``; no bias."""
    parameters = dict(layer.named_parameters())
    weights = [parameter for name, parameter in parameters.items() if name.endswith("weight")]
    for weight in weights:  # one, but for the two of a separable group convolution
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
    """Return the layer of :func:`equivariant_cnn`: a 3 x 3 convolution with circular padding, freer paths, or their sum.

    Args:
        kind: the paths, such as ``"f_fc+conv"``.
        in_channels, out_channels: channels of input and output, per element of the group if there is one.
        in_shape: height and width of the input.
        pool: stride of the polyphase pooling of equivariant paths; free paths map to the smaller size themselves.
        scale: of the initial weights of all paths but the strictest, which starts at He's.
        group: of features on a group; None for plain feature maps.
        kernel: of group convolutions in the group axis.
        lift: the input is an image, not on the group yet.
    """
    names = parse_kind(kind)
    order = 1 if group is None else group.order
    n_in, n_out = in_channels * (1 if lift else order), out_channels * order
    shapes = tuple(in_shape), tuple(size // pool for size in in_shape)
    circular = {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}
    strictest = math.sqrt(2)  # He's gain for ReLU
    paths: dict[str, nn.Module] = {}
    for name in names:
        gain = strictest if name == names[0] else scale
        if name == "gconv":
            layer = (
                LiftingConv2d(in_channels, out_channels, group=group, **circular) if lift else None
            )
            layer = layer or GroupConv2d(
                in_channels, out_channels, group=group, kernel=kernel, **circular
            )
        elif name == "conv":
            layer = nn.Conv2d(n_in, n_out, **circular)
        elif name == "s_conv":
            layer = SparseConv2d(n_in, n_out, **circular)
        else:
            cls = {"f_fc": FactoredLinear2d, "s_fc": SparseLinear2d, "fc": Linear2d}[name]
            layer = cls(n_in, n_out, *shapes, scale=gain)
        if name not in FREE:
            _rescale(layer, gain)
        paths[name] = layer if name == "gconv" or group is None else OnGroup(layer, order)
    pooled = pool > 1 and names[0] not in FREE
    return ResidualPathway(pool=PolyphasePool2d(pool) if pooled else None, **paths)


def equivariant_cnn(
    kind: str,
    in_channels: int,
    n_classes: int,
    width: int = 10,
    *,
    in_shape: int | Sequence[int] = 32,
    scale: float = 0.01,
    group: Group | str = "p4",
    kernel: str = "pointwise",
) -> nn.Sequential:
    """Return the network of van der Ouderaa, Immer and van der Wilk (2023), whose layers are sums of paths.

    Eight 3 x 3 layers with circular padding and five polyphase poolings (after layers 2, 4, 6, 7 and 8), then two 1 x 1 layers;
    a ReLU after all but the last. With equivariant paths only, its outputs do not change under any circular shift, and with
    ``"gconv"`` neither under quarter turns. Beside them, fully connected paths can break the symmetry, layer by layer, as far
    as their prior precisions, learnt by evidence, let them.

    A free path beside an equivariant one should start near zero: at unit scale the optimiser gets stuck in a network whose
    evidence is far worse than that of convolutions alone. A path that stands alone starts at unit scale.

    Args:
        kind: paths joined by ``"+"``: any of ``"conv"``, ``"fc"``, ``"f_fc"``, ``"s_fc"``, ``"s_conv"`` and ``"gconv"``, such
            as ``"f_fc+conv"``. With ``"gconv"``, features live on the group, and others see its elements as further channels.
        in_channels: channels of the images.
        n_classes: number of outputs.
        width: channels of the first layer; the last has 16 times as many.
        in_shape: height and width of the images, multiples of 32.
        scale: of the initial weights of all paths but the strictest.
        group: of ``"gconv"``.
        kernel: of ``"gconv"`` in the group axis: ``"pointwise"``, ``"separable"`` or ``"full"``.
    """
    shape = (in_shape, in_shape) if isinstance(in_shape, int) else tuple(in_shape)
    if len(shape) != 2 or min(shape) < 32 or any(size % 32 for size in shape):
        raise ValueError(
            f"equivariant_cnn halves images five times: height and width must be multiples of 32, got {in_shape}"
        )
    if width < 1:
        raise ValueError(f"width must be positive, got {width}")
    on_group = "gconv" in parse_kind(kind)
    group = Group.of(group) if on_group else None
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    n_in = in_channels
    for i, (factor, pool) in enumerate(LAYERS, start=1):
        options = {"scale": scale, "group": group, "kernel": kernel, "lift": on_group and i == 1}
        layers[f"layer{i}"] = pathway(kind, n_in, factor * width, shape, pool, **options)
        layers[f"relu{i}"] = nn.ReLU()
        n_in, shape = factor * width, tuple(size // pool for size in shape)
    for i, n_out in enumerate((64 * width, n_classes), start=len(LAYERS) + 1):
        layer = (
            GroupConv2d(n_in, n_out, 1, group=group, kernel="pointwise")
            if on_group
            else nn.Conv2d(n_in, n_out, 1)
        )
        layers[f"layer{i}"], n_in = layer, n_out
        if i == len(LAYERS) + 1:
            layers[f"relu{i}"] = nn.ReLU()
            _rescale(layer, math.sqrt(2))
    if on_group:
        layers["group_mean"] = GroupPool()
    layers["mean"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    return nn.Sequential(layers)
