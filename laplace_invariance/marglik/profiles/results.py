"""A profile: evidences along one range, and what follows from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laplace_invariance.marglik.estimators.base import finite
from laplace_invariance.tables import table

__all__ = ["Profile", "or_else", "profile_of"]

SAME = 0.005  # nats per example that are not told apart
N_ERRORS = 2  # standard errors that a clear difference exceeds
MARGIN = 0.02  # nats per example below the best that still count as flat
MAXIMUM, WITHIN = "maximum", "maximum within the errors"
UNCLEAR, NONE = "not clear", "no maximum"


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

    Raises:
        FloatingPointError: If the evidence is finite at no value.
    """

    name: str
    values: tuple[float, ...]
    repeats: tuple[tuple[float, ...], ...]
    learnt: float
    limit: float = math.inf
    in_words: Callable[[float], str] = field(default="±{:.3f}".format, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not any(map(math.isfinite, self.evidences)):
            raise FloatingPointError(
                f"the log evidence is finite at no width of {self.name}: training diverged; choose "
                "a smaller step size by optimizer_kwargs={'lr': ...}"
            )

    @property
    def evidences(self) -> list[float]:
        """Log evidence per example at each value, the mean over repetitions.

        It is minus infinity if it was not finite in one of them.
        """
        columns = zip(*self.repeats, strict=True)
        return [
            statistics.fmean(found) if all(map(math.isfinite, found)) else -math.inf
            for found in columns
        ]

    @property
    def errors(self) -> list[float] | None:
        """Standard error of how far each evidence is below the best; None if it is not known.

        All values of a repetition have the same batches and draws, so that it is the error of a
        mean of differences. It is not known of a single repetition, nor if all are the same.
        """
        if len(set(self.repeats)) == 1:
            return None
        differences = [[found[self._best] - one for one in found] for found in self.repeats]
        return [_standard_error(found) for found in zip(*differences, strict=True)]

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
    def loss_error(self) -> float | None:
        """Standard error of the loss; None if it is not known."""
        errors = self.errors
        return None if errors is None else errors[self._learnt]

    @property
    def is_maximum(self) -> bool:
        """Whether the loss is within its standard error, or 0.005 nats per example."""
        return math.isfinite(self.loss) and self.loss <= max(SAME, self.loss_error or 0.0)

    @property
    def verdict(self) -> str:
        """Whether the learnt value is a maximum, one within the errors, none, or not clear.

        It is none if the loss exceeds two standard errors. Without these nothing is clear, but that
        a network that diverges is not at a maximum.
        """
        error = self.loss_error
        if not math.isfinite(self.loss):
            return NONE
        if error is None:
            return UNCLEAR
        if self._best == self._learnt:
            return MAXIMUM
        if self.is_maximum:
            return WITHIN
        return NONE if self.loss > max(SAME, N_ERRORS * error) else UNCLEAR

    @property
    def interval(self) -> tuple[float, float]:
        """Where the evidence, between values a line, is within 0.02 nats of the best around it.

        A dip that is within two standard errors does not end it.
        """
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

    @property
    def _lowest(self) -> float:
        return self.evidences[self._best] - MARGIN

    def _reach(self, indices: Sequence[int]) -> float:
        """Return how far one can go from the best value through others before it is too low."""
        evidences, errors, lowest = self.evidences, self.errors, self._lowest
        last = 0
        for place, i in enumerate(indices):
            if evidences[i] >= lowest:
                last = place
            elif errors is None or not evidences[i] + N_ERRORS * errors[i] >= lowest:
                break
        near, *beyond = indices[last:]
        if not beyond or not math.isfinite(evidences[beyond[0]]):
            return self.values[near]
        far = beyond[0]
        share = (evidences[near] - lowest) / (evidences[near] - evidences[far])
        return self.values[near] + share * (self.values[far] - self.values[near])

    def __str__(self) -> str:
        evidences, errors = self.evidences, self.errors
        rows = [[self.name, "log evidence", "below the best", ""]]
        for i, value in enumerate(self.values):
            below = f"{evidences[self._best] - evidences[i]:.3f}"
            if errors is not None and i != self._best:
                below += f" ± {errors[i]:.3f}"
            if not math.isfinite(evidences[i]):
                below = ""
            rows.append([self.in_words(value), f"{evidences[i]:.3f}", below, self._mark(i)])
        return f"{table(rows, right=(1, 2))}\n{self.conclusion()}"

    def _mark(self, index: int) -> str:
        marks = []
        if index == self._learnt:
            marks.append("learnt")
        if index == self._best:
            marks.append("best")
        if not math.isfinite(self.evidences[index]):
            marks.append("diverged")
        return ", ".join(marks)

    def conclusion(self) -> str:
        """Say in one line whether the learnt value is a maximum, and how flat."""
        low, high = self.interval
        words = (
            f"{self._judgement()}; within {MARGIN} nats per example of the best from "
            f"{self.in_words(low)} to {self.in_words(high)}"
        )
        again = [
            self.in_words(value)
            for value, evidence in zip(self.values, self.evidences, strict=True)
            if evidence >= self._lowest and not low <= value <= high
        ]
        if again:
            words += f", and again at {', '.join(again)}"
        if self.best == self.values[-1] < self.limit:
            words += ", and nothing wider was tried"
        if self.best == self.values[0] > 0:
            words += ", and nothing narrower was tried"
        return words

    def _judgement(self) -> str:
        place, best = f"{self.name} {self.in_words(self.learnt)}", self.in_words(self.best)
        better = f"{best} is better by {self.loss:.3f}"
        if not math.isfinite(self.loss):
            return f"{place} is not a maximum: training diverges there, and {best} is the best"
        if self.loss_error is None:
            if self._best == self._learnt:
                better = "it is the best that was tried"
            why = "its error is not known, from one repetition or from such as are all the same"
            return f"whether {place} is a maximum is not clear: {better}, but {why}"
        better += f" ± {self.loss_error:.3f}"
        near = "the errors" if self.loss <= self.loss_error else f"{SAME} nats per example"
        return {
            MAXIMUM: f"{place} is a maximum",
            WITHIN: f"{place} is a maximum within {near}: {better}",
            UNCLEAR: f"whether {place} is a maximum is not clear: {better}; more repetitions tell",
            NONE: f"{place} is not a maximum: {better}",
        }[self.verdict]

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
            "loss": finite(self.loss),
            "loss_error": None if self.loss_error is None else finite(self.loss_error),
            "is_maximum": self.is_maximum,
            "verdict": self.verdict,
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
