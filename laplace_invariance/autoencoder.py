"""Autoencoders with a code that does not change under unknown transformations, learnt from pairs of samples.

Zhang and Arodz, *Learning Invariance in Deep Neural Networks* (2021). Nothing is known of the transformations, only of pairs of
samples how far the things they show are apart: zero, if one is the other, transformed. The encoder's code has two parts. The
invariant one is to keep these distances; the variant one has what else the decoder needs to get the sample back, and can be
dropped after training. Ordinary layers learn this badly; :class:`RichLayer` has moduli and phases among its outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = [
    "LAYERS",
    "Codes",
    "InvariantAutoencoder",
    "RichLayer",
    "inverse_distance_loss",
    "network",
]

LAYERS = {
    "rich": "input, norms, normalised linear and normalised quadratic units",
    "selu": "linear units with SELU, started as these should be",
}


class RichLayer(nn.Module):
    """Map x to ``[x, n, a / n, b / n, (a / n)(b / n)]``, where a and b are the even and odd columns of ``W x + c``.

    ``n = sqrt(a^2 + b^2 + eps)``, column by column. If a and b are real and imaginary part of a Fourier coefficient, which one
    linear map can make them, n is its modulus and ``a / n``, ``b / n`` are cosine and sine of its phase. ``eps`` keeps values and
    gradients finite where a and b vanish, the latter below ``1 / sqrt(eps)``; it makes n too large by at most ``sqrt(eps)``.

    Args:
        in_features: size of the input.
        n_pairs: columns of a, and of b; by default half the input's, so that the output is three times as large as the input.
        eps: added to squared norms.
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
                f"in_features, n_pairs and eps must be positive, got {in_features}, {n_pairs} and {eps}"
            )
        self.linear = nn.Linear(in_features, 2 * n_pairs)
        self.in_features, self.out_features, self.eps = in_features, in_features + 4 * n_pairs, eps

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.linear(x).unflatten(-1, (-1, 2)).unbind(-1)
        norm = (a.square() + b.square() + self.eps).sqrt()
        a, b = a / norm, b / norm
        return torch.cat([x, norm, a, b, a * b], dim=-1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, eps={self.eps}"


def network(
    layer: str, in_features: int, out_features: int, depth: int, width: int
) -> nn.Sequential:
    """Return ``depth`` layers of a kind with ``width`` linear units each, and a linear layer after them.

    Args:
        layer: one of ``LAYERS``. Outputs of a rich layer are its inputs and two for each linear unit, so later ones see more.
        in_features: size of the input.
        out_features: size of the output.
        depth: number of layers before the last.
        width: linear units per layer, an even number for rich layers.
    """
    if layer not in LAYERS:
        raise ValueError(f"unknown layer {layer!r}; choose from {', '.join(LAYERS)}")
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
            modules.append(RichLayer(in_features, width // 2))
            in_features = modules[-1].out_features
        else:
            linear = nn.Linear(in_features, width)
            nn.init.normal_(
                linear.weight, std=in_features**-0.5
            )  # keeps SELU's outputs at unit variance
            nn.init.zeros_(linear.bias)
            modules += [linear, nn.SELU()]
            in_features = width
    return nn.Sequential(*modules, nn.Linear(in_features, out_features))


class Codes(NamedTuple):
    """The two parts of a code: ``[n, n_invariant]`` and ``[n, all others]``."""

    invariant: Tensor
    variant: Tensor


class InvariantAutoencoder(nn.Module):
    """Encode samples by an invariant and a variant code, and decode them again.

    ``model(x)`` is the reconstruction and the codes, ``model.encode(x)`` the codes alone.

    Args:
        encoder: maps samples ``[n, ...]`` to codes ``[n, k]``.
        decoder: maps codes to samples.
        n_invariant: how many of the first entries of a code are to be invariant; fewer than k.
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module, n_invariant: int) -> None:
        super().__init__()
        if n_invariant < 1:
            raise ValueError(f"n_invariant must be positive, got {n_invariant}")
        self.encoder, self.decoder, self.n_invariant = encoder, decoder, n_invariant

    def encode(self, x: Tensor) -> Codes:
        """Return the codes of samples."""
        return self._split(self.encoder(x))

    def forward(self, x: Tensor) -> tuple[Tensor, Codes]:
        code = self.encoder(x)
        return self.decoder(code), self._split(code)

    def _split(self, code: Tensor) -> Codes:
        if code.ndim != 2 or code.shape[1] <= self.n_invariant:
            raise ValueError(
                f"codes must be [n, k] with k above n_invariant={self.n_invariant}, for a variant part as well; the encoder's "
                f"have shape {list(code.shape)}"
            )
        return Codes(*code.tensor_split([self.n_invariant], dim=1))

    def extra_repr(self) -> str:
        return f"n_invariant={self.n_invariant}"


def inverse_distance_loss(
    code: Tensor, other: Tensor, distance: Tensor, delta: float = 1.0, alpha: float = 0.3
) -> Tensor:
    """Return the mean over pairs of ``(1 / (delta + alpha d^2) - 1 / (delta + alpha |z - z'|^2))^2``.

    Inverses, so that small distances count most: far apart need only stay far apart. For d = 0 the loss is of fourth order in
    ``|z - z'|``, below ``sqrt(delta / alpha)``, so much smaller than squared differences of codes.

    Args:
        code: invariant codes z, ``[n, k]``.
        other: those of the other samples of the pairs, z'.
        distance: true distances d, ``[n]``, zero for two views of the same.
        delta: keeps inverses finite.
        alpha: the unit of distances is ``sqrt(delta / alpha)``. It should not be far below those of different things, or all
            that is learnt is whether two are the same.
    """
    if not (delta > 0 and alpha > 0):
        raise ValueError(f"delta and alpha must be positive, got {delta} and {alpha}")
    if code.ndim != 2 or other.shape != code.shape or distance.shape != code.shape[:1]:
        raise ValueError(
            f"codes must be two times [n, k] with distances [n], got shapes {list(code.shape)}, {list(other.shape)} and "
            f"{list(distance.shape)}"
        )
    found = (code - other).square().sum(1)
    return (
        ((delta + alpha * distance.square()).reciprocal() - (delta + alpha * found).reciprocal())
        .square()
        .mean()
    )
