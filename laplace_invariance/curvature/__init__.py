"""Curvature of averaged networks, differentiable in hyperparameters: backends, rules of layers, and the matrices."""

from laplace_invariance.curvature.kron import DifferentiableKron, DifferentiableKronDecomposed, load_state_dict
from laplace_invariance.curvature.native import AugmentedEF, AugmentedGGN
from laplace_invariance.curvature.rules import Block, check_model, register_rule

__all__ = [
    "AugmentedEF",
    "AugmentedGGN",
    "Block",
    "DifferentiableKron",
    "DifferentiableKronDecomposed",
    "check_model",
    "load_state_dict",
    "register_rule",
]
