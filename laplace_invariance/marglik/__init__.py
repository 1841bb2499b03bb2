"""Training by the marginal likelihood: weights, priors, noise and invariances together."""

from laplace_invariance import _laplace  # noqa: F401
from laplace_invariance.marglik.estimators import KernelBound, Refit, Running
from laplace_invariance.marglik.evidence import log_evidence
from laplace_invariance.marglik.learnt import LearntAugmentation, learn_augmentation
from laplace_invariance.marglik.objectives import MAP, Augerino, Evidence, Objective, Regularised
from laplace_invariance.marglik.plans import Plan, plan
from laplace_invariance.marglik.profiles import Profile, profile
from laplace_invariance.marglik.search import Search, SearchResult
from laplace_invariance.marglik.suggestions import Suggestion, Suggestions, suggest
from laplace_invariance.marglik.tracking import TensorBoard, WandB
from laplace_invariance.marglik.training import Result, marglik_training

__all__ = [
    "MAP",
    "Augerino",
    "Evidence",
    "KernelBound",
    "LearntAugmentation",
    "Objective",
    "Plan",
    "Profile",
    "Refit",
    "Regularised",
    "Result",
    "Running",
    "Search",
    "SearchResult",
    "Suggestion",
    "Suggestions",
    "TensorBoard",
    "WandB",
    "learn_augmentation",
    "log_evidence",
    "marglik_training",
    "plan",
    "profile",
    "suggest",
]
