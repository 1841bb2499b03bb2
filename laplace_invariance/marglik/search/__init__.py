"""Search for a start, of ranges or of free paths, by evidence."""

from laplace_invariance.marglik.search.candidates import Candidate, Space
from laplace_invariance.marglik.search.comparison import (
    Comparison,
    epochs_to_compare,
    train_and_compare,
)
from laplace_invariance.marglik.search.paths import PathCandidate, PathSpace
from laplace_invariance.marglik.search.search import Search, SearchResult, Trial
from laplace_invariance.marglik.search.spaces import space_of

__all__ = [
    "Candidate",
    "Comparison",
    "PathCandidate",
    "PathSpace",
    "Search",
    "SearchResult",
    "Space",
    "Trial",
    "epochs_to_compare",
    "space_of",
    "train_and_compare",
]
