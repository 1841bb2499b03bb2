"""Layers and networks, with what curvature must know of them."""

from laplace_invariance.layers.fixup import FixupResNet, ScalarBias, ScalarScale
from laplace_invariance.layers.networks import Standardise, cnn, mlp

__all__ = ["FixupResNet", "ScalarBias", "ScalarScale", "Standardise", "cnn", "mlp"]
