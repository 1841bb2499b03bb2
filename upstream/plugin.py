"""A plugin of pytest for the tests of laplace-torch: keep outcomes, and substitute backends.

``python -m pytest -p plugin --outcomes FILE`` writes a line of JSON for every test that has run.
With ``--engine`` our backends take the place of laplace's own, without any change of the tests:
``--substitute default`` where a test leaves the backend to laplace, ``--substitute all`` also where
it imports one.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

ENGINES = {"native": "", "backpack": "backpack-", "asdl": "asdl-"}  # prefixes of backends' names
SUBSTITUTES = ("default", "all")
FAMILIES = ("Asdl", "BackPack", "Curvlinops")
KINDS = ("GGN", "EF")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    group = parser.getgroup("tests of laplace-torch")
    group.addoption("--outcomes", type=Path, help="file that gets a line of JSON per test")
    group.addoption("--engine", choices=list(ENGINES), help="engine of the backends to substitute")
    group.addoption("--substitute", choices=SUBSTITUTES, default="default")


def pytest_configure(config: pytest.Config) -> None:
    """Substitute backends before any test is imported."""
    if config.option.engine is not None:
        substitute(config.option.engine, everywhere=config.option.substitute == "all")
    if config.option.outcomes is not None:
        config.pluginmanager.register(Outcomes(config.option.outcomes))


def substitute(engine: str, everywhere: bool) -> None:
    """Put our backends in the place of laplace's own, for the rest of the process.

    Args:
        engine: A key of ``ENGINES``.
        everywhere: Whether to replace the classes that tests import as well. What laplace itself
            imported before stays, so that it still knows its own classes from others.
    """
    import laplace.baselaplace
    import laplace.curvature as curvature
    from laplace.curvature import asdl, backpack, curvlinops

    from laplace_invariance.curvature import find_backend

    ours = {kind: find_backend(f"{ENGINES[engine]}{kind.lower()}") for kind in KINDS}
    base = laplace.baselaplace.BaseLaplace
    base.__init__ = _with_default(base.__init__, ours["GGN"])
    if not everywhere:
        return
    for module in (curvature, asdl, backpack, curvlinops):
        for family in FAMILIES:
            for kind, backend in ours.items():
                if hasattr(module, family + kind):
                    setattr(module, family + kind, backend)


def _with_default(init: Any, backend: type) -> Any:
    """Return an ``__init__`` whose argument ``backend`` is this one where it is None."""
    arguments = signature(init)

    @wraps(init)
    def initialise(*args: Any, **kwargs: Any) -> None:
        bound = arguments.bind(*args, **kwargs)
        if bound.arguments.get("backend") is None:
            bound.arguments["backend"] = backend
        init(*bound.args, **bound.kwargs)

    return initialise


class Outcomes:
    """Writes the outcome of every test to a file, as soon as it is known.

    Names of tests have the names of their arguments' classes in them, which a substitution
    changes, so tests are counted instead: ``tests/test_x.py::test_y#3``.

    Args:
        path: The file; it has another name until all tests have run.
    """

    def __init__(self, path: Path) -> None:
        self._final = path
        self._path = path.with_suffix(".partial")
        self._keys: dict[str, str] = {}
        self._path.write_text("")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Count the tests of every function, in the order of its arguments."""
        seen: Counter[str] = Counter()
        for item in items:
            function = item.nodeid.partition("[")[0]
            self._keys[item.nodeid] = f"{function}#{seen[function]}"
            seen[function] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep files that could not be imported."""
        if report.failed:
            self._keys[report.nodeid] = report.nodeid
            self._write(report.nodeid, "error", str(report.longrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep how a test ended; its set-up counts if it did not pass."""
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self._write(report.nodeid, report.outcome, str(report.longrepr or ""))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Give the file its name, unless the run was interrupted."""
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self._path.replace(self._final)

    def _write(self, nodeid: str, outcome: str, text: str) -> None:
        message = text.strip().splitlines()[-1] if outcome in ("failed", "error") and text else ""
        line = {"test": self._keys[nodeid], "id": nodeid, "outcome": outcome, "message": message}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
