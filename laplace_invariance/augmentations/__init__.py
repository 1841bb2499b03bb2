"""Distributions over transformations of the input, with hyperparameters to learn."""

from laplace_invariance.augmentations.affine import AffineImage, AffinePoints, LieGroup
from laplace_invariance.augmentations.base import Augmentation
from laplace_invariance.augmentations.box import BoxAugmentation
from laplace_invariance.augmentations.colour import Colour
from laplace_invariance.augmentations.compose import Compose
from laplace_invariance.augmentations.finite import FiniteGroup
from laplace_invariance.augmentations.sequence import Sequence

__all__ = [
    "AffineImage",
    "AffinePoints",
    "Augmentation",
    "BoxAugmentation",
    "Colour",
    "Compose",
    "FiniteGroup",
    "LieGroup",
    "Sequence",
]
