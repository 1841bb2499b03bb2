"""Evidences that are known, kept in a file so that a profile can be resumed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from laplace_invariance.files import read_json, write_json
from laplace_invariance.marglik.estimators.base import finite
from laplace_invariance.marglik.profiles.results import or_else

__all__ = ["KnownEvidences"]

FORMAT = 2  # 1: without checksums of data; other batches in repetitions


class KnownEvidences:
    """Evidences by value and repetition, each written to a file as soon as it is known.

    Args:
        path: The file; None keeps nothing.
        resume: Whether to read what the file has.
        signature: What must agree with the run that wrote it.
    """

    def __init__(self, path: str | Path | None, resume: bool, signature: dict[str, Any]) -> None:
        if resume and path is None:
            raise ValueError("resume=True needs to know the checkpoint=")
        self._path = None if path is None else Path(path)
        self._signature = json.loads(json.dumps(signature))  # with lists, as it will be read
        self._found: dict[tuple[float, int], float] = {}
        if self._path is None or not self._path.exists():
            return
        if not resume:
            raise FileExistsError(
                f"{path} exists; resume=True resumes from it, another name starts from scratch"
            )
        self._read(self._path)

    def _read(self, path: Path) -> None:
        saved = read_json(path)
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            raise ValueError(f"{path} is not of a profile in format {FORMAT}; nothing was changed")
        theirs = saved.get("signature")
        if not isinstance(theirs, dict):
            raise ValueError(f"{path} is damaged: it has no signature; nothing was changed")
        different = [
            key
            for key, value in self._signature.items()
            if key not in theirs or theirs[key] != value
        ]
        if different:
            raise ValueError(
                f"{path} is of another profile: it differs in {', '.join(different)}; name another "
                "file to start from scratch; nothing was changed"
            )
        entries = saved.get("found")
        if not isinstance(entries, list):
            raise ValueError(f"{path} is damaged: it has no evidences; nothing was changed")
        for entry in entries:
            if not _is_entry(entry) or (entry[0], entry[1]) in self._found:
                raise ValueError(
                    f"{path} is damaged: {entry!r} is no width, repetition and evidence, or is "
                    "there twice; nothing was changed"
                )
            value, repeat, evidence = entry
            self._found[value, repeat] = or_else(evidence, -math.inf)

    def __contains__(self, key: tuple[float, int]) -> bool:
        return key in self._found

    def __getitem__(self, key: tuple[float, int]) -> float:
        return self._found[key]

    def add(self, value: float, repeat: int, evidence: float) -> None:
        """Keep an evidence."""
        self._found[value, repeat] = evidence
        if self._path is None:
            return
        found = [[*key, finite(one)] for key, one in self._found.items()]
        write_json(self._path, {"format": FORMAT, "signature": self._signature, "found": found})


def _is_entry(entry: object) -> bool:
    """Return whether something is a width, a number of a repetition, and an evidence or None."""
    if not isinstance(entry, list) or len(entry) != 3:
        return False
    value, repeat, evidence = entry
    return (
        _is_finite(value)
        and value >= 0
        and type(repeat) is int
        and repeat >= 0
        and (evidence is None or _is_finite(evidence))
    )


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
