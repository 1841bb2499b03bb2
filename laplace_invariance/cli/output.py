"""What several verbs tell."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

__all__ = ["files", "need_matplotlib", "say"]


def files(out: Path) -> str:
    """Return a line about what is in a directory."""
    return f"files           {out}: {', '.join(sorted(path.name for path in out.iterdir()))}"


def say(line: str) -> None:
    """Print a line that is no result."""
    print(line, file=sys.stderr, flush=True)


def need_matplotlib() -> None:
    """End the program if there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("the figures need matplotlib: pip install 'laplace-invariance[plots]'")
