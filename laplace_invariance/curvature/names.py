"""Backends by name, in this package's functions and on the command line."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from laplace.curvature.curvature import CurvatureInterface

__all__ = ["BACKENDS", "LATER", "AnyBackend", "find_backend", "import_name"]

AnyBackend = str | type[CurvatureInterface]

# Entry points of the group laplace.backends have the names of classes, in lower case and with
# hyphens, as these shorter ones belong to laplace's own backends there.
BACKENDS = {
    "ggn": "AugmentedGGN",
    "ef": "AugmentedEF",
    "backpack-ggn": "BackPackAugmentedGGN",
    "backpack-ef": "BackPackAugmentedEF",
    "asdl-ggn": "AsdlAugmentedGGN",
    "asdl-ef": "AsdlAugmentedEF",
}
_PACKAGE = "laplace_invariance.curvature"
_BACKPACK = ("backpack", "backpack-for-pytorch")
_ASDL = ("asdl", "asdfghjkl")
# Names whose modules need another package: the module here, the package there, what to install
LATER = {
    "BackPackAugmentedGGN": ("engines.backpack", *_BACKPACK),
    "BackPackAugmentedEF": ("engines.backpack", *_BACKPACK),
    "register_backpack": ("plugins.backpack", *_BACKPACK),
    "AsdlAugmentedGGN": ("engines.asdl", *_ASDL),
    "AsdlAugmentedEF": ("engines.asdl", *_ASDL),
    "register_asdl": ("plugins.asdl", *_ASDL),
}


def find_backend(backend: AnyBackend) -> type[CurvatureInterface]:
    """Return a backend by its name; a class is returned as it is.

    Args:
        backend: One of ``"ggn"``, ``"ef"``, ``"backpack-ggn"``, ``"backpack-ef"``, ``"asdl-ggn"``
            and ``"asdl-ef"``, or a class of curvature backends, which may be laplace's own.

    Raises:
        TypeError: It is neither a name nor a class of curvature backends.
        ValueError: There is no backend of this name.
        ImportError: The package that computes it is not installed.
    """
    if isinstance(backend, type) and issubclass(backend, CurvatureInterface):
        return backend
    known = ", ".join(map(repr, BACKENDS))
    if not isinstance(backend, str):
        raise TypeError(
            f"backend must be one of {known}, or a class of curvature backends such as "
            f"AugmentedGGN; got {backend!r}"
        )
    if backend not in BACKENDS:
        raise ValueError(f"there is no backend {backend!r}; known names are {known}")
    name = BACKENDS[backend]
    return import_name(name) if name in LATER else getattr(import_module(f"{_PACKAGE}.ggn"), name)


def import_name(name: str) -> Any:
    """Return what needs another package, importing it only now; ``name`` is a key of ``LATER``.

    Raises:
        ImportError: The package is not installed.
    """
    module, package, distribution = LATER[name]
    try:
        return getattr(import_module(f"{_PACKAGE}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != package:
            raise
        raise ImportError(
            f"{name} needs the package {package!r}: pip install {distribution}"
        ) from error
