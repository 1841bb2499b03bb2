"""Search for ranges to start from, by evidence."""

from laplace_invariance.marglik.search.candidates import Candidate, Space
from laplace_invariance.marglik.search.search import Search, SearchResult, Trial

__all__ = ["Candidate", "Search", "SearchResult", "Space", "Trial"]
