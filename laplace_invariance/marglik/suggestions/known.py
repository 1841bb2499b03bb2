"""Evidences that are known, kept in a file so that a comparison can be resumed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from laplace_invariance.files import read_json, write_json
from laplace_invariance.marglik.estimators.base import finite
from laplace_invariance.marglik.search.candidates import Candidate
from laplace_invariance.marglik.suggestions.results import number

__all__ = ["KnownEvidences"]

FORMAT = 2  # 1: with a checksum of the first targets only


class KnownEvidences:
    """Evidences by candidate and repeat, in a file if there is one.

    Args:
        path: File of JSON; None keeps evidences in memory only.
        resume: Whether to read the file if it exists.
        signature: What must agree between the call that wrote the file and this one.
    """

    def __init__(self, path: str | Path | None, resume: bool, signature: dict[str, Any]) -> None:
        if resume and path is None:
            raise ValueError("resume=True needs to know the checkpoint=")
        self._path = None if path is None else Path(path)
        self._signature = signature
        self._trials: list[dict[str, Any]] = []
        if self._path is not None and self._path.exists():
            self._trials = self._read(self._path, resume)
        # after half of the steps, and after all
        self._evidences = {
            (Candidate(tuple(trial["ranges"].items())), trial["repeat"]): (
                number(trial["earlier"]),
                number(trial["evidence"]),
            )
            for trial in self._trials
        }

    def _read(self, path: Path, resume: bool) -> list[dict[str, Any]]:
        if not resume:
            raise FileExistsError(
                f"{path} exists; resume=True resumes from it, another name starts from scratch"
            )
        content = read_json(path)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(
                f"{path} has no evidences of suggest in format {FORMAT}; nothing was changed"
            )
        theirs, trials = content.get("signature"), content.get("trials")
        if not isinstance(theirs, dict) or not isinstance(trials, list):
            raise ValueError(_damaged(path, "it has no signature, or no list of trials"))
        for name, value in self._signature.items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"{path} was written by another call: its {name} is {theirs.get(name)} there "
                    f"and {value} here; nothing was changed; name another file to start from "
                    "scratch"
                )
        for trial in trials:
            if not _is_trial(trial):
                raise ValueError(_damaged(path, f"{trial} is not a trial"))
        return trials

    def __contains__(self, key: tuple[Candidate, int]) -> bool:
        return key in self._evidences

    def __getitem__(self, key: tuple[Candidate, int]) -> tuple[float, float]:
        return self._evidences[key]

    def add(self, candidate: Candidate, repeat: int, earlier: float, evidence: float) -> None:
        """Keep the evidences of a trial, and write all."""
        self._evidences[candidate, repeat] = (earlier, evidence)
        self._trials.append(
            {
                "ranges": dict(candidate.widths),
                "repeat": repeat,
                "earlier": finite(earlier),
                "evidence": finite(evidence),
            }
        )
        if self._path is not None:
            content = {"format": FORMAT, "signature": self._signature, "trials": self._trials}
            write_json(self._path, content)


def _damaged(path: Path, why: str) -> str:
    return f"{path} is damaged: {why}; remove it or name another file; nothing was changed"


def _is_trial(trial: Any) -> bool:
    """Return whether this is a trial as :meth:`KnownEvidences.add` keeps it."""
    if not isinstance(trial, dict) or trial.keys() != {"ranges", "repeat", "earlier", "evidence"}:
        return False
    ranges, repeat = trial["ranges"], trial["repeat"]
    evidences = [trial["earlier"], trial["evidence"]]
    if not isinstance(ranges, dict) or not all(_is_finite(w) and w > 0 for w in ranges.values()):
        return False
    if not isinstance(repeat, int) or isinstance(repeat, bool) or repeat < 0:
        return False
    # minus infinity, which is None, is not kept of the network alone
    return all(_is_finite(one) or (one is None and bool(ranges)) for one in evidences)


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
