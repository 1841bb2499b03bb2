"""Tensors made of elements of a parameter, and the blocks of what is added or multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laplace_invariance.curvature.rules import AnyBlock, ElementwiseBlock, Map, MatrixBlock

__all__ = ["ELSEWHERE", "Part", "places_of", "spread"]

ELSEWHERE = -1  # in a map: an element of no parameter, or of another one


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor made of elements of one parameter, or a term of a sum of such tensors.

    Attributes:
        index: Index of the parameter.
        parameter: The parameter.
        map: For each element of the tensor, its place in the flat parameter, or ``ELSEWHERE``.
    """

    index: int
    parameter: nn.Parameter
    map: Tensor

    @property
    def is_matrix(self) -> bool:
        """Whether it is the parameter as a matrix, whose rows are along its first axis."""
        return self.map.ndim == 2 and len(self.map) == len(self.parameter) and self.is_in_order

    @property
    def is_transposed(self) -> bool:
        """Whether it is the transposed matrix."""
        other = self.parameter
        return self.map.ndim == other.ndim == 2 and torch.equal(self.map.mT, places_of(other))

    @property
    def is_in_order(self) -> bool:
        """Whether it has all elements in their order."""
        return self.map.numel() == self.parameter.numel() and torch.equal(
            self.map.flatten(), places_of(self.parameter).flatten()
        )


def places_of(parameter: Tensor) -> Tensor:
    """Return the map of a parameter itself."""
    return torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape)


def spread(part: Part, shape: Sequence[int], sign: int, is_factor: bool) -> AnyBlock | None:
    """Return the block of a parameter that is added to, or multiplied with, data everywhere.

    Args:
        part: Where elements of the parameter are.
        shape: Shape ``[rows, ...]`` of the result.
        sign: Sign with which the gradient counts.
        is_factor: Whether it is multiplied.

    Returns:
        The block; None if elements differ between rows, or elements of a factor in their number.
    """
    places = part.map.expand(shape) if part.map.ndim <= len(shape) else part.map
    if not len(places) or not torch.equal(places, places[:1].expand_as(places)):
        return None
    flat = places[0].flatten()
    numel = part.parameter.numel()
    here = (flat != ELSEWHERE).nonzero().squeeze(1)
    order = here[flat[here].argsort(stable=True)]
    numbers = flat[here].bincount(minlength=numel)
    uniform = bool((numbers == numbers[0]).all()) and int(numbers[0]) > 0
    if not uniform:
        if is_factor:
            return None
        target = flat[here]

        def scattered(g: Tensor) -> Tensor:
            values = sign * g.flatten(1)[:, here]
            return g.new_zeros(len(g), numel).index_add(1, target, values).unsqueeze(1)

        return ElementwiseBlock("", None, scattered)
    count = int(numbers[0])

    def arranged(x: Tensor) -> Tensor:
        return x.flatten(1)[:, order].view(len(x), numel, count).mT

    if is_factor:
        return ElementwiseBlock("", lambda x: sign * arranged(x), arranged)
    return _of_positions(part.parameter, lambda g: sign * arranged(g))


def _of_positions(parameter: nn.Parameter, g: Map) -> AnyBlock:
    """Return the block of something added: of a matrix, one row per position, as of one-hots."""
    sizes = [size for size in parameter.shape if size > 1]
    if len(sizes) < 2:
        return ElementwiseBlock("", None, g)
    width = sizes[-1]
    length = parameter.numel() // width

    def one_hot(x: Tensor) -> Tensor:
        return torch.eye(length, dtype=parameter.dtype, device=x.device).expand(len(x), -1, -1)

    def rows(gradient: Tensor) -> Tensor:
        return g(gradient).sum(1).unflatten(-1, (length, width))

    return MatrixBlock("", one_hot, rows, linear=False, transposed=True, rows=length)
