"""Backends by name, in this package's functions and on the command line."""

from __future__ import annotations

from importlib import import_module

from laplace.curvature.curvature import CurvatureInterface

__all__ = ["BACKENDS", "AnyBackend", "find_backend", "import_backend"]

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
# By the beginning of the class name: the module here, the package there, and what to install
_ENGINES = {
    "BackPack": ("engines.backpack", "backpack", "backpack-for-pytorch"),
    "Asdl": ("engines.asdl", "asdl", "asdfghjkl"),
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
    return import_backend(BACKENDS[backend])


def import_backend(name: str) -> type[CurvatureInterface]:
    """Return a backend by the name of its class, importing the engine only now.

    Raises:
        ImportError: The package that computes it is not installed.
    """
    for prefix, (module, package, distribution) in _ENGINES.items():
        if name.startswith(prefix):
            break
    else:
        return getattr(import_module(f"{_PACKAGE}.ggn"), name)
    try:
        return getattr(import_module(f"{_PACKAGE}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != package:
            raise
        raise ImportError(
            f"{name} needs the package {package!r}: pip install {distribution}"
        ) from error
