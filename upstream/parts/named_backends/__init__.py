"""Part (b): backends by name, with entry points for those of other packages."""

from pathlib import Path

from edits import Edit, Part

BASE = "laplace/baselaplace.py"

PART = Part(
    Path(__file__).parent,
    edits=(
        Edit(
            BASE,
            "from laplace.curvature.curvlinops import CurvlinopsEF, CurvlinopsGGN\n",
            "from laplace.curvature.curvlinops import CurvlinopsEF, CurvlinopsGGN\n"
            "from laplace.curvature.registry import find_backend\n",
        ),
        Edit(
            BASE,
            "        if backend is None:\n            backend = CurvlinopsGGN\n",
            "        backend = find_backend(backend)\n\n"
            "        if backend is None:\n            backend = CurvlinopsGGN\n",
        ),
        Edit(
            BASE,
            "        assert backend in [BackPackGGN, AsdlGGN, CurvlinopsGGN]\n",
            "        backend = find_backend(backend)\n"
            "        assert backend in [BackPackGGN, AsdlGGN, CurvlinopsGGN]\n",
        ),
        Edit(
            "laplace/subnetlaplace.py",
            "if backend is not None and not issubclass(backend, (GGNInterface, EFInterface)):",
            "if not issubclass(self._backend_cls, (GGNInterface, EFInterface)):",
        ),
        Edit(
            BASE,
            "    backend : subclasses of `laplace.curvature.CurvatureInterface`\n"
            "        backend for access to curvature/Hessian approximations. "
            "Defaults to CurvlinopsGGN if None.\n"
            "    backend_kwargs : dict, default=None\n"
            "        arguments passed to the backend on initialization, for example to\n"
            "        set the number of MC samples for stochastic approximations.\n"
            "    asdl_fisher_kwargs",
            "    backend : subclasses of `laplace.curvature.CurvatureInterface` or str\n"
            "        backend for access to curvature/Hessian approximations. "
            "Defaults to CurvlinopsGGN if None.\n"
            "        A string is the name of a backend, see "
            "`laplace.curvature.registry.find_backend`.\n"
            "    backend_kwargs : dict, default=None\n"
            "        arguments passed to the backend on initialization, for example to\n"
            "        set the number of MC samples for stochastic approximations.\n"
            "    asdl_fisher_kwargs",
        ),
    ),
    new_files={"laplace/curvature/registry.py": "registry.py"},
)
