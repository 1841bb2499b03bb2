"""Check an installed package: its files, that it imports in silence, and that its program learns.

Runs in the environment where the package is installed, in an empty directory, and imports nothing
of a checkout: ``python -I smoke.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import distribution, version
from pathlib import Path

NAME = "laplace-invariance"
FILES = ("py.typed", "experiments/reports/page.css")
SILENT = """
import laplace_invariance as li
for name in li.__all__:
    getattr(li, name)
"""
LEARN = (
    "learn --data digits --transform fully-rotated --search off --epochs 25 --samples 4 --quiet "
    "--out smoke"
)


def check_files() -> None:
    """Check which files are installed, and that these are what is imported."""
    files = {path.as_posix() for path in distribution(NAME).files or ()}
    for name in FILES:
        assert f"laplace_invariance/{name}" in files, f"{name} is not installed"
    import laplace_invariance

    place = Path(laplace_invariance.__file__).parent
    assert place.is_relative_to(sys.prefix), f"imported from {place}"


def output(*command: str) -> str:
    """Run a command that must succeed; return what it prints, warnings included."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def main() -> None:
    """Check all of it; raise ``AssertionError`` for what does not hold."""
    check_files()
    assert output(sys.executable, "-I", "-W", "error", "-c", SILENT) == ""
    program = str(Path(sys.executable).with_name(NAME))
    assert output(program, "--version").strip() == version(NAME)
    print(output(program, *LEARN.split()), end="")
    summary = json.loads(Path("smoke/summary.json").read_text())
    assert summary["magnitudes"]["rotation"] > 1, "the range of rotations did not open"
    assert summary["accuracy"] > 0.6, "the network did not learn"


if __name__ == "__main__":
    main()
