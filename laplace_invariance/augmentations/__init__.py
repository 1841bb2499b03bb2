"""Distributions over transformations of the input, with hyperparameters that the evidence can learn."""

from laplace_invariance.augmentations.affine import AffineImage, AffinePoints
from laplace_invariance.augmentations.base import Augmentation
from laplace_invariance.augmentations.finite import FiniteGroup
from laplace_invariance.augmentations.lie import LieGroup

__all__ = ["AffineImage", "AffinePoints", "Augmentation", "FiniteGroup", "LieGroup"]
