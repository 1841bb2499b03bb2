"""Trainings in processes of their own, some at a time, each with one small result file."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench  # noqa: F401 - makes the checkout importable


def options(description: str | None, seeds: Sequence[int]) -> argparse.ArgumentParser:
    """Return the options that benchmarks of whole trainings have in common.

    Args:
        description: What the benchmark is.
        seeds: Seeds by default.
    """
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--seeds", nargs="*", type=int, default=list(seeds))
    found.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    found.add_argument("--table", action="store_true", help="print the tables, train nothing")
    found.add_argument("--write", action="store_true", help="keep the tables in README.md")
    return found


def run_missing(module: str, runs: Sequence[Any], jobs: int) -> None:
    """Train what has no result yet.

    Args:
        module: Name of a module of this directory with a class ``Run``, a named tuple, and a
            function ``train`` that takes one and returns its result.
        runs: Runs, each with the ``path`` of its result, most important first.
        jobs: Number of processes at a time.
    """
    from laplace_invariance.files import write_text

    waiting = [run for run in runs if not run.path.exists()]
    running: list[tuple[Any, subprocess.Popen]] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            run = waiting.pop(0)
            print(f"{run} ({len(waiting)} to go)", file=sys.stderr, flush=True)
            running.append((run, start(module, run)))
        time.sleep(0.2)
        for run, process in list(running):
            if process.poll() is None:
                continue
            running.remove((run, process))
            output = process.stdout.read()
            results = [line for line in output.splitlines() if line.startswith("RESULT ")]
            if process.returncode or not results:
                print(f"{run} failed:\n{output[-2000:]}", file=sys.stderr, flush=True)
                continue
            run.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(run.path, results[-1].removeprefix("RESULT ") + "\n")


def start(module: str, run: Any) -> subprocess.Popen:
    """Start a training in a process of its own, with one thread."""
    lines = [
        "import json, sys, warnings",
        "warnings.simplefilter('ignore')",
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})",
        f"import {module}",
        f"run = {module}.Run(*{tuple(run)!r})",
        f"print('RESULT ' + json.dumps({module}.train(run)))",
    ]
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def results(directory: Path) -> list[dict[str, Any]]:
    """Return all results of a directory."""
    from laplace_invariance.files import read_json

    return [read_json(path) for path in sorted(directory.glob("*.json"))]


def file_name(run: tuple[Any, ...]) -> str:
    """Return the name of the result of a run."""
    return "_".join(map(str, run)).replace(", ", "-").replace(" ", "-").replace("=", "") + ".json"
