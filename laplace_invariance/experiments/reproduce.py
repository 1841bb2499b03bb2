"""Repeat a table of a paper: run what is missing of its cells, and show what there is.

Every run leaves one small file, which can be kept and shared; a run that was interrupted continues
where it was. A result counts only if it is that of the configuration as it is now.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from laplace_invariance import __version__
from laplace_invariance.experiments.checks import Config
from laplace_invariance.experiments.jobs import run_side_by_side, verb_of
from laplace_invariance.experiments.options import ImagesConfig, ReproduceConfig
from laplace_invariance.experiments.papers import TABLES, Cell, Table
from laplace_invariance.experiments.table_pictures import draw_table
from laplace_invariance.files import read_json, write_text

__all__ = ["ReproduceConfig", "ReproduceResult", "read_results", "reproduce"]

# What a small file keeps of a summary, by experiment
KEPT: dict[str, tuple[str, ...]] = {
    "learn": (
        "accuracy",
        "evidence",
        "evidence_compared",
        "evidence_error",
        "newton_decrement",
        "magnitudes",
        "truth",
    ),
    "layers": (
        "accuracy",
        "log_likelihood",
        "evidence",
        "evidence_error",
        "chosen",
        "ablation",
        "report",
        "magnitudes",
    ),
    "variational": ("runs",),
    "pairs": ("networks",),
    "plane": ("evidence", "accuracy", "range", "picture"),
    "measure": ("networks",),
}
# What is long, and in no table
LEFT_OUT = ("orbit", "spectra", "ranges_by_epoch")


@dataclass(frozen=True)
class ReproduceResult:
    """What there is of a table; prints as tables in Markdown.

    Attributes:
        config: Configuration: which table, and its size.
        found: Results by name of the run.
    """

    config: ReproduceConfig
    found: dict[str, dict[str, Any]]

    @property
    def table(self) -> Table:
        """The table."""
        return TABLES[self.config.name]

    @property
    def missing(self) -> list[Cell]:
        """Runs that have no result."""
        cells = self.table.cells(self.config.scale)
        return [cell for cell in cells if cell.name not in self.found]

    def __str__(self) -> str:
        table = self.table
        head = f"{table.title} ({table.source}).\n\nClaim: {table.claim}"
        return f"{head}\n\n{table.markdown(self.config.scale, self.found)}"


def reproduce(
    config: ReproduceConfig, out: str | Path | None = None, *, progress_bar: bool = False
) -> ReproduceResult:
    """Run what is missing of a table, several runs at a time.

    Args:
        config: Which table, and its size.
        out: Directory of all results, in which every table and size has its own, with one small
            file per run and, of some tables, ``figure.png``; None is ``results``.
        progress_bar: Whether to show progress.

    Returns:
        All results of the table.

    Raises:
        FailedRuns: If runs failed, after all have ended.
    """
    place = Path(out or "results") / config.name / config.scale
    cells = {cell.name: cell for cell in TABLES[config.name].cells(config.scale)}
    found = read_results(config, out)
    work = place / "unfinished"

    def keep(name: str) -> None:
        result = _small(cells[name], read_json(work / name / "summary.json"))
        write_text(place / f"{name}.json", json.dumps(result, indent=1) + "\n")
        shutil.rmtree(work / name)

    runs = {name: _placed(cell.config, config) for name, cell in cells.items() if name not in found}
    if runs:
        work.mkdir(parents=True, exist_ok=True)
        try:
            run_side_by_side(
                runs, work, config.n_jobs, resume=True, progress_bar=progress_bar, done=keep
            )
        finally:
            if not any(work.iterdir()):
                work.rmdir()
    found = read_results(config, out)
    draw_table(TABLES[config.name], config.scale, found, place)
    return ReproduceResult(config, found)


def read_results(
    config: ReproduceConfig, out: str | Path | None = None
) -> dict[str, dict[str, Any]]:
    """Return results of a table by name of the run, without those of other configurations.

    Args:
        config: Which table, and its size.
        out: Directory of all results.
    """
    place = Path(out or "results") / config.name / config.scale
    found = {}
    for cell in TABLES[config.name].cells(config.scale):
        path = place / f"{cell.name}.json"
        if path.exists():
            result = read_json(path)
            if _is_of(result["config"], cell.config):
                found[cell.name] = result
    return found


def _placed(run: Config, config: ReproduceConfig) -> Config:
    """Return the configuration of a run with the place of its images."""
    if not isinstance(run, ImagesConfig):
        return run
    return replace(run, root=config.root, download=config.download)


def _is_of(saved: Mapping[str, Any], config: Config) -> bool:
    """Return whether a run had this configuration; options newer than it have their defaults."""
    return {**_identity(type(config)()), **saved} == _identity(config)


def _identity(config: Config) -> dict[str, Any]:
    """Return what makes a run what it is, as JSON has it."""
    places = ("root", "download", "device")
    values = {
        entry.name: getattr(config, entry.name)
        for entry in fields(config)
        if entry.name not in places
    }
    identity: dict[str, Any] = json.loads(json.dumps({"format": config.format, **values}))
    return identity


def _small(cell: Cell, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of a run."""
    import torch

    verb = verb_of(cell.config)
    found = {name: _shortened(summary[name]) for name in KEPT[verb]}
    return {
        "part": cell.part,
        "row": cell.row,
        "column": cell.column,
        "seed": cell.seed,
        "experiment": verb,
        "config": _identity(cell.config),
        "seconds": _seconds(summary),
        "version": __version__,
        "torch": torch.__version__,
        **found,
    }


def _shortened(value: Any) -> Any:
    """Return a value without what is long, and of a history only the last record."""
    if isinstance(value, Mapping):
        kept = {key: _shortened(one) for key, one in value.items() if key not in LEFT_OUT}
        if isinstance(kept.get("history"), list):
            kept["history"] = kept["history"][-1:]
        return kept
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_shortened(one) for one in value]
    return value


def _seconds(summary: Mapping[str, Any]) -> float:
    """Return how long a run took."""
    if "seconds" in summary:
        return float(summary["seconds"])
    parts = summary.get("runs") or summary["networks"].values()
    return float(sum(part["seconds"] for part in parts))
