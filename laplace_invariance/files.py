"""Files that are never half written: atomic replacement and JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

__all__ = ["read_json", "replace", "write_json"]


def replace(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Let ``fill`` write a temporary file, force it to the disk, and move it to ``path``."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """Read what :func:`write_json` wrote."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged: {error}; remove it to go on; nothing was changed"
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Write a value, atomically, and the directory if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, lambda file: file.write((json.dumps(value, indent=2) + "\n").encode()))
