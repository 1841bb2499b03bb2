"""Deprecated: :mod:`laplace_invariance.datasets` has these."""

import warnings

from laplace_invariance.datasets import HiddenShifts, fourier_code

__all__ = ["HiddenShifts", "fourier_code"]

warnings.warn(
    "laplace_invariance.pairs has moved: import from laplace_invariance.datasets",
    DeprecationWarning,
    stacklevel=2,
)
