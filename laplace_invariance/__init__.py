"""Learn data augmentations and layer symmetries by gradient of the marginal likelihood, on unmodified laplace-torch."""

from laplace_invariance import curvature
from laplace_invariance.augmentations import AffineImage, AffinePoints, Augmentation, FiniteGroup
from laplace_invariance.hyper import Hyperparameterised, hyperparameters, learning, named_hyperparameters
from laplace_invariance.invariant import InvariantModel

__version__ = "0.1.0.dev0"

__all__ = [
    "AffineImage",
    "AffinePoints",
    "Augmentation",
    "FiniteGroup",
    "Hyperparameterised",
    "InvariantModel",
    "curvature",
    "hyperparameters",
    "learning",
    "named_hyperparameters",
]
