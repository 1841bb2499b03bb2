"""A profile: evidences along one range, and what follows from them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laplace_invariance.marglik.estimators.base import finite
from laplace_invariance.tables import table

__all__ = ["Profile", "or_else", "profile_of"]

SAME = 0.005  # nats per example that are not told apart
MARGIN = 0.02  # nats per example below the best that still count as flat


@dataclass(frozen=True)
class Profile:
    """Log evidence along one range; prints as a table with its conclusion.

    Attributes:
        name: Name of the range.
        values: Widths of the range, increasing, with the learnt one among them.
        repeats: Log evidence per example, of each repetition a tuple with one for each value.
        learnt: The learnt width.
        limit: Largest possible width, or infinity.
        in_words: Function that says a width in words and units.
    """

    name: str
    values: tuple[float, ...]
    repeats: tuple[tuple[float, ...], ...]
    learnt: float
    limit: float = math.inf
    in_words: Callable[[float], str] = field(default="±{:.3f}".format, repr=False, compare=False)

    @property
    def evidences(self) -> list[float]:
        """Log evidence per example at each value, the mean over repetitions."""
        return [statistics.fmean(found) for found in zip(*self.repeats, strict=True)]

    @property
    def errors(self) -> list[float] | None:
        """Standard error of each evidence beside the others; None of a single repetition.

        All values of a repetition have the same batches and draws. What these add to all of them
        does not change the curve, and does not count.
        """
        if len(self.repeats) == 1:
            return None
        centred = [[one - statistics.fmean(found) for one in found] for found in self.repeats]
        return [_standard_error(found) for found in zip(*centred, strict=True)]

    @property
    def best(self) -> float:
        """Value with the highest evidence."""
        return self.values[self._best]

    @property
    def loss(self) -> float:
        """By how much the evidence at the learnt value is below the best, per example."""
        evidences = self.evidences
        return evidences[self._best] - evidences[self._learnt]

    @property
    def loss_error(self) -> float:
        """Standard error of the loss; 0 of a single repetition, of which it is not known."""
        if len(self.repeats) == 1:
            return 0.0
        return _standard_error([found[self._best] - found[self._learnt] for found in self.repeats])

    @property
    def is_maximum(self) -> bool:
        """Whether the loss is within its standard error, or 0.005 nats per example."""
        return self.loss <= max(SAME, self.loss_error)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the evidence, between values a line, is within 0.02 nats of the best around it."""
        narrower = range(self._best, -1, -1)
        wider = range(self._best, len(self.values))
        return self._reach(narrower), self._reach(wider)

    @property
    def width(self) -> float:
        """Length of the interval: how flat the maximum is."""
        low, high = self.interval
        return high - low

    @property
    def _best(self) -> int:
        evidences = self.evidences
        return max(range(len(evidences)), key=lambda i: evidences[i])

    @property
    def _learnt(self) -> int:
        return self.values.index(self.learnt)

    def _reach(self, indices: Sequence[int]) -> float:
        """Return how far one can go from the best value through others before it is too low."""
        evidences = self.evidences
        lowest = evidences[self._best] - MARGIN
        for near, far in itertools.pairwise(indices):
            if evidences[far] < lowest:
                share = (evidences[near] - lowest) / (evidences[near] - evidences[far])
                return self.values[near] + share * (self.values[far] - self.values[near])
        return self.values[indices[-1]]

    def __str__(self) -> str:
        evidences, errors = self.evidences, self.errors
        rows = [[self.name, "log evidence", "below the best", ""]]
        for i, value in enumerate(self.values):
            below = f"{evidences[self._best] - evidences[i]:.3f}"
            if errors is not None:
                below += f" ± {errors[i]:.3f}"
            rows.append([self.in_words(value), f"{evidences[i]:.3f}", below, self._mark(i)])
        return f"{table(rows, right=(1, 2))}\n{self.conclusion()}"

    def _mark(self, index: int) -> str:
        marks = []
        if index == self._learnt:
            marks.append("learnt")
        if index == self._best:
            marks.append("best")
        return ", ".join(marks)

    def conclusion(self) -> str:
        """Say in one line whether the learnt value is a maximum, and how flat."""
        learnt, best = self.in_words(self.learnt), self.in_words(self.best)
        low, high = map(self.in_words, self.interval)
        words = f"{self.name} {learnt} is a maximum"
        if not self.is_maximum:
            words = f"{self.name} {learnt} is not a maximum: {best} is better by {self.loss:.3f}"
        words += f"; within {MARGIN} nats per example of the best from {low} to {high}"
        if self.best == self.values[-1] < self.limit:
            words += ", and nothing wider was tried"
        return words

    def summary(self) -> dict[str, Any]:
        """Return everything that is known, for JSON."""
        return {
            "name": self.name,
            "learnt": self.learnt,
            "limit": finite(self.limit),
            "values": list(self.values),
            "repeats": [[finite(one) for one in found] for found in self.repeats],
            "evidences": [finite(one) for one in self.evidences],
            "errors": None if self.errors is None else [finite(one) for one in self.errors],
            "best": self.best,
            "is_maximum": self.is_maximum,
            "interval": list(self.interval),
        }


def profile_of(summary: Mapping[str, Any], in_words: Callable[[float], str]) -> Profile:
    """Return the profile of which :meth:`Profile.summary` returned the summary.

    Args:
        summary: Summary, as read from JSON.
        in_words: Function that says a width in words and units.
    """
    repeats = [[or_else(one, -math.inf) for one in found] for found in summary["repeats"]]
    return Profile(
        summary["name"],
        tuple(summary["values"]),
        tuple(map(tuple, repeats)),
        summary["learnt"],
        or_else(summary["limit"], math.inf),
        in_words,
    )


def or_else(value: float | None, infinite: float) -> float:
    """Return the value, or an infinite one for None, which stands for it in JSON."""
    return infinite if value is None else value


def _standard_error(values: Sequence[float]) -> float:
    if not all(map(math.isfinite, values)):
        return math.inf
    return statistics.stdev(values) / math.sqrt(len(values))
