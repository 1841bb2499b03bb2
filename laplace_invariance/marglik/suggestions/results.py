"""What is suggested, and how clear it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from laplace_invariance.marglik.estimators.base import finite
from laplace_invariance.tables import table

__all__ = ["Suggestion", "Suggestions", "number"]

N_ERRORS = 2  # standard errors that a clear difference exceeds
RAISES, LOWERS, UNCLEAR = "raises it", "lowers it", "not clear"


@dataclass(frozen=True)
class Suggestion:
    """What an augmentation does to the evidence.

    Attributes:
        ranges: Widths of the ranges, by name.
        words: The same in words and units.
        gains: By how much the log evidence per example is above that of the network alone, once
            for every repeat.
        earlier: Mean gain after half of the steps.
        margin: Gain that is too small to matter.
        can_widen: Whether one of the ranges can be wider.
    """

    ranges: dict[str, float]
    words: str
    gains: list[float]
    earlier: float
    margin: float
    can_widen: bool = False

    @property
    def gain(self) -> float:
        """Mean gain in log evidence per example; minus infinity if one of them is not finite."""
        if not all(map(math.isfinite, self.gains)):
            return -math.inf
        return statistics.fmean(self.gains)

    @property
    def error(self) -> float:
        """Standard error of the gain over repeats; zero if the gain is minus infinity."""
        return _error(self.gains)

    @property
    def verdict(self) -> str:
        """Whether it raises the evidence, lowers it, or whether that is not clear.

        It is not clear either if the gain would be on the other side, or too small, after changing
        once more as it did in the second half of the steps.
        """
        if self.gain == -math.inf:
            return LOWERS
        least = max(N_ERRORS * self.error, self.margin)
        further = 2 * self.gain - self.earlier
        if not math.isfinite(further):
            return UNCLEAR
        if min(self.gain, further) > least:
            return RAISES
        if max(self.gain, further) < -least:
            return LOWERS
        return UNCLEAR

    @property
    def is_clear(self) -> bool:
        """Whether the evidence is clearly higher with the augmentation."""
        return self.verdict == RAISES

    def is_as_good_as(self, other: Suggestion) -> bool:
        """Return whether the evidence is not clearly lower than with another augmentation."""
        if not math.isfinite(self.gain) or not math.isfinite(other.gain):
            return False
        differences = [b - a for a, b in zip(self.gains, other.gains, strict=True)]
        least = max(N_ERRORS * _error(differences), self.margin)
        return statistics.fmean(differences) <= least

    def is_wider_than(self, other: Suggestion) -> bool:
        """Return whether the same ranges are open, none of them narrower, and not all as wide."""
        if self.ranges.keys() != other.ranges.keys():
            return False
        pairs = [(width, other.ranges[name]) for name, width in self.ranges.items()]
        return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)

    def __str__(self) -> str:
        return f"{self.words}: {self.gain:+.3f} ± {self.error:.3f} nats per example"


@dataclass(frozen=True)
class Suggestions:
    """Augmentations by what they do to the evidence, best first; prints as a table.

    Attributes:
        rows: The augmentations, those with the highest gain first.
        evidence: Log evidence per example of the network alone, trained for as many steps.
        chance: Log evidence per example of guessing by the frequencies of classes, or the mean of
            the targets of a regression; None in files where it is not known.
        n_samples: Number of samples that outputs were averaged over.
        n_steps: Number of steps on the weights before evidences were compared.
        n_repeats: Number of repeats with other batches and draws.
    """

    rows: list[Suggestion]
    evidence: float
    chance: float | None
    n_samples: int
    n_steps: int
    n_repeats: int

    @property
    def best(self) -> Suggestion | None:
        """The augmentation with the highest evidence of those that are clearly above none.

        It must be above guessing, too: where a network fits nothing but noise, any augmentation
        that hides its inputs brings it nearer to guessing, and so raises the evidence.
        """
        clear = [row for row in self.rows if row.is_clear and self._is_above_guessing(row.gain)]
        return max(clear, key=lambda row: row.gain, default=None)

    @property
    def ties(self) -> list[Suggestion]:
        """Other augmentations whose evidence is not clearly below that of the best."""
        best = self.best
        if best is None:
            return []
        return [row for row in self.rows if row is not best and row.is_as_good_as(best)]

    @property
    def is_better_than_guessing(self) -> bool:
        """Whether the network, alone or with an augmentation, is better than guessing."""
        return any(map(self._is_above_guessing, (0.0, *(row.gain for row in self.rows))))

    def _is_above_guessing(self, gain: float) -> bool:
        return self.chance is None or self.evidence + gain > self.chance

    def conclusion(self) -> str:
        """Return in words what to do."""
        if not self.is_better_than_guessing:
            return (
                "not clear: even the highest evidence is no better than that of guessing, "
                f"{self.chance:.3f}; more data, or a network that is trained better, tell more"
            )
        best = self.best
        if best is not None:
            lines = [str(best)]
            if self.ties:
                lines.append(f"not clearly worse: {'; '.join(row.words for row in self.ties)}")
            if best.can_widen and not any(row.is_wider_than(best) for row in self.rows):
                lines.append("nothing wider was tried")
            return "\n".join(lines)
        if any(row.is_clear for row in self.rows):
            return (
                "not clear: what raises the evidence raises it no further than that of guessing, "
                f"{self.chance:.3f}; more data, or a network that is trained better, tell more"
            )
        lines = ["no augmentation is clearly better than none"]
        if any(row.verdict == UNCLEAR for row in self.rows):
            lines.append("some are not clear: more steps or more repeats may tell")
        return "\n".join(lines)

    def __str__(self) -> str:
        header = ["augmentation", "gain", "error", "the evidence"]
        rows = [
            [row.words, f"{row.gain:+.3f}", f"{row.error:.3f}", row.verdict] for row in self.rows
        ]
        about = (
            f"nats per example above {self.evidence:.3f}, that of the network alone; "
            f"{self.n_samples} samples, {self.n_steps} steps, {self.n_repeats} repeats"
        )
        return f"{table([header, *rows], right=(1, 2))}\n{about}\n{self.conclusion()}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers and strings in lists and dictionaries, for JSON."""
        return vars(self) | {
            "rows": [
                asdict(row)
                | {
                    "gains": [finite(gain) for gain in row.gains],
                    "earlier": finite(row.earlier),
                    "gain": finite(row.gain),
                    "error": finite(row.error),
                    "verdict": row.verdict,
                }
                for row in self.rows
            ],
            "conclusion": self.conclusion(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Suggestions:
        """Return what :meth:`to_dict` describes."""
        rows = [
            Suggestion(
                row["ranges"],
                row["words"],
                [number(gain) for gain in row["gains"]],
                number(row["earlier"]),
                row["margin"],
                row.get("can_widen", False),  # which older files do not say
            )
            for row in values["rows"]
        ]
        left_out = ("rows", "conclusion")
        rest = {name: value for name, value in values.items() if name not in left_out}
        return cls(rows, **rest)


def _error(values: Sequence[float]) -> float:
    """Return the standard error of a mean; nothing is known of that of one number."""
    if not all(map(math.isfinite, values)):
        return 0.0
    if len(values) < 2:
        return math.inf
    return statistics.stdev(values) / math.sqrt(len(values))


def number(value: float | None) -> float:
    """Return the value, or minus infinity for None, which stands for it in JSON."""
    return -math.inf if value is None else value
