"""Layers and networks, with the curvature rules of their parameters."""

from laplace_invariance.layers.basis import Basis
from laplace_invariance.layers.convert import convert
from laplace_invariance.layers.factored import FactoredLinear2d, Linear2d, SlotLinear
from laplace_invariance.layers.fixup import FixupResNet, ScalarBias, ScalarScale
from laplace_invariance.layers.group import GroupConv2d, LiftingConv2d
from laplace_invariance.layers.networks import Standardise, cnn, equivariant_cnn, lenet, mlp
from laplace_invariance.layers.paths import PATHS, PathKind, PathSpec, pathway
from laplace_invariance.layers.pooling import GroupPool, PolyphasePool2d
from laplace_invariance.layers.residual import OnGroup, ResidualPathway
from laplace_invariance.layers.sparse import SparseConv2d, SparseLinear2d
from laplace_invariance.layers.sparse_group import SparseGroupConv2d, SparseLiftingConv2d
from laplace_invariance.layers.starts import (
    START_LEVELS,
    StartLevel,
    closed_paths,
    free_paths,
    rescale_paths,
    start_precisions,
)
from laplace_invariance.layers.statistics import FixedStatistics
from laplace_invariance.layers.symmetry import Group

__all__ = [
    "PATHS",
    "START_LEVELS",
    "Basis",
    "FactoredLinear2d",
    "FixedStatistics",
    "FixupResNet",
    "Group",
    "GroupConv2d",
    "GroupPool",
    "LiftingConv2d",
    "Linear2d",
    "OnGroup",
    "PathKind",
    "PathSpec",
    "PolyphasePool2d",
    "ResidualPathway",
    "ScalarBias",
    "ScalarScale",
    "SlotLinear",
    "SparseConv2d",
    "SparseGroupConv2d",
    "SparseLiftingConv2d",
    "SparseLinear2d",
    "Standardise",
    "StartLevel",
    "closed_paths",
    "cnn",
    "convert",
    "equivariant_cnn",
    "free_paths",
    "lenet",
    "mlp",
    "pathway",
    "rescale_paths",
    "start_precisions",
]
