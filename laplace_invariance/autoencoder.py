"""Autoencoders with a code that is invariant to unknown transformations, learnt from pairs.

Zhang and Arodz, *Learning Invariance in Deep Neural Networks* (2021). Nothing is known of the
transformations; of pairs of samples it is only known how far the things they show are apart: zero,
if one is the other, transformed. The encoder's code has two parts. The invariant one is to keep
these distances; the variant one has what else the decoder needs to reconstruct the sample, and can
be dropped after training. Ordinary layers learn this badly; :class:`RichLayer` has moduli and
phases among its outputs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = [
    "LAYER_KINDS",
    "Codes",
    "InvariantAutoencoder",
    "RichLayer",
    "inverse_distance_loss",
    "network",
]

LAYER_KINDS = {
    "rich": "input, norms, normalised linear and normalised quadratic units",
    "selu": "linear units with SELU, started as these should be",
    "relu": "linear units with ReLU",
    "tanh": "linear units with tanh, a sigmoid from -1 to 1",
    "sigmoid": "linear units with a sigmoid",
}
# activation, and the gain of initial weights before it
_ACTIVATIONS: dict[str, tuple[type[nn.Module], float]] = {
    "selu": (nn.SELU, 1.0),
    "relu": (nn.ReLU, math.sqrt(2)),
    "tanh": (nn.Tanh, 5 / 3),
    "sigmoid": (nn.Sigmoid, 1.0),
}


class RichLayer(nn.Module):
    """A layer with moduli and phases: ``[x, n, a / n, b / n, (a / n)(b / n)]``.

    Here a and b are the even and odd columns of ``W x + c``, and ``n = sqrt(a^2 + b^2 + eps)``,
    column by column. If a and b are real and imaginary part of a Fourier coefficient, which one
    linear map can make them, n is its modulus and ``a / n``, ``b / n`` are cosine and sine of its
    phase. ``eps`` keeps values and gradients finite where a and b vanish, the latter below
    ``1 / sqrt(eps)``; it makes n too large by at most ``sqrt(eps)``.

    Args:
        in_features: Size of the input.
        n_pairs: Number of columns of a, and of b; None is half the size of the input, so that the
            output is three times as large as the input.
        eps: Constant that is added to squared norms.
    """

    def __init__(self, in_features: int, n_pairs: int | None = None, eps: float = 1e-6) -> None:
        super().__init__()
        if n_pairs is None and in_features % 2:
            raise ValueError(
                f"an odd number of inputs has no half: give n_pairs for in_features={in_features}"
            )
        n_pairs = in_features // 2 if n_pairs is None else n_pairs
        if in_features < 1 or n_pairs < 1 or not eps > 0:
            raise ValueError(
                "in_features, n_pairs and eps must be positive, "
                f"got {in_features}, {n_pairs} and {eps}"
            )
        self.linear = nn.Linear(in_features, 2 * n_pairs)
        self.in_features = in_features
        self.out_features = in_features + 4 * n_pairs
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs ``[..., out_features]`` of inputs ``[..., in_features]``."""
        a, b = self.linear(x).unflatten(-1, (-1, 2)).unbind(-1)
        norm = (a.square() + b.square() + self.eps).sqrt()
        a, b = a / norm, b / norm
        return torch.cat([x, norm, a, b, a * b], dim=-1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, eps={self.eps}"


def network(
    layer: str, in_features: int, out_features: int, depth: int, width: int
) -> nn.Sequential:
    """Return ``depth`` layers of a kind, and a linear layer after them.

    Args:
        layer: One of ``LAYER_KINDS``. Outputs of a rich layer are its inputs and two for each
            linear unit, so that later ones see more.
        in_features: Size of the input.
        out_features: Size of the output.
        depth: Number of layers before the last.
        width: Number of linear units per layer, even for rich layers.
    """
    if layer not in LAYER_KINDS:
        raise ValueError(f"unknown layer {layer!r}; choose from {', '.join(LAYER_KINDS)}")
    if min(in_features, out_features, width) < 1 or depth < 0:
        raise ValueError(
            f"a network has positive sizes and no negative depth, got in_features={in_features}, "
            f"out_features={out_features}, width={width}, depth={depth}"
        )
    if layer == "rich" and width % 2:
        raise ValueError(f"rich layers pair their linear units: width must be even, got {width}")
    modules: list[nn.Module] = []
    for _ in range(depth):
        if layer == "rich":
            rich = RichLayer(in_features, width // 2)
            modules.append(rich)
            in_features = rich.out_features
        else:
            activation, gain = _ACTIVATIONS[layer]
            modules += [_linear(in_features, width, gain), activation()]
            in_features = width
    return nn.Sequential(*modules, nn.Linear(in_features, out_features))


def _linear(in_features: int, width: int, gain: float) -> nn.Linear:
    """Return a linear layer with weights of variance ``gain^2 / in_features`` and no bias at first.

    A gain of 1 keeps the outputs of SELU at unit variance.
    """
    linear = nn.Linear(in_features, width)
    nn.init.normal_(linear.weight, std=gain * in_features**-0.5)
    nn.init.zeros_(linear.bias)
    return linear


class Codes(NamedTuple):
    """The two parts of a code: ``[n, n_invariant]``, and all other entries."""

    invariant: Tensor
    variant: Tensor


class InvariantAutoencoder(nn.Module):
    """An encoder to an invariant and a variant code, and a decoder of both.

    ``model(x)`` is the reconstruction and the codes, ``model.encode(x)`` the codes alone.

    Args:
        encoder: Network that maps samples ``[n, ...]`` to codes ``[n, k]``.
        decoder: Network that maps codes to samples.
        n_invariant: Number of first entries of a code that are to be invariant; fewer than k.
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module, n_invariant: int) -> None:
        super().__init__()
        if n_invariant < 1:
            raise ValueError(f"n_invariant must be positive, got {n_invariant}")
        self.encoder = encoder
        self.decoder = decoder
        self.n_invariant = n_invariant

    def encode(self, x: Tensor) -> Codes:
        """Return the codes of samples ``[n, ...]``."""
        return self._split(self.encoder(x))

    def forward(self, x: Tensor) -> tuple[Tensor, Codes]:
        """Return the reconstruction and the codes of samples ``[n, ...]``."""
        code = self.encoder(x)
        return self.decoder(code), self._split(code)

    def _split(self, code: Tensor) -> Codes:
        if code.ndim != 2 or code.shape[1] <= self.n_invariant:
            raise ValueError(
                f"codes must be [n, k] with k above n_invariant={self.n_invariant}, for a variant "
                f"part as well; the encoder's have shape {list(code.shape)}"
            )
        return Codes(code[:, : self.n_invariant], code[:, self.n_invariant :])

    def extra_repr(self) -> str:
        return f"n_invariant={self.n_invariant}"


def inverse_distance_loss(
    code: Tensor, other: Tensor, distance: Tensor, delta: float = 1.0, alpha: float = 0.3
) -> Tensor:
    """Return the mean squared difference between inverse distances of codes and of things.

    ``(1 / (delta + alpha d^2) - 1 / (delta + alpha |z - z'|^2))^2``. Inverses make small distances
    count most: far apart need only stay far apart. For d = 0 the loss is of fourth order in
    ``|z - z'|`` below ``sqrt(delta / alpha)``, so much smaller than squared differences of codes.

    Args:
        code: Invariant codes z, ``[n, k]``.
        other: Invariant codes z' of the other samples of the pairs, ``[n, k]``.
        distance: True distances d, ``[n]``, zero for two views of the same thing.
        delta: Constant that keeps inverses finite.
        alpha: Weight of squared distances, whose unit is ``sqrt(delta / alpha)``. It should not be
            far below those of different things, or all that is learnt is whether two are the same.
    """
    if not (delta > 0 and alpha > 0):
        raise ValueError(f"delta and alpha must be positive, got {delta} and {alpha}")
    if code.ndim != 2 or other.shape != code.shape or distance.shape != code.shape[:1]:
        raise ValueError(
            "codes must be two times [n, k] with distances [n], got shapes "
            f"{list(code.shape)}, {list(other.shape)} and {list(distance.shape)}"
        )
    squared = (code - other).square().sum(1)
    wanted = (delta + alpha * distance.square()).reciprocal()
    found = (delta + alpha * squared).reciprocal()
    return (wanted - found).square().mean()
