"""Hold the curvature of a fit constant, where only priors and noise are differentiated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from laplace_invariance.curvature.kron import DifferentiableKronDecomposed

__all__ = ["constant_curvature"]


@contextmanager
def constant_curvature(la: Any) -> Iterator[None]:
    """Let the evidence depend on prior and noise only, and not on hyperparameters, inside.

    Every backward pass through an evidence runs the model on all batches once more for the
    gradient of hyperparameters. Steps on the prior precision need none of it::

        with constant_curvature(la):
            la.optimize_prior_precision(method="marglik")

    Values are the same. Afterwards the evidence can be differentiated in hyperparameters again.

    Args:
        la: A fitted Laplace approximation of laplace-torch. With a backend whose curvature has no
            graph nothing happens.
    """
    before = la.H, getattr(la, "loss", None)
    inside = _detached(before[0]), _detached(before[1])
    la.H, la.loss = inside
    try:
        yield
    finally:
        if la.H is inside[0] and la.loss is inside[1]:  # else it was fitted inside
            la.H, la.loss = before


def _detached(value: Any) -> Any:
    """Return loss or curvature without graph; what never has one is returned as it is."""
    if isinstance(value, (Tensor, DifferentiableKronDecomposed)):
        return value.detach()
    return value
