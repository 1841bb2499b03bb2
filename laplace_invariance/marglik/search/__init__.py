"""Search for a start, of ranges or of free paths, by evidence."""

from laplace_invariance.marglik.search.candidates import Candidate, Space
from laplace_invariance.marglik.search.paths import PathCandidate, PathSpace
from laplace_invariance.marglik.search.search import Search, SearchResult, Trial
from laplace_invariance.marglik.search.spaces import space_of

__all__ = [
    "Candidate",
    "PathCandidate",
    "PathSpace",
    "Search",
    "SearchResult",
    "Space",
    "Trial",
    "space_of",
]
