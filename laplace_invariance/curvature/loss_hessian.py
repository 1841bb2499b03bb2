"""Directions of the loss Hessian to backpropagate, without any ``[C, C]`` matrix.

For classification ``Lambda = diag(p) - p p^T``, and ``Lambda = L L^T`` with
``L = diag(q) - p q^T``, ``q = sqrt(p)``. Columns are one of

    exact:      e_k - e_j for all k but one j, weighted by diag(p') - p' p'^T, where p' are the
                probabilities of the other classes: equal, since Lambda annihilates constants
    truncated:  L w_i for the leading right singular vectors W of L, held fixed
    sampled:    L z / sqrt(m), m random sign vectors z, E[z z^T] = I
    hybrid:     the truncated ones, and L (I - W W^T) z / sqrt(m) for what these leave out

Sampled and hybrid columns are unbiased, in value and in derivative, for any fixed ``W``. For
regression ``Lambda = I``, with unit vectors or random signs as columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_invariance.draws import taped

__all__ = [
    "Columns",
    "LossHessian",
    "exact_columns",
    "fresh_signs",
    "leading_directions",
    "root_product",
    "softmax_trace",
    "unit_directions",
]

# Directions to backpropagate, each [batch, C], and the probabilities that weight them; None if
# these are in the directions.
Columns = tuple[Sequence[Tensor], Tensor | None]

# Further vectors and steps of the block power iteration. Of what eigenvectors keep of the trace, a
# share of 1e-4 is lost at most: random logits of any scale and near ties, 10 to 1000 classes.
OVERSAMPLING = 2
POWER_STEPS = 2


@dataclass(frozen=True)
class LossHessian:
    """How the Hessian of the loss in the outputs is expressed by columns.

    Attributes:
        classification: Whether the likelihood is that of classification, or of regression.
        rank: Number of leading directions, 0 for none.
        n_samples: Number of random directions, 0 for none; with neither, it is exact.
    """

    classification: bool
    rank: int = 0
    n_samples: int = 0

    def n_columns(self, n_outputs: int) -> int:
        """Return the number of columns for a number of outputs."""
        exact = n_outputs - 1 if self.classification else n_outputs
        return min(self.rank + self.n_samples or exact, exact)

    def columns(self, outputs: Tensor) -> Columns:
        """Return the columns for outputs ``[batch, C]``, and their weights."""
        n, classes = outputs.shape
        n_columns = self.n_columns(classes)
        if self.classification and n_columns == classes - 1:
            return exact_columns(outputs)
        if n_columns == classes:
            return unit_directions(outputs), None
        parts = []
        if self.n_samples:
            signs = taped(fresh_signs, n, self.n_samples, classes, outputs)
            parts.append(signs / self.n_samples**0.5)
        if self.rank:
            leading = leading_directions(outputs, self.rank)
            parts = [leading, *(part - (part @ leading.mT) @ leading for part in parts)]
        vectors = torch.cat(parts, dim=1)
        if self.classification:
            vectors = root_product(outputs, vectors)
        return vectors.unbind(1), None


def unit_directions(outputs: Tensor) -> list[Tensor]:
    """Return the unit vectors as directions, each ``[batch, C]`` as the outputs are."""
    units = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
    return [unit.expand_as(outputs) for unit in units]


def exact_columns(logits: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return ``C - 1`` fixed directions that express the softmax Hessian exactly.

    They are differences to the most probable class, whose probability does not enter: all that
    do are small for a confident prediction, and keep their digits.

    Args:
        logits: Outputs ``[batch, C]`` of the network.

    Returns:
        Directions, each ``[batch, C]``, and their weights ``[batch, C - 1]``.
    """
    last = logits.shape[-1] - 1
    likeliest = logits.detach().argmax(-1, keepdim=True)
    classes = torch.arange(last, device=logits.device).expand(len(logits), -1)
    classes = classes.where(classes != likeliest, last)
    directions = []
    for k in classes.unbind(-1):
        direction = torch.zeros_like(logits).scatter_(1, k.unsqueeze(1), 1.0)
        directions.append(direction.scatter_(1, likeliest, -1.0))
    return directions, logits.softmax(-1).gather(1, classes)


def root_product(logits: Tensor, vectors: Tensor) -> Tensor:
    """Return ``L v``, ``L = diag(q) - p q^T``, differentiable in the logits.

    ``q = sqrt(p)`` is formed as ``exp(log_softmax / 2)``, whose derivative is finite for
    saturated logits.

    Args:
        logits: Outputs ``[batch, C]`` of the network.
        vectors: Vectors ``[batch, column, C]``.
    """
    log_p = logits.log_softmax(-1).unsqueeze(1)
    return _root_times(log_p.exp(), (log_p / 2).exp(), vectors)


def _root_times(p: Tensor, q: Tensor, vectors: Tensor) -> Tensor:
    scaled = q * vectors
    return scaled - p * scaled.sum(-1, keepdim=True)


@torch.no_grad()
def leading_directions(logits: Tensor, rank: int, steps: int = POWER_STEPS) -> Tensor:
    """Return approximate leading right singular vectors ``W`` of ``L``.

    By block power iteration with ``L^T L``, at a cost linear in the number of classes. It starts
    at the most probable classes, near which these vectors are for confident predictions.

    Args:
        logits: Outputs ``[batch, C]`` of the network.
        rank: Number of vectors.
        steps: Number of iterations.

    Returns:
        Orthonormal vectors ``[batch, rank, C]``.
    """
    log_p = logits.log_softmax(-1).unsqueeze(1)
    p, q = log_p.exp(), (log_p / 2).exp()
    n, classes = logits.shape
    size = min(rank + OVERSAMPLING, classes)
    likeliest = logits.topk(size).indices.unsqueeze(-1)
    block = p.new_zeros(n, size, classes).scatter_(-1, likeliest, 1.0)
    for _ in range(steps):
        image = _root_times(p, q, block)
        image = q * (image - (image * p).sum(-1, keepdim=True))  # L^T of it
        block = torch.linalg.qr(image.mT).Q.mT
    image = _root_times(p, q, block)
    _, rotation = torch.linalg.eigh(image @ image.mT)
    return rotation[..., -rank:].mT @ block


def softmax_trace(logits: Tensor) -> Tensor:
    """Return the trace of ``Lambda`` for each input, ``sum_c p_c (1 - p_c)``."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p.expm1()).sum(-1)


def fresh_signs(n: int, n_samples: int, classes: int, like: Tensor) -> Tensor:
    """Return random signs ``[n, n_samples, classes]``."""
    shape = (n, n_samples, classes)
    return torch.randint(2, shape, device=like.device).to(like.dtype) * 2 - 1
