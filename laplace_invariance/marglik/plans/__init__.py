"""Plans: memory and work of curvature before any training, from shapes alone."""

from laplace_invariance.marglik.plans.compute import plan
from laplace_invariance.marglik.plans.results import Choice, Plan

__all__ = ["Choice", "Plan", "plan"]
