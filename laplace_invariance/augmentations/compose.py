"""Augmentations one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn

import laplace_invariance.augmentations.sampling as sampling
from laplace_invariance.augmentations.base import Augmentation, check_draws, check_n_samples
from laplace_invariance.augmentations.box import BoxAugmentation

__all__ = ["Compose"]

Value = TypeVar("Value")


def _flat(augmentations: Sequence[Augmentation]) -> Iterator[BoxAugmentation]:
    for augmentation in augmentations:
        if isinstance(augmentation, Compose):
            yield from augmentation.parts
        elif isinstance(augmentation, BoxAugmentation):
            yield augmentation
        else:
            raise TypeError(
                f"Compose joins augmentations that draw from ranges, such as AffineImage and Colour, and {augmentation!r} "
                "is not one; average over one after the other: InvariantModel(InvariantModel(net, a), b) applies b, then a"
            )


def _common_draws(parts: Sequence[BoxAugmentation]) -> str:
    kinds = sorted({part.draws for part in parts})
    if kinds == ["grid"] or len(kinds) > 1:
        raise ValueError(
            f"Compose draws for all its parts together, all 'independent' or all 'sobol', but theirs are {kinds}; "
            "give every part the same draws="
        )
    return kinds[0]


def _common_ndims(parts: Sequence[BoxAugmentation]) -> tuple[int, ...]:
    known = [part.input_ndims for part in parts if part.input_ndims]
    common = set(chain(*known)).intersection(*known)
    if known and not common:
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(f"the parts of Compose transform inputs of different kinds: {kinds}")
    return tuple(sorted(common))


def _by_name(values: Sequence[dict[str, Value]]) -> dict[str, Value]:
    """Merge what the parts have by name; a name that more than one part has gets the part's number before it."""
    counts = Counter(chain(*values))
    return {
        name if counts[name] == 1 else f"{i}.{name}": value
        for i, part in enumerate(values)
        for name, value in part.items()
    }


class Compose(Augmentation):
    """Apply augmentations one after another, in the given order, to each sample.

    Draws ``[n, n_samples, k]`` are those of the parts side by side. They are drawn together, so that a Sobol set spreads
    over the ranges of all parts. Every part keeps and learns its own hyperparameters.

    Args:
        *augmentations: those to apply, or one list of them; a ``Compose`` among them stands for its parts.
    """

    def __init__(self, *augmentations: Augmentation | Sequence[Augmentation]) -> None:
        super().__init__()
        if len(augmentations) == 1 and isinstance(augmentations[0], (list, tuple)):
            augmentations = tuple(augmentations[0])
        if not augmentations:
            raise ValueError("Compose needs at least one augmentation")
        parts = list(_flat(augmentations))
        self.draws = _common_draws(parts)
        self.input_ndims = _common_ndims(parts)
        self.unit_range = any(part.unit_range for part in parts)
        self.parts = nn.ModuleList(parts)
        self.names = tuple(_by_name([dict.fromkeys(part.names) for part in parts]))

    def sample(self, n: int, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        check_n_samples(n_samples)
        return sampling.sample(
            self.draws, n, n_samples, len(self.names), self.parts[0].eta, generator
        )

    def fixed(self, n_samples: int) -> Tensor:
        check_n_samples(n_samples)
        return sampling.sobol(n_samples, len(self.names), self.parts[0].eta)

    def transform(self, x: Tensor, draws: Tensor) -> Tensor:
        check_draws(draws, len(x), (len(self.names),), self)
        n, n_samples = len(x), draws.shape[1]
        first, *others = zip(
            self.parts, draws.split([len(part.names) for part in self.parts], dim=-1), strict=True
        )
        samples = first[0].transform(x, first[1])
        for part, own in others:  # every sample is an input now, with one draw
            own = own.expand(n, -1, -1).reshape(n * n_samples, 1, -1)
            samples = (
                part.transform(samples.flatten(0, 1), own).squeeze(1).unflatten(0, (n, n_samples))
            )
        return samples

    def magnitudes(self) -> dict[str, float]:
        """Return those of all parts, by name; names that clash are prefixed by the number of the part: ``0.rotation``."""
        return _by_name([part.magnitudes() for part in self.parts])

    def ranges(self) -> dict[str, str]:
        return _by_name([part.ranges() for part in self.parts])

    def extra_repr(self) -> str:
        return ""  # the parts say it

    def project_(self) -> None:
        for part in self.parts:
            part.project_()
