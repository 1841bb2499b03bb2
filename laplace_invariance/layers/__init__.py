"""Layers and networks, with what curvature must know of them."""

from laplace_invariance.layers.factored import FactoredLinear2d, Linear2d, SlotLinear
from laplace_invariance.layers.fixup import FixupResNet, ScalarBias, ScalarScale
from laplace_invariance.layers.networks import Standardise, cnn, mlp
from laplace_invariance.layers.residual import OnGroup, ResidualPathway

__all__ = [
    "FactoredLinear2d",
    "FixupResNet",
    "Linear2d",
    "OnGroup",
    "ResidualPathway",
    "ScalarBias",
    "ScalarScale",
    "SlotLinear",
    "Standardise",
    "cnn",
    "mlp",
]
