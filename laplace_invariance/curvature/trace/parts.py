"""Tensors made of elements of a parameter, and the blocks of what is added or multiplied."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from laplace_invariance.curvature.rules import AnyBlock, ElementwiseBlock, Map, MatrixBlock

__all__ = ["ELSEWHERE", "Answers", "Part", "places_of", "whole"]

ELSEWHERE = -1  # in a map: an element of no parameter, or of another one
MOST_ANSWERS = 1000  # that are kept; batches of other sizes have maps of their own

Answer = TypeVar("Answer")


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor made of elements of one parameter, or a term of a sum of such tensors.

    Attributes:
        index: Index of the parameter.
        parameter: The parameter.
        map: For each element of the tensor, its place in the flat parameter, or ``ELSEWHERE``.
        history: What was done to the parameter, so that equal ones have equal maps; None if that
            cannot be said without looking at the map.
    """

    index: int
    parameter: nn.Parameter
    map: Tensor
    history: tuple[Hashable, ...] | None = None

    def moved(self, places: Tensor, *step: Any) -> Part:
        """Return the part with another map, which was made of the present one by a step.

        Args:
            places: The map.
            *step: What was done, in numbers, strings and containers of them; with anything else,
                such as a tensor, the part has no history.
        """
        history = None
        if self.history is not None and (frozen := _frozen(step)) is not None:
            history = (*self.history, frozen)
        return Part(self.index, self.parameter, places, history)

    @property
    def is_in_order(self) -> bool:
        """Whether it has all elements in their order."""
        return self.map.numel() == self.parameter.numel() and torch.equal(
            self.map.flatten(), places_of(self.parameter).flatten()
        )

    @property
    def is_transposed(self) -> bool:
        """Whether it is the transposed matrix."""
        other = self.parameter
        return self.map.ndim == other.ndim == 2 and torch.equal(self.map.mT, places_of(other))


def whole(index: int, parameter: nn.Parameter) -> Part:
    """Return a parameter as a part of itself."""
    history = (index, str(parameter.device), tuple(parameter.shape))
    return Part(index, parameter, places_of(parameter), history)


def _frozen(value: Any) -> Hashable | None:
    """Return a value as something that can be compared and hashed, None if it cannot be."""
    if isinstance(value, slice):
        return _frozen(("slice", value.start, value.stop, value.step))
    if isinstance(value, list | tuple):
        found = tuple(_frozen(entry) for entry in value)
        return None if None in found else found
    if isinstance(value, dict):
        return _frozen(sorted(value.items()))
    if value is None or value is ... or type(value) in (bool, int, float, str):
        return (type(value).__name__, str(value))
    return None


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers to questions about maps, which are kept.

    A model does the same with its parameters in every pass, and to look at a map on a GPU is to
    wait for it.

    Attributes:
        known: The answers, by history of the part and question.
    """

    known: dict[Hashable, Any] = field(default_factory=dict)

    def is_in_order(self, part: Part) -> bool:
        """Return whether a part has all elements of its parameter in their order."""
        return self._ask(part, ("in order",), lambda: part.is_in_order)

    def is_matrix(self, part: Part) -> bool:
        """Return whether a part is the parameter as a matrix with rows along its first axis."""
        same_rows = part.map.ndim == 2 and len(part.map) == len(part.parameter)
        return same_rows and self.is_in_order(part)

    def is_transposed(self, part: Part) -> bool:
        """Return whether a part is the transposed matrix."""
        return self._ask(part, ("transposed",), lambda: part.is_transposed)

    def spread(self, part: Part, shape: Sequence[int], sign: int, factor: bool) -> AnyBlock | None:
        """Return the block of a parameter that is added to, or multiplied with, data everywhere.

        Args:
            part: Where elements of the parameter are.
            shape: Shape ``[rows, ...]`` of the result.
            sign: Sign with which the gradient counts.
            factor: Whether it is multiplied.

        Returns:
            The block; None if elements differ between rows, or elements of a factor in their
            number.
        """
        question = ("spread", tuple(shape), sign, factor)
        return self._ask(part, question, lambda: _spread(part, shape, sign, factor))

    def _ask(self, part: Part, question: Hashable, look: Callable[[], Answer]) -> Answer:
        if part.history is None:
            return look()
        key = (part.history, question)
        if key not in self.known:
            if len(self.known) >= MOST_ANSWERS:
                self.known.clear()
            self.known[key] = look()
        return self.known[key]


def places_of(parameter: Tensor) -> Tensor:
    """Return the map of a parameter itself."""
    return torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape)


def _spread(part: Part, shape: Sequence[int], sign: int, is_factor: bool) -> AnyBlock | None:
    """Return what :meth:`Answers.spread` does, by looking at the map."""
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
