"""Test versions of Python and torch, each in an environment of its own: ``make test-matrix``.

A combination is installed into a new virtual environment, part of the tests run in it, and one
small file in benchmarks/results/matrix keeps what came of it; combinations that have one are left
out. The table in docs/development.md is made of these files. Each environment takes gigabytes, and
is removed when it has been used.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "matrix"
PAGE = ROOT / "docs" / "development.md"
BEGIN, END = "<!-- versions: begin -->\n", "<!-- versions: end -->\n"

# Python, torch and the torchvision that belongs to it: the oldest torch, and the newest
COMBINATIONS = (
    ("3.10", "2.6.0", "0.21.0"),
    ("3.11", "2.6.0", "0.21.0"),
    ("3.11", "2.15.0", "0.29.2"),
    ("3.12", "2.15.0", "0.29.2"),
    ("3.13", "2.15.0", "0.29.2"),
)
PACKAGES = (
    "torch",
    "torchvision",
    "numpy",
    "laplace-torch",
    "curvlinops-for-pytorch",
    "backpack-for-pytorch",
    "asdfghjkl",
)
VERSIONS = f"""
import json, platform
from importlib.metadata import version
versions = {{name: version(name) for name in {PACKAGES}}}
print(json.dumps({{"python": platform.python_version(), **versions}}))
"""
TESTS = (
    "tests/test_invariant.py",
    "tests/augmentations",
    "tests/layers/test_factored.py",
    "tests/layers/test_sparse.py",
    "tests/curvature/test_check.py",
    "tests/curvature/test_eigen.py",
    "tests/curvature/test_evidence.py",
    "tests/curvature/test_kfac.py",
    "tests/curvature/test_kron.py",
    "tests/curvature/test_rules.py",
    "tests/marglik/test_objectives.py",
    "tests/marglik/test_priors.py",
)


# Running.


def interpreter(version: str) -> str | None:
    """Return an interpreter of a version such as "3.12", from the path or from pyenv."""
    of_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for candidate in (f"python{version}", *map(str, of_pyenv)):
        try:
            done = subprocess.run([candidate, "-c", "import ssl, venv"], capture_output=True)
        except FileNotFoundError:
            continue
        if done.returncode == 0:
            return candidate
    return None


def outcome(report: Path) -> dict[str, Any]:
    """Return the number of tests, and which of them failed, from a report of pytest."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    n_skipped = sum(case.find("skipped") is not None for case in cases)
    return {"tests": len(cases) - n_skipped, "skipped": n_skipped, "failed": failed}


def tried(python: str | Path, scratch: Path) -> dict[str, Any]:
    """Return the versions that an interpreter finds, and what came of the tests in it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    asked = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True)
    report = scratch / "report.xml"
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS]
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    return json.loads(asked.stdout) | outcome(report)


def path_of(python: str, torch: str) -> Path:
    """Return the file of a combination; of Python, a version such as "3.12" or "3.12.1"."""
    minor = ".".join(python.split(".")[:2])
    return RESULTS / f"python{minor}-torch{torch}.json"


def keep(found: dict[str, Any]) -> None:
    """Write the result of one combination."""
    RESULTS.mkdir(exist_ok=True)
    path_of(found["python"], found["torch"]).write_text(json.dumps(found, indent=2) + "\n")


def run_missing() -> None:
    """Run the combinations that have no result yet, as far as there is a Python for them."""
    for version, torch, torchvision in COMBINATIONS:
        if path_of(version, torch).exists():
            continue
        found = interpreter(version)
        if found is None:
            print(f"there is no Python {version} here")
            continue
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            subprocess.run([found, "-m", "venv", place / "venv"], check=True)
            python = place / "venv" / "bin" / "python"
            wanted = [f"torch=={torch}", f"torchvision=={torchvision}", f"{ROOT}[test]"]
            subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
            keep(tried(python, place))


# The table.


def table() -> str:
    """Return all combinations as a table, with what is known of them."""
    lines = ["| Python | torch | torchvision | numpy | tests | failed |", "|---" * 6 + "|"]
    for python, torch, torchvision in COMBINATIONS:
        cells = [python, torch, torchvision, "", "not run yet", ""]
        path = path_of(python, torch)
        if path.exists():
            found = json.loads(path.read_text())
            cells = [found[name] for name in ("python", "torch", "torchvision", "numpy")]
            cells += [str(found["tests"]), str(len(found["failed"]))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page_with(versions: str) -> str:
    """Return the page with this table in place of its own."""
    text = PAGE.read_text()
    return text.split(BEGIN)[0] + BEGIN + versions + END + text.split(END)[1]


def main() -> None:
    """Run what is missing, or the tests of this environment, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--here", action="store_true", help="test this environment, as it is")
    if parser.parse_args().here:
        with tempfile.TemporaryDirectory() as directory:
            keep(tried(sys.executable, Path(directory)))
    else:
        run_missing()
    PAGE.write_text(page_with(table()))
    print(table(), end="")


if __name__ == "__main__":
    main()
