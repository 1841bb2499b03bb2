"""Estimators of the evidence, of which ``marglik_training`` takes one by name or as an object."""

from __future__ import annotations

from torch import nn

from laplace_invariance.hyper import hyperparameters
from laplace_invariance.marglik.estimators.base import Context, Estimator, RunningEstimator
from laplace_invariance.marglik.estimators.kernel import KernelBound
from laplace_invariance.marglik.estimators.refit import Refit
from laplace_invariance.marglik.estimators.running import Running
from laplace_invariance.marglik.objectives import Objective

__all__ = [
    "ESTIMATORS",
    "Context",
    "Estimator",
    "KernelBound",
    "Refit",
    "Running",
    "RunningEstimator",
    "chosen_estimator",
]

ESTIMATORS: dict[str, type[Estimator]] = {"running": Running, "refit": Refit, "kernel": KernelBound}


def chosen_estimator(
    estimator: str | Estimator | None, model: nn.Module, objective: Objective
) -> Estimator:
    """Return the estimator of a name, or the default one.

    Args:
        estimator: Name, object, or None for the default.
        model: Model that is trained.
        objective: Objective by which its hyperparameters are learnt.

    Raises:
        TypeError: If it is neither a name nor an estimator.
        ValueError: If there is no estimator of that name.
    """
    if isinstance(estimator, Estimator):
        return estimator
    if estimator is None:
        learnt = any(tensor.requires_grad for tensor in hyperparameters(model))
        by_evidence = objective.estimates and not objective.steps_in_training
        return Running() if learnt and by_evidence else Refit()
    if not isinstance(estimator, str):
        raise TypeError(
            "estimator must be a name or an object of laplace_invariance.marglik.estimators, "
            f"got {estimator!r}"
        )
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
    return ESTIMATORS[estimator]()
