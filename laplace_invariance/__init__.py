"""Learn data augmentations and layer symmetries by gradient of the marginal likelihood.

An extension of unmodified laplace-torch. Names are imported when they are first used, so that the
command line can answer ``--help`` without waiting for torch.
"""

from __future__ import annotations

from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from laplace_invariance.curvature import constant_curvature
    from laplace_invariance.hyper import (
        Hyperparameterised,
        hyperparameters,
        learning,
        named_hyperparameters,
    )
    from laplace_invariance.invariant import InvariantModel
    from laplace_invariance.marglik import (
        learn_augmentation,
        log_evidence,
        marglik_training,
        plan,
        suggest,
    )
    from laplace_invariance.marglik.profiles import profile
    from laplace_invariance.runs import load_run

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
    "constant_curvature",
    "curvature",
    "hyperparameters",
    "layers",
    "learn_augmentation",
    "learning",
    "load_run",
    "log_evidence",
    "marglik",
    "marglik_training",
    "metrics",
    "named_hyperparameters",
    "plan",
    "profile",
    "suggest",
]

_SUBMODULES = (
    "augmentations",
    "autoencoder",
    "curvature",
    "datasets",
    "draws",
    "hyper",
    "invariant",
    "layers",
    "marglik",
    "metrics",
    "plots",
    "variational",
)
_HOMES = {
    "AffineImage": "augmentations",
    "AffinePoints": "augmentations",
    "Augmentation": "augmentations",
    "Colour": "augmentations",
    "Compose": "augmentations",
    "FiniteGroup": "augmentations",
    "Hyperparameterised": "hyper",
    "InvariantModel": "invariant",
    "Sequence": "augmentations",
    "constant_curvature": "curvature",
    "hyperparameters": "hyper",
    "learn_augmentation": "marglik",
    "learning": "hyper",
    "load_run": "runs",
    "log_evidence": "marglik",
    "marglik_training": "marglik",
    "named_hyperparameters": "hyper",
    "plan": "marglik",
    "profile": "marglik",
    "suggest": "marglik",
}


_LOCK = RLock()  # threads that import parts of one package at once see it half initialised


def __getattr__(name: str) -> Any:
    if name not in _SUBMODULES and name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _LOCK:
        if name in _SUBMODULES:
            return import_module(f"{__name__}.{name}")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
