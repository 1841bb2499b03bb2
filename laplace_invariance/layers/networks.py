"""Small networks for images in [0, 1], and the layer that standardises these."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["Standardise", "cnn", "mlp"]


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
        mean, std = (torch.as_tensor(t, dtype=torch.get_default_dtype()).detach().clone() for t in (mean, std))
        if mean.ndim != 1 or mean.shape != std.shape:
            raise ValueError(
                f"mean and std must have one value per channel, got shapes {list(mean.shape)} and {list(std.shape)}"
            )
        if not (torch.isfinite(mean).all() and torch.isfinite(std).all() and (std > 0).all()):
            raise ValueError(f"mean must be finite and std positive, got {mean.tolist()} and {std.tolist()}")
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    @classmethod
    def of(cls, images: Tensor, floor: float = 1e-2) -> Standardise:
        """Take mean and standard deviation from ``images`` ``[n, channels, ...]``, the latter no less than ``floor``."""
        values = images.detach().transpose(0, 1).flatten(1)
        return cls(values.mean(1), values.std(1, correction=0).clamp(min=floor))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != len(self.mean):
            raise ValueError(f"Standardise has {len(self.mean)} channels, got shape {list(x.shape)}")
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
        raise ValueError(f"cnn needs images [channels, height, width] of at least 8 x 8, got {list(in_shape)}")
    channels, height, breadth = in_shape
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise([channels, width, 2 * width, 4 * width]):
        layers += [nn.Conv2d(n_in, n_out, 3, stride=2, padding=1), nn.ReLU()]
    positions = math.ceil(height / 8) * math.ceil(breadth / 8)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width * positions, n_classes))
