"""Single ranges of a model: their names, their limits, and which of their widths to try."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from laplace_invariance.augmentations.base import Augmentation
from laplace_invariance.hyper import hyperparameters
from laplace_invariance.marglik.hyperparameters import outermost_augmentations

__all__ = ["Range", "around", "ranges_of"]

# Values around the learnt one, by default.
FACTORS = (0.25, 0.5, 0.8, 1.25, 1.6, 2.5)
N_VALUES = 9
LEAST_OPEN = 0.1  # width below which a range is closed,
OPEN = 0.25  # and whose factors are tried then
MOST = 1e4  # width of a range without limit that is not a slip
CLOSE = 0.01  # distance, as a share of all, below which two values are one


class Range:
    """One range of a model that can be learnt.

    Args:
        model: Model with augmentations.
        name: Name of the range.

    Attributes:
        name: The same.
        augmentation: Augmentation that has it.
        learnt: Width when this was made.
        limit: Largest width that its limits and its constraint let it have, or infinity.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        found = _learnt_ranges(model)
        if not found:
            raise ValueError(
                "there is no range to profile: the model has no augmentation whose hyperparameters "
                "require grad; wrap the network in InvariantModel(net, augmentation)"
            )
        if not isinstance(name, str):
            raise TypeError(f"name must be that of one range, such as 'rotation', got {name!r}")
        if name not in found:
            raise ValueError(
                f"there is no range {name!r} to profile; choose from {', '.join(found)}"
            )
        self.name = name
        self.augmentation, self._own_name = found[name]
        self.learnt = self.augmentation.widths()[self._own_name]
        if not math.isfinite(self.learnt):
            raise ValueError(f"{name} is not finite: {self.learnt}")
        self._entries = [tensor.clone() for tensor in self.entries()]
        largest = self.augmentation.largest(self._own_name)
        reached = self._reached(min(largest, MOST))
        self.limit = math.inf if math.isinf(largest) and _same(reached, MOST) else reached
        if _same(self.limit, largest):
            self.limit = largest

    def points(self, values: Sequence[float] | None) -> tuple[float, ...]:
        """Return the values to try, with the learnt one, each once and in order.

        Args:
            values: Values that are wanted; None chooses some.

        Raises:
            TypeError: If values are not several numbers.
            ValueError: If a value is outside of its limits, a constraint cannot reach it, it is
                there twice, or there is none but the learnt one.
        """
        if values is None:
            return self._reachable(around(self.learnt, self.limit))
        found = {self.learnt}
        for given in _numbers(values):
            value = self._checked(given)
            if value in found and value != self.learnt:
                raise ValueError(f"values has {value:.4g} twice")
            found.add(value)
        if len(found) == 1:
            raise ValueError(
                f"there is nothing to compare the learnt {self.name} with: give other values, or "
                "None"
            )
        return tuple(sorted(found))

    def _checked(self, value: float) -> float:
        """Return a width, or the learnt one if it is the same; raise if the range cannot have it.

        The learnt width may be beyond the limit, if several numbers add up to it.
        """
        if _same(value, self.learnt):
            return self.learnt
        if not 0 <= value <= self.limit or not math.isfinite(value):
            raise ValueError(
                f"{self.name} must be finite and between 0 and {self.limit:.4g}, its limit, "
                f"got {value}"
            )
        if value > MOST:
            raise ValueError(f"{self.name} must be at most {MOST:g}, got {value}")
        reached = self._reached(value)
        if not _same(reached, value):
            raise ValueError(
                f"{self.name} cannot be {value:.4g}: the nearest that its constraint lets it be is "
                f"{reached:.4g}"
            )
        return value

    def _reached(self, value: float) -> float:
        """Return the width that the range has when it is set to one; it stays as it is."""
        tensors = list(hyperparameters(self.augmentation))
        kept = [tensor.detach().clone() for tensor in tensors]
        self.put(value)
        reached = self.augmentation.widths()[self._own_name]
        for tensor, before in zip(tensors, kept, strict=True):
            tensor.detach().copy_(before)
        return reached

    def _reachable(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return the learnt value, and the nearest to others that the range can have."""
        found = [self.learnt]
        for value in values:
            reached = self._reached(value)
            reached = value if _same(value, reached) else reached
            if all(abs(reached - other) > CLOSE * max(values) for other in found):
                found.append(reached)
        return tuple(sorted(found))

    @property
    def is_open(self) -> bool:
        """Whether the learnt range is wide enough to be told from none."""
        return self.learnt >= LEAST_OPEN

    def entries(self) -> list[Tensor]:
        """Return views of the numbers that the range is made of."""
        return self.augmentation.entries(self._own_name)

    def put(self, value: float) -> None:
        """Set the range of the model, and no other; the learnt one exactly as it was."""
        if value == self.learnt:
            for tensor, learnt in zip(self.entries(), self._entries, strict=True):
                tensor.copy_(learnt)
            return
        self.augmentation.resize_(self._own_name, value)

    def in_words(self, value: float) -> str:
        """Return a width in words and units."""
        return self.augmentation.in_words(self._own_name, value)


def _numbers(values: Any) -> list[float]:
    """Return values as numbers; raise unless they are several."""
    if isinstance(values, Tensor | np.ndarray):
        values = values.tolist()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"values must be several numbers, such as [0, 0.5, 1], got {values!r}")
    found = list(values)
    for value in found:
        is_number: bool = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number:
            raise TypeError(f"values must be numbers, got {value!r} among them")
    return list(map(float, found))


def _same(one: float, other: float) -> bool:
    """Return whether two widths are the same but for round-off."""
    return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-7)


def ranges_of(model: nn.Module) -> list[Range]:
    """Return all ranges of a model that can be learnt."""
    return [Range(model, name) for name in _learnt_ranges(model)]


def _learnt_ranges(model: nn.Module) -> dict[str, tuple[Augmentation, str]]:
    """Return augmentation and name there of all ranges that can be learnt, by public name."""
    found = outermost_augmentations(model)
    owners = {place: module for place, module in found.items() if module.widths()}
    names: dict[str, tuple[Augmentation, str]] = {}
    for place, module in owners.items():
        for own in module.widths():
            public = own if len(owners) == 1 else f"{place}.{own}"
            names[public] = (module, own)
    return names


def around(learnt: float, limit: float) -> tuple[float, ...]:
    """Return zero, the learnt value, narrower and wider ones, and the limit if there is one."""
    base = learnt if learnt >= LEAST_OPEN else OPEN
    wanted = [0.0, *([limit] if math.isfinite(limit) else [])]
    wanted += [factor * base for factor in FACTORS if factor * base < limit]
    top = max([*wanted, learnt])
    points = [learnt]
    for value in wanted:
        if all(abs(value - other) > CLOSE * top for other in points):
            points.append(value)
    points.sort()
    while len(points) < N_VALUES:
        low, high = max(itertools.pairwise(points), key=lambda pair: pair[1] - pair[0])
        points = sorted([*points, (low + high) / 2])
    return tuple(points)
