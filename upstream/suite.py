"""Run the tests of a checkout of laplace-torch, and compare how they ended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Outcome", "broken", "counts", "prepare", "read", "replace_table", "run"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


@dataclass(frozen=True)
class Outcome:
    """How a test ended.

    Attributes:
        test: File, function and number of the test, ``tests/test_x.py::test_y#3``.
        id: Name that pytest gives it.
        outcome: ``"passed"``, ``"failed"``, ``"skipped"``, or ``"error"`` for a file that could not
            be imported.
        message: Last line of the error, if there is one.
    """

    test: str
    id: str
    outcome: str
    message: str


def prepare(directory: Path, tests: Path, source: Path | None = None) -> None:
    """Copy tests into a directory, and the source that they import, if not the installed one.

    Tests of a checkout cannot run where they are: the source of the checkout would be imported.
    """
    shutil.copytree(tests, directory / "tests")
    (directory / "pytest.ini").write_text("[pytest]\n")
    if source is not None:
        shutil.copytree(source, directory / source.name)


def run(directory: Path, report: Path, arguments: Sequence[str] = ()) -> list[Outcome]:
    """Run tests of a directory in one process, unless there is a report of them already.

    Args:
        directory: What :func:`prepare` made.
        report: File of outcomes; pytest's own output goes to a file beside it.
        arguments: Further arguments of pytest.

    Raises:
        RuntimeError: Pytest did not come to an end.
    """
    if not report.exists():
        report.parent.mkdir(parents=True, exist_ok=True)
        paths = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "plugin", "-p", "no:cacheprovider"]
        command += ["--tb=short", "-W", "ignore", "--continue-on-collection-errors"]
        command += ["--outcomes", str(report.resolve()), *arguments]
        log = report.with_suffix(".log")
        with log.open("w") as file:
            subprocess.run(
                command,
                cwd=directory,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if not report.exists():
            raise RuntimeError(f"pytest did not come to an end; see {log}")
    return read(report)


def read(report: Path) -> list[Outcome]:
    """Return the outcomes that a run has left."""
    return [Outcome(**json.loads(line)) for line in report.read_text().splitlines()]


def counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Return how many tests ended how."""
    found = Counter(one.outcome for one in outcomes)
    return {name: found[name] for name in ("passed", "failed", "skipped", "error") if found[name]}


def broken(before: Sequence[Outcome], after: Sequence[Outcome]) -> list[Outcome]:
    """Return the tests that passed before and do not pass after.

    One that is missing afterwards counts, as its file may not be importable any more.
    """
    now = {one.test: one for one in after}
    found = []
    for one in before:
        other = now.get(one.test, Outcome(one.test, one.id, "error", "it did not run"))
        if one.outcome == "passed" and other.outcome != "passed":
            found.append(other)
    return found


def replace_table(page: Path, name: str, table: str) -> str:
    """Return a page with a table in the place of the one between its two comments."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    head, _, rest = page.read_text().partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"{page} has no place for the table {name!r}")
    return head + begin + table + end + tail
