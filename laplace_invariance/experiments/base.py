"""The directory of an experiment: whose it is, and what is written there."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from laplace_invariance.files import read_json

__all__ = ["claim", "identity"]


def claim(out: Path, experiment: Any, resume: bool) -> None:
    """Refuse a directory that belongs to another experiment, or to this one if it is not resumed.

    Args:
        out: the directory.
        experiment: a dataclass whose fields are in ``experiment.json`` there.
        resume: whether it is resumed.
    """
    path = out / "experiment.json"
    if not path.exists():
        return
    if not resume:
        raise FileExistsError(
            f"{path} exists; --resume (resume=True) goes on from it, another directory starts anew"
        )
    try:
        found, wanted = identity(type(experiment)(**read_json(path))), identity(experiment)
    except TypeError as error:  # fields that this kind of experiment does not have
        raise ValueError(f"{path} is of another kind of experiment; nothing was changed") from error
    different = [name for name in wanted if found[name] != wanted[name]]
    if different:
        raise ValueError(
            f"{path} is of another experiment: it differs in {', '.join(different)}; nothing was changed"
        )


def identity(experiment: Any) -> dict[str, Any]:
    """Return what makes an experiment; not where its data are from."""
    return {
        name: value
        for name, value in asdict(experiment).items()
        if name not in ("root", "download")
    }
