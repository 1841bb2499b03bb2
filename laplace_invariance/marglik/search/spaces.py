"""Which of the spaces a model is searched in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from laplace_invariance.marglik.hyperparameters import outermost_augmentations
from laplace_invariance.marglik.priors import Priors
from laplace_invariance.marglik.search.candidates import Candidate, Space
from laplace_invariance.marglik.search.paths import (
    PathCandidate,
    PathSpace,
    searchable_places,
)
from laplace_invariance.marglik.settings import Settings

__all__ = ["AnyCandidate", "AnySpace", "described", "space_of"]

AnyCandidate = Candidate | PathCandidate


class AnySpace(Protocol):
    """What a search asks of a space: where to start, what is near, and how to put it in.

    Attributes:
        continues: Whether a pilot can go on from the weights of another candidate.
        n_estimates: Number of times in a unit of training that priors go to their optimum.
    """

    continues: bool
    n_estimates: int

    def n_steps(self, n_batches: int) -> int:
        """Return the number of steps in a unit of training, for so many batches per epoch."""

    def known(self, found: Mapping[str, Any]) -> Any:
        """Return the candidate that ``as_dict`` of one describes."""

    def first(self) -> list[Any]:
        """Return the candidates that are tried first."""

    def grown(self, candidate: Any, others: Sequence[Any]) -> list[Any]:
        """Return candidates with more open than one has; others are further ones, best first."""

    def neighbours(self, candidate: Any) -> list[Any]:
        """Return candidates near one."""

    def put(self, candidate: Any, priors: Priors) -> None:
        """Start the model, and prior precisions, from a candidate."""


def space_of(model: nn.Module, settings: Settings) -> AnySpace:
    """Return the space to search: ranges of augmentations, or else levels of free paths.

    Args:
        model: Model as training will start with it.
        settings: Settings of the training.

    Raises:
        ValueError: If the model has neither.
    """
    has_ranges = any(module.openings() for module in outermost_augmentations(model).values())
    if searchable_places(model) and not has_ranges:
        return PathSpace(model, settings)
    return Space(model)


def described(found: Mapping[str, Any]) -> str:
    """Return a candidate in words.

    Args:
        found: What ``as_dict`` of the candidate returned.
    """
    items = tuple(found.items())
    if any(isinstance(value, str) for value in found.values()):
        return str(PathCandidate(items))
    return str(Candidate(items))
