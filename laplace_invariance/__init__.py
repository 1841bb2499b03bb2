"""Learn data augmentations and layer symmetries by gradient of the marginal likelihood, on unmodified laplace-torch."""

import warnings

with warnings.catch_warnings():  # of torch.jit, about itself, whenever laplace-torch is imported
    warnings.simplefilter("ignore", FutureWarning)
    import laplace  # noqa: F401

from laplace_invariance import curvature, layers, marglik, metrics
from laplace_invariance.augmentations import (
    AffineImage,
    AffinePoints,
    Augmentation,
    Colour,
    Compose,
    FiniteGroup,
    Sequence,
)
from laplace_invariance.hyper import (
    Hyperparameterised,
    hyperparameters,
    learning,
    named_hyperparameters,
)
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.marglik import marglik_training

__version__ = "0.1.0.dev0"

__all__ = [
    "AffineImage",
    "AffinePoints",
    "Augmentation",
    "Colour",
    "Compose",
    "FiniteGroup",
    "Hyperparameterised",
    "InvariantModel",
    "Sequence",
    "curvature",
    "hyperparameters",
    "layers",
    "learning",
    "marglik",
    "marglik_training",
    "metrics",
    "named_hyperparameters",
]
