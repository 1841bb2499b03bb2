"""Deprecated: :mod:`laplace_invariance.datasets` has these."""

import warnings

from laplace_invariance.datasets import framed, quadrants

__all__ = ["framed", "quadrants"]

warnings.warn(
    "laplace_invariance.quadrants has moved: import from laplace_invariance.datasets",
    DeprecationWarning,
    stacklevel=2,
)
