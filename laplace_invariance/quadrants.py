"""Deprecated: import from :mod:`laplace_invariance.datasets`."""

import warnings

from laplace_invariance.datasets import framed, quadrants

__all__ = ["framed", "quadrants"]

message = "laplace_invariance.quadrants is deprecated: import from laplace_invariance.datasets"
warnings.warn(message, DeprecationWarning, stacklevel=2)
