"""What a search tries for layers that are sums of paths: how far free paths are open at the start.

Where training ends depends on how far free paths are open at the start. So starts are compared like
ranges, by pilots: strict paths alone, free paths closed, half open, open in the last layers, and
open everywhere; then those next to the best.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from laplace_invariance.layers.starts import (
    START_LEVELS,
    free_paths,
    rescale_paths,
    start_precisions,
)
from laplace_invariance.marglik.priors import Priors
from laplace_invariance.marglik.settings import Settings

__all__ = ["PathCandidate", "PathSpace", "searchable_places"]

LEVELS = list(START_LEVELS)  # from closed for good to open
OPENED = ("half open", "open")
EPOCHS = 10  # of a unit of training; in less, starts are ranked wrongly
MOST_STEPS = 400  # of it, as on much data steps count, not epochs


class PathCandidate(NamedTuple):
    """Levels at which the free paths of all layers start.

    Attributes:
        levels: Places of pathways with their levels (``layers.START_LEVELS``), in the order of the
            model.
    """

    levels: tuple[tuple[str, str], ...]

    @property
    def n_open(self) -> int:
        """Number of layers whose free paths start open."""
        return sum(level in OPENED for _, level in self.levels)

    def as_dict(self) -> dict[str, Any]:
        """Return levels by place."""
        return dict(self.levels)

    def is_near(self, other: object) -> bool:
        """Return whether it is the same."""
        return self == other

    def is_rival(self, other: object) -> bool:
        """Return whether the two explain data by different layers: levels of all are tried."""
        return False

    def __str__(self) -> str:
        runs = []
        for level, group in itertools.groupby(self.levels, key=lambda item: item[1]):
            places = [place for place, _ in group]
            if len(places) == len(self.levels):
                return level
            runs.append(f"{_from_to(places)} {level}")
        return ", ".join(runs)


def _from_to(places: Sequence[str]) -> str:
    return places[0] if len(places) == 1 else f"{places[0]} to {places[-1]}"


def searchable_places(model: nn.Module) -> list[str]:
    """Return the places of pathways with free paths that are trained."""
    return [
        place
        for place, paths in free_paths(model).items()
        if any(p.requires_grad for path in paths.values() for p in path.parameters())
    ]


class PathSpace:
    """The layers of a model that have free paths, and at which levels to start them.

    Args:
        model: Model with pathways, their strictest path first.
        settings: Settings of the training.

    Attributes:
        continues: Whether a pilot can go on from the weights of another candidate: a start is one.
        n_estimates: Number of times in a unit of training that priors go to their optimum. A path
            opens or closes by its prior, and weights that were trained with priors far from their
            optimum have an evidence far below that of guessing.

    Raises:
        ValueError: If there are no free paths, their prior precision is not learnt, or tensors
            share one that would have to start with several.
    """

    continues = False
    n_estimates = 5

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._model = model
        self._places = searchable_places(model)
        if not self._places:
            raise ValueError("there is no free path to search: no ResidualPathway has several")
        structure = settings.priors.prior_structure
        if structure == "scalar" or settings.evidence.subset_of_weights != "all":
            raise ValueError(
                "a search over free paths needs prior precisions of their own, and the evidence of "
                "all weights: use prior_structure='layerwise' or 'path', and "
                "subset_of_weights='all'"
            )
        self._shared = structure == "path"
        levels = dict.fromkeys(self._places, "closed")
        priors = Priors(model, settings.priors, settings.evidence.temperature, has_noise=False)
        priors.start_from(start_precisions(model, levels, shared=self._shared))  # or raise

    def n_steps(self, n_batches: int) -> int:
        """Return the number of steps in a unit of training: those of some epochs, at most 400."""
        return min(EPOCHS * n_batches, MOST_STEPS)

    def known(self, levels: Mapping[str, str]) -> PathCandidate:
        """Return the candidate that :meth:`PathCandidate.as_dict` describes."""
        return PathCandidate(tuple(levels.items()))

    def candidate(self, levels: Mapping[str, str]) -> PathCandidate:
        """Return the candidate of given levels; free paths of other layers are closed.

        Args:
            levels: Levels by place.

        Raises:
            ValueError: If there is no such place or level.
        """
        for place, level in levels.items():
            if place not in self._places:
                known = ", ".join(self._places)
                raise ValueError(f"there are no free paths at {place!r}; choose from {known}")
            if level not in LEVELS:
                raise ValueError(f"a level is one of {', '.join(LEVELS)}; got {level!r}")
        return PathCandidate(tuple((place, levels.get(place, "closed")) for place in self._places))

    def put(self, candidate: PathCandidate, priors: Priors) -> None:
        """Rescale the initial weights of free paths, and set the initial prior precisions.

        Args:
            candidate: The levels.
            priors: Prior precisions of the training that is about to start.
        """
        levels = dict(candidate.levels)
        priors.start_from(start_precisions(self._model, levels, shared=self._shared))
        rescale_paths(self._model, levels)

    def first(self) -> list[PathCandidate]:
        """Return what is tried first: every level for all, and open in the last one or two."""
        found = [self._everywhere(level) for level in LEVELS]
        for n_open in (1, 2):
            found.append(self.candidate(dict.fromkeys(self._places[-n_open:], "open")))
        return list(dict.fromkeys(found))

    def _everywhere(self, level: str) -> PathCandidate:
        return self.candidate(dict.fromkeys(self._places, level))

    def grown(
        self, candidate: PathCandidate, others: Sequence[PathCandidate]
    ) -> list[PathCandidate]:
        """Return nothing, as no pilot can go on from another one.

        Args:
            candidate: The candidate.
            others: Further candidates.
        """
        return []

    def neighbours(self, candidate: PathCandidate) -> list[PathCandidate]:
        """Return candidates that close or open one layer by a level.

        Layers are the first, the last, and those next to one with another level: what a layer needs
        follows from its depth.

        Args:
            candidate: The candidate.
        """
        return list(dict.fromkeys(self._moves(candidate)))

    def _moves(self, candidate: PathCandidate) -> Iterator[PathCandidate]:
        levels = dict(candidate.levels)
        edges = [self._places[0], self._places[-1]]
        for one, other in itertools.pairwise(self._places):
            if levels[one] != levels[other]:
                edges += [one, other]
        for place in dict.fromkeys(edges):
            present = LEVELS.index(levels[place])
            for index in (present - 1, present + 1):
                if 0 <= index < len(LEVELS):
                    yield self.candidate(levels | {place: LEVELS[index]})
