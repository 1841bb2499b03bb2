from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from laplace.curvature.curvature import CurvatureInterface

__all__ = ["backend_names", "find_backend"]

GROUP = "laplace.backends"

OWN = {
    "curvlinops-ggn": "laplace.curvature.curvlinops:CurvlinopsGGN",
    "curvlinops-ef": "laplace.curvature.curvlinops:CurvlinopsEF",
    "curvlinops-hessian": "laplace.curvature.curvlinops:CurvlinopsHessian",
    "asdl-ggn": "laplace.curvature.asdl:AsdlGGN",
    "asdl-ef": "laplace.curvature.asdl:AsdlEF",
    "asdl-hessian": "laplace.curvature.asdl:AsdlHessian",
    "backpack-ggn": "laplace.curvature.backpack:BackPackGGN",
    "backpack-ef": "laplace.curvature.backpack:BackPackEF",
}


def backend_names() -> list[str]:
    """Names of all backends: those of this library, and those of installed packages.

    Returns
    -------
    names : list[str]
    """
    return [*OWN, *sorted({point.name for point in _entry_points()} - OWN.keys())]


def find_backend(
    backend: str | type[CurvatureInterface] | None,
) -> type[CurvatureInterface] | None:
    """Find a backend by its name.

    A package offers its own backends by entry points of the group `laplace.backends`,
    whose names must not be those of the backends of this library:

        [project.entry-points."laplace.backends"]
        my-ggn = "my_package:MyGGN"

    Parameters
    ----------
    backend : str, subclass of `CurvatureInterface` or None
        the name of a backend; anything else is returned as it is.

    Returns
    -------
    backend : subclass of `CurvatureInterface` or None
    """
    if not isinstance(backend, str):
        return backend

    if backend in OWN:
        module, _, name = OWN[backend].partition(":")
        return getattr(import_module(module), name)

    found = {point.value: point for point in _entry_points() if point.name == backend}
    if not found:
        raise ValueError(f"Unknown backend {backend!r}. Known are: {', '.join(backend_names())}.")
    if len(found) > 1:
        raise ValueError(
            f"Several packages offer a backend {backend!r}: {', '.join(sorted(found))}."
            " Pass the class instead."
        )

    (point,) = found.values()
    loaded = point.load()
    if not (isinstance(loaded, type) and issubclass(loaded, CurvatureInterface)):
        raise TypeError(f"The backend {backend!r} ({point.value}) is no CurvatureInterface.")
    return loaded


def _entry_points() -> list[EntryPoint]:
    found = entry_points()
    if hasattr(found, "select"):
        return list(found.select(group=GROUP))
    return list(found.get(GROUP, []))  # Python 3.9
