"""Deprecated: import from :mod:`laplace_invariance.datasets`."""

import warnings

from laplace_invariance.datasets import HiddenShifts, fourier_code

__all__ = ["HiddenShifts", "fourier_code"]

message = "laplace_invariance.pairs is deprecated: import from laplace_invariance.datasets"
warnings.warn(message, DeprecationWarning, stacklevel=2)
