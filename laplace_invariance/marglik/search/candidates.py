"""What a search tries: ranges of a model's augmentations, alone and together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from laplace_invariance.augmentations.base import Augmentation
from laplace_invariance.marglik.hyperparameters import outermost_augmentations
from laplace_invariance.marglik.priors import Priors

__all__ = ["Candidate", "Space"]

NARROWER, WIDER = 2 / 3, 3 / 2
NEAR = 0.05  # relative difference of widths that are not told apart
LEAST = 1e-3  # of a width that counts as open
STEPS = 40  # of a unit of training
MOST_OPENED = 3  # units that are tried beside those of a candidate


class Candidate(NamedTuple):
    """Ranges to try; all others are closed.

    Attributes:
        widths: Names of ranges with their widths, in the order of the model.
    """

    widths: tuple[tuple[str, float], ...]

    @property
    def n_open(self) -> int:
        """Number of open ranges."""
        return len(self.widths)

    def as_dict(self) -> dict[str, Any]:
        """Return widths by name."""
        return dict(self.widths)

    def __str__(self) -> str:
        opened = [f"{name} {width:.2f}" for name, width in self.widths]
        return ", ".join(opened) or "nothing"

    def is_near(self, other: object) -> bool:
        """Return whether the same ranges are open, and nearly as far."""
        if not isinstance(other, Candidate):
            return False
        mine, theirs = dict(self.widths), dict(other.widths)
        if mine.keys() != theirs.keys():
            return False
        return all(math.isclose(mine[name], theirs[name], rel_tol=NEAR) for name in mine)

    def is_rival(self, other: object) -> bool:
        """Return whether both have open ranges, and none in common."""
        if not isinstance(other, Candidate):
            return False
        mine, theirs = dict(self.widths), dict(other.widths)
        return bool(mine and theirs) and mine.keys().isdisjoint(theirs)


class Space:
    """The ranges that a model can learn, and which of them to try.

    A range is named by its augmentation, preceded by the name of the module if there are several.

    Args:
        model: Model with augmentations.

    Attributes:
        continues: Whether a pilot can go on from the weights of another candidate.
        n_estimates: Number of times in a unit of training that priors go to their optimum.

    Raises:
        ValueError: If the model has no range to learn.
    """

    continues = True
    n_estimates = 1

    def __init__(self, model: nn.Module) -> None:
        found = outermost_augmentations(model)
        self._owners = {name: module for name, module in found.items() if module.openings()}
        if not self._owners:
            raise ValueError(
                "there is no range to search: the model has no augmentation whose hyperparameters "
                "require grad, nor a ResidualPathway with several paths that are trained"
            )
        self._units: dict[tuple[str, ...], tuple[float, ...]] = {}
        self._owner_of: dict[str, tuple[Augmentation, str]] = {}
        for place, module in self._owners.items():
            for names, widths in module.openings().items():
                public = tuple(self._public(place, name) for name in names)
                self._units[public] = widths
                self._owner_of |= {
                    key: (module, name) for key, name in zip(public, names, strict=True)
                }

    def _public(self, place: str, name: str) -> str:
        return name if len(self._owners) == 1 else f"{place}.{name}"

    def n_steps(self, n_batches: int) -> int:
        """Return the number of steps in a unit of training, whatever the number of batches."""
        return STEPS

    def known(self, widths: Mapping[str, float]) -> Candidate:
        """Return the candidate that :meth:`Candidate.as_dict` describes."""
        return Candidate(tuple(widths.items()))

    def candidate(self, widths: Mapping[str, float]) -> Candidate:
        """Return the candidate of given ranges.

        Raises:
            ValueError: If there is no such range, or a width is outside of its limits.
        """
        for name, width in widths.items():
            if name not in self._owner_of:
                known = ", ".join(self._owner_of)
                raise ValueError(f"there is no range {name!r} to search; choose from {known}")
            if not 0 <= width <= self._largest(name) * (1 + 1e-9):  # but for round-off
                raise ValueError(
                    f"{name} must be between 0 and {self._largest(name):.4g}, its limit, got "
                    f"{width}"
                )
        kept = [(name, float(widths.get(name, 0.0))) for name in self._owner_of]
        return Candidate(tuple((name, width) for name, width in kept if width > LEAST))

    def put(self, candidate: Candidate, priors: Priors | None = None) -> None:
        """Set the ranges of the model to those of a candidate; priors stay as they are."""
        widths = dict(candidate.widths)
        for module in self._owners.values():
            own = {
                name: widths[key]
                for key, (owner, name) in self._owner_of.items()
                if owner is module and key in widths
            }
            module.open_(own)

    def alone(self) -> list[Candidate]:
        """Return nothing, and every unit at every width."""
        found = [self.candidate({})]
        for unit, widths in self._units.items():
            found += [self.candidate(dict.fromkeys(unit, width)) for width in widths]
        return _different(found)

    def first(self) -> list[Candidate]:
        """Return what is tried first: nothing, units alone, and all moderately open."""
        everything = {name: widths[0] for unit, widths in self._units.items() for name in unit}
        return _different([*self.alone(), self.candidate(everything)])

    def resized(self, candidate: Candidate) -> list[Candidate]:
        """Return a candidate with all its ranges wider, up to their limits, and narrower."""
        found = []
        for factor in (WIDER, NARROWER):
            changed = {n: min(self._largest(n), factor * w) for n, w in candidate.widths}
            found.append(self.candidate(changed))
        return _different(found)

    def reached(self, candidate: Candidate) -> Candidate:
        """Return a candidate, or the nearest that constraints let the model have, put into it."""
        self.put(candidate)
        widths = {
            self._public(place, name): width
            for place, module in self._owners.items()
            for name, width in module.widths().items()
        }
        found = self.candidate(widths)
        return candidate if found.is_near(candidate) else found

    def can_widen(self, candidate: Candidate) -> bool:
        """Return whether the ranges of a candidate can be wider; the model is left with others."""
        wider, *_ = self.resized(candidate)
        return not self.reached(wider).is_near(candidate)

    def grown(self, candidate: Candidate, others: Sequence[Candidate]) -> list[Candidate]:
        """Return candidates with one more unit open, as what helps together need not help alone.

        Args:
            candidate: The candidate.
            others: Further candidates, best first; a unit is opened as far as in the first of these
                that has it open, and units of the best come first.
        """
        widths = dict(candidate.widths)
        added: dict[tuple[str, ...], Candidate] = {}
        for other in others:
            theirs = dict(other.widths)
            for unit in self._units:
                is_new = all(name not in widths for name in unit)
                if is_new and unit not in added and all(name in theirs for name in unit):
                    opened = {name: theirs[name] for name in unit}
                    added[unit] = self.candidate(widths | opened)
        return list(added.values())[:MOST_OPENED]

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        """Return candidates near one: every open unit narrower, wider, in part or not at all."""
        return _different(self._near(candidate))

    def _near(self, candidate: Candidate) -> Iterator[Candidate]:
        widths = dict(candidate.widths)
        for unit in self._units:
            opened = [name for name in unit if name in widths]
            if not opened:
                continue
            for factor in (WIDER, NARROWER):
                changed = {n: min(self._largest(n), factor * widths[n]) for n in opened}
                yield self.candidate(widths | changed)
            rest = {name: width for name, width in widths.items() if name not in opened}
            if rest:
                yield self.candidate(rest)
            if len(opened) > 1:
                for name in opened:
                    yield self.candidate(rest | {name: widths[name]})

    def _largest(self, name: str) -> float:
        owner, own = self._owner_of[name]
        return owner.largest(own)


def _different(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates without those that repeat another one, in their order."""
    return list(dict.fromkeys(candidates))
