"""Curvature of averaged networks, differentiable in hyperparameters: backends, rules of layers, and the matrices."""

from importlib import import_module

from laplace_invariance import _laplace  # noqa: F401
from laplace_invariance.curvature.check import check_model
from laplace_invariance.curvature.ggn import AugmentedEF, AugmentedGGN
from laplace_invariance.curvature.kron import (
    DifferentiableKron,
    DifferentiableKronDecomposed,
    load_state_dict,
)
from laplace_invariance.curvature.rules import Block, ElementwiseBlock, MatrixBlock, register_rule

# Engines of other packages, imported when asked for: name -> (module here, package there, what to install)
_ENGINES = {
    "AsdlAugmentedEF": ("engines.asdl", "asdl", "asdfghjkl"),
    "AsdlAugmentedGGN": ("engines.asdl", "asdl", "asdfghjkl"),
    "BackPackAugmentedEF": ("engines.backpack", "backpack", "backpack-for-pytorch"),
    "BackPackAugmentedGGN": ("engines.backpack", "backpack", "backpack-for-pytorch"),
}

__all__ = [
    "AugmentedEF",
    "AugmentedGGN",
    "Block",
    "DifferentiableKron",
    "DifferentiableKronDecomposed",
    "ElementwiseBlock",
    "MatrixBlock",
    "check_model",
    "load_state_dict",
    "register_rule",
]


def __getattr__(name: str) -> type:
    if name not in _ENGINES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, package, distribution = _ENGINES[name]
    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != package:
            raise
        raise ImportError(
            f"{name} needs the package {package!r}: pip install {distribution}"
        ) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *_ENGINES])
