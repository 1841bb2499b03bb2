"""Augmentations one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import torch
from einops import rearrange
from torch import Tensor, nn

from laplace_invariance.augmentations.base import (
    Augmentation,
    Openings,
    Shape,
    check_draws,
    check_n_samples,
)
from laplace_invariance.augmentations.box import BoxAugmentation
from laplace_invariance.draws import fixed_cube, sample_cube

__all__ = ["Compose"]

Value = TypeVar("Value")


class Compose(Augmentation):
    """Augmentations that are applied one after another, in the given order, to each sample.

    Draws ``[n, n_samples, k]`` are those of the parts side by side. They are drawn together, so
    that a Sobol set spreads over the ranges of all parts. Every part keeps and learns its own
    hyperparameters.

    Args:
        *augmentations: Augmentations to apply, or one list of them; a ``Compose`` among them stands
            for its parts.

    Attributes:
        parts: The augmentations.
        names: Names of their generators; a name that more than one part has is prefixed by the
            number of the part, as in ``0.rotation``.
    """

    parts: Sequence[BoxAugmentation]

    def __init__(self, *augmentations: Augmentation | Sequence[Augmentation]) -> None:
        super().__init__()
        parts = _flat(augmentations)
        if not parts:
            raise ValueError("Compose needs at least one augmentation")
        self.draws = _common_draws(parts)
        self.input_ndims = _common_ndims(parts)
        self.unit_range = any(part.unit_range for part in parts)
        self.add_module("parts", nn.ModuleList(parts))
        self.names = tuple(_by_name([dict.fromkeys(part.names) for part in parts]))

    def sample(self, n: int, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Return fresh draws ``[n, n_samples, k]`` for all parts."""
        check_n_samples(n_samples)
        return sample_cube(self.draws, n, n_samples, len(self.names), self.parts[0].eta, generator)

    def fixed(self, n_samples: int) -> Tensor:
        """Return one set of draws ``[1, n_samples, k]``, always the same, for all parts."""
        check_n_samples(n_samples)
        return fixed_cube(n_samples, len(self.names), self.parts[0].eta)

    def transform(self, x: Tensor, draws: Tensor) -> Tensor:
        """Transform ``x`` ``[n, ...]`` by each part with its own columns of ``draws``."""
        check_draws(draws, len(x), (len(self.names),), self)
        n = len(x)
        first, *others = draws.split([len(part.names) for part in self.parts], dim=-1)
        samples = self.parts[0].transform(x, first)
        for part, own in zip(self.parts[1:], others, strict=True):
            # for the next part every sample is an input of its own, with one draw
            inputs = samples.flatten(0, 1)
            own = rearrange(own.expand(n, -1, -1), "n s k -> (n s) 1 k")
            samples = part.transform(inputs, own).view_as(samples)
        return samples

    def magnitudes(self) -> dict[str, float]:
        """Return the magnitudes of all parts, by name."""
        return _by_name([part.magnitudes() for part in self.parts])

    def ranges(self, shape: Shape | None = None) -> dict[str, str]:
        """Return the ranges of all parts, by name, in words and units."""
        return _by_name([part.ranges(shape) for part in self.parts])

    def openings(self) -> Openings:
        """Return which ranges of each part open together, by their names here."""
        found: Openings = {}
        for part, public in zip(self.parts, self._public_names(), strict=True):
            for names, widths in part.openings().items():
                found[tuple(public[name] for name in names)] = widths
        return found

    def largest(self, name: str) -> float:
        """Return the limit of a range of a part."""
        part, own = self._part_of(name)
        return part.largest(own)

    def widths(self) -> dict[str, float]:
        """Return the widths of learnt ranges of all parts, by their names here."""
        found: dict[str, float] = {}
        for part, public in zip(self.parts, self._public_names(), strict=True):
            found |= {public[own]: width for own, width in part.widths().items()}
        return found

    def resize_(self, name: str, width: float) -> None:
        """Set one learnt range of a part, in place; all others stay as they are."""
        part, own = self._part_of(name)
        part.resize_(own, width)

    def entries(self, name: str) -> list[Tensor]:
        """Return the numbers that a range of a part is made of."""
        part, own = self._part_of(name)
        return part.entries(own)

    def in_words(self, name: str, magnitude: float, shape: Shape | None = None) -> str:
        """Return the range ``name``, plus or minus ``magnitude``, in words."""
        part, own = self._part_of(name)
        return part.in_words(own, magnitude, shape)

    def _part_of(self, name: str) -> tuple[BoxAugmentation, str]:
        """Return the part that has a range, and the range's name there."""
        for part, public in zip(self.parts, self._public_names(), strict=True):
            for own, here in public.items():
                if here == name:
                    return part, own
        raise ValueError(f"no part has a range {name!r}; there are {', '.join(self.names)}")

    def open_(self, widths: Mapping[str, float]) -> None:
        """Set learnt ranges of all parts, in place, and those that are not named to zero.

        Parts that are frozen stay as they are.
        """
        names = self._public_names()
        known = {name for public in names for name in public.values()}
        for name in widths:
            if name not in known:
                raise ValueError(f"no part has a range {name!r}; there are {', '.join(self.names)}")
        for part, public in zip(self.parts, names, strict=True):
            own_widths = {own: widths[name] for own, name in public.items() if name in widths}
            if own_widths or part.widths():
                part.open_(own_widths)

    def _public_names(self) -> list[dict[str, str]]:
        """Return the names here of every part's ranges, by the part's own names."""
        remaining = iter(self.names)
        return [{name: next(remaining) for name in part.names} for part in self.parts]

    def extra_repr(self) -> str:
        return ""  # the parts say it

    def project_(self) -> None:
        """Project the hyperparameters of every part back into their domain, in place."""
        for part in self.parts:
            part.project_()


def _flat(augmentations: Iterable[Augmentation | Sequence[Augmentation]]) -> list[BoxAugmentation]:
    """Return the parts, in order, with those of lists and of other compositions."""
    parts: list[BoxAugmentation] = []
    for augmentation in augmentations:
        if isinstance(augmentation, (list, tuple)):
            parts += _flat(augmentation)
        elif isinstance(augmentation, Compose):
            parts += augmentation.parts
        elif isinstance(augmentation, BoxAugmentation):
            parts.append(augmentation)
        else:
            raise TypeError(
                "Compose joins augmentations that draw from ranges, such as AffineImage and "
                f"Colour, and {augmentation!r} is not one; average over one after the other: "
                "InvariantModel(InvariantModel(net, a), b) applies b, then a"
            )
    return parts


def _common_draws(parts: Sequence[BoxAugmentation]) -> str:
    kinds = sorted({part.draws for part in parts})
    if kinds == ["grid"] or len(kinds) > 1:
        raise ValueError(
            "Compose draws for all its parts together, all 'independent' or all 'sobol', but "
            f"theirs are {kinds}; give every part the same draws="
        )
    return kinds[0]


def _common_ndims(parts: Sequence[BoxAugmentation]) -> tuple[int, ...]:
    """Return the numbers of dimensions that inputs of all parts can have, where these say so."""
    known = [part.input_ndims for part in parts if part.input_ndims]
    common = set(chain(*known)).intersection(*known)
    if known and not common:
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(f"the parts of Compose transform inputs of different kinds: {kinds}")
    return tuple(sorted(common))


def _by_name(values: Sequence[dict[str, Value]]) -> dict[str, Value]:
    """Merge the values of all parts; a name that is not unique is prefixed by the part's number."""
    counts = Counter(chain(*values))
    merged = {}
    for i, part in enumerate(values):
        for name, value in part.items():
            if counts[name] > 1:
                name = f"{i}.{name}"
            merged[name] = value
    return merged
