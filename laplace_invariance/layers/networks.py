"""Networks for images, and the layer that standardises these."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laplace_invariance.layers.group import GroupConv2d
from laplace_invariance.layers.paths import HE_GAIN, PATHS, parse_kind, pathway, rescaled
from laplace_invariance.layers.pooling import GroupPool
from laplace_invariance.layers.shapes import pair
from laplace_invariance.layers.symmetry import Group

__all__ = ["Standardise", "cnn", "equivariant_cnn", "lenet", "mlp"]

# Layers of equivariant_cnn: channels as a multiple of the width, and the stride of the pooling.
STAGES = ((1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (8, 2), (8, 2), (16, 2))


class Standardise(nn.Module):
    """Subtract a fixed mean and divide by a fixed standard deviation, per channel.

    As the first layer of a network it comes after the augmentation, so that images stay between
    0 and 1 with black = 0, which is what the augmentation puts outside of a transformed image::

        net = nn.Sequential(Standardise.of(x_train), cnn(x_train.shape[1:], 10))

    Args:
        mean: Means ``[channels]``.
        std: Standard deviations ``[channels]``, positive.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        super().__init__()
        mean = _copied(mean)
        std = _copied(std)
        if mean.ndim != 1 or mean.shape != std.shape:
            raise ValueError(
                "mean and std must have one value per channel, "
                f"got shapes {list(mean.shape)} and {list(std.shape)}"
            )
        if not (torch.isfinite(mean).all() and torch.isfinite(std).all() and (std > 0).all()):
            raise ValueError(
                f"mean must be finite and std positive, got {mean.tolist()} and {std.tolist()}"
            )
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    @classmethod
    def of(cls, images: Tensor, floor: float = 1e-2) -> Standardise:
        """Take mean and deviation, at least ``floor``, from images ``[n, channels, ...]``."""
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
        mean = [round(value, 4) for value in self.mean.tolist()]
        std = [round(value, 4) for value in self.std.tolist()]
        return f"mean={mean}, std={std}"


def _copied(values: Sequence[float] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.get_default_dtype()).detach().clone()


def mlp(
    in_shape: Sequence[int],
    n_classes: int,
    width: int = 300,
    depth: int = 1,
    activation: Callable[[], nn.Module] = nn.Tanh,
) -> nn.Sequential:
    """Return a fully connected network with ``depth`` hidden layers of ``width`` units each.

    Args:
        in_shape: Shape of one input, which is flattened.
        n_classes: Number of outputs.
        width: Units per hidden layer.
        depth: Number of hidden layers; with none it is a linear model.
        activation: Class of the nonlinearity, a module, so that its second derivative is cheap.
    """
    if depth < 0:
        raise ValueError(f"depth must not be negative, got {depth}")
    sizes = [math.prod(in_shape), *[width] * depth]
    layers: list[nn.Module] = [nn.Flatten()]
    for n_in, n_out in itertools.pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), activation()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], n_classes))


def cnn(in_shape: Sequence[int], n_classes: int, width: int = 8) -> nn.Sequential:
    """Return three 3 x 3 convolutions and a linear layer.

    The convolutions have ``width``, ``2 * width`` and ``4 * width`` channels. Each halves the
    size by its stride, which is several times cheaper than pooling after it, and is followed by
    a ReLU.

    Args:
        in_shape: Channels, height and width; at least 8 x 8.
        n_classes: Number of outputs.
        width: Channels of the first convolution.
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


def lenet(
    in_shape: Sequence[int], n_classes: int, activation: Callable[[], nn.Module] = nn.Tanh
) -> nn.Sequential:
    """Return the network of LeCun et al. (1998): two convolutions and three linear layers.

    Args:
        in_shape: Channels, height and width; at least 12 x 12.
        n_classes: Number of outputs.
        activation: Class of the nonlinearity.
    """
    if len(in_shape) != 3 or min(in_shape[1:]) < 12:
        raise ValueError(
            "lenet needs images [channels, height, width] of at least 12 x 12, got "
            f"{list(in_shape)}"
        )
    channels, *size = in_shape
    positions = math.prod((side // 2 - 4) // 2 for side in size)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2),
        activation(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        activation(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * positions, 120),
        activation(),
        nn.Linear(120, 84),
        activation(),
        nn.Linear(84, n_classes),
    )


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
    omega: str = "fixed",
    elements: str = "channels",
) -> nn.Sequential:
    """Return the network of van der Ouderaa, Immer and van der Wilk (2023), with layers of paths.

    Eight 3 x 3 layers with circular padding and five polyphase poolings (after layers 2, 4, 6, 7
    and 8), then two 1 x 1 layers; a ReLU after all but the last. With equivariant paths only, its
    outputs do not change under any circular shift, and with ``"gconv"`` neither under quarter
    turns. Beside them, fully connected paths can break the symmetry, layer by layer, as far as
    their prior precisions, learnt by evidence, let them.

    A free path beside an equivariant one should start near zero: at unit scale the optimiser gets
    stuck in a network whose evidence is far worse than that of convolutions alone. A path that
    stands alone starts at unit scale.

    Args:
        kind: Paths joined by ``"+"``, such as ``"f_fc+conv"``: any of ``"conv"``, ``"fc"``,
            ``"f_fc"``, ``"s_fc"``, ``"s_conv"``, ``"gconv"`` and ``"s_gconv"``, or of one's own
            (see :mod:`laplace_invariance.layers.paths`). With the last two, features live on the
            group, and other paths see its elements as further channels.
        in_channels: Channels of the images.
        n_classes: Number of outputs.
        width: Channels of the first layer; the last has 16 times as many.
        in_shape: Height and width of the images, multiples of 32.
        scale: Scale of the initial weights of all paths but the strictest.
        group: Group of ``"gconv"`` and ``"s_gconv"``.
        kernel: Their kernel, as of :class:`GroupConv2d`: ``"pointwise"`` or ``"full"``, and of
            ``"gconv"`` also ``"separable"``, ``"pairwise"`` or ``"depthwise"``.
        omega: What the inverse width of basis functions of sparse paths is: ``"fixed"``, a
            ``"weight"`` with a prior of its own, or a ``"hyperparameter"``.
        elements: What elements of the group are to fully connected paths, further ``"channels"``
            or ``"positions"``, which needs ``order`` times fewer weights.

    Raises:
        ValueError: If a path is unknown, or a size is not allowed.
    """
    shape = pair("in_shape", in_shape)
    if any(size % 32 for size in shape):
        raise ValueError(
            "equivariant_cnn halves images five times: height and width must be multiples of 32, "
            f"got {in_shape}"
        )
    if width < 1:
        raise ValueError(f"width must be positive, got {width}")
    on_group = any(PATHS[name].on_group for name in parse_kind(kind))
    acting = Group.of(group) if on_group else None
    options: dict[str, Any] = {"kernel": kernel, "omega": omega, "elements": elements}
    layer = partial(pathway, kind, scale=scale, group=acting, **options)
    layers = _stages(layer, in_channels, width, shape, on_group)
    layers |= _head(width, n_classes, acting)
    return nn.Sequential(layers)


def _stages(
    layer: Callable[..., nn.Module], n_in: int, width: int, shape: tuple[int, int], lift: bool
) -> OrderedDict[str, nn.Module]:
    """Return the 3 x 3 layers and their activations; the first one lifts to the group, if any."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (factor, pool) in enumerate(STAGES, start=1):
        n_out = factor * width
        layers[f"layer{i}"] = layer(n_in, n_out, shape, pool, lift=lift and i == 1)
        layers[f"relu{i}"] = nn.ReLU()
        shape = shape[0] // pool, shape[1] // pool
        n_in = n_out
    return layers


def _head(width: int, n_classes: int, group: Group | None) -> OrderedDict[str, nn.Module]:
    """Return the 1 x 1 layers, and the means over group and positions."""
    n_in, n_hidden = STAGES[-1][0] * width, 64 * width
    i = len(STAGES) + 1
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    hidden = _one_by_one(n_in, n_hidden, group)
    layers[f"layer{i}"] = rescaled(hidden, HE_GAIN)
    layers[f"relu{i}"] = nn.ReLU()
    layers[f"layer{i + 1}"] = _one_by_one(n_hidden, n_classes, group)
    if group is not None:
        layers["group_mean"] = GroupPool()
    layers["mean"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    return layers


def _one_by_one(n_in: int, n_out: int, group: Group | None) -> nn.Module:
    if group is None:
        return nn.Conv2d(n_in, n_out, 1)
    return GroupConv2d(n_in, n_out, 1, group=group, kernel="pointwise")
