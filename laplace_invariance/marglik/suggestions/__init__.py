"""Suggestions of augmentations for networks that are trained already."""

from laplace_invariance.marglik.suggestions.compare import suggest
from laplace_invariance.marglik.suggestions.given import candidates_of
from laplace_invariance.marglik.suggestions.results import Suggestion, Suggestions

__all__ = ["Suggestion", "Suggestions", "candidates_of", "suggest"]
