"""Compare methods on several transformations, over several seeds, in one table.

Every cell of the table is a run of ``learn``. Runs of one transformation and seed have the same
images, transformed in the same way, and the same initial weights.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laplace_invariance.experiments import pictures
from laplace_invariance.experiments.base import say
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.jobs import run_side_by_side
from laplace_invariance.experiments.learn import LearnResult, check_run, learn
from laplace_invariance.experiments.options import CompareConfig, LearnConfig
from laplace_invariance.experiments.reports import compare_report
from laplace_invariance.experiments.results import (
    N_COMPARED,
    images_words,
    range_words,
    spaced,
    transform_words,
)

__all__ = ["CompareConfig", "CompareResult", "compare"]

LEAST_SHOWN = 0.01  # width below which a range is called closed


@dataclass(frozen=True)
class CompareResult:
    """Results by transformation and method, one per seed; prints as tables in Markdown.

    Attributes:
        results: Results of ``learn`` by transformation and method; a pair may be absent.
    """

    results: dict[tuple[str, str], list[LearnResult]]

    @property
    def transforms(self) -> list[str]:
        """Transformations, each once."""
        return list(dict.fromkeys(transform for transform, _ in self.results))

    @property
    def methods(self) -> list[str]:
        """Methods, each once."""
        return list(dict.fromkeys(method for _, method in self.results))

    def accuracies(self) -> dict[str, dict[str, float]]:
        """Return mean test accuracies by transformation and method; none without a test set."""
        means: dict[str, dict[str, float]] = {}
        for (transform, method), results in self.results.items():
            found = [result.accuracy for result in results if result.accuracy is not None]
            if found:
                means.setdefault(transform, {})[method] = statistics.fmean(found)
        return means

    def summary(self) -> list[dict[str, Any]]:
        """Return the summaries of all runs, for JSON."""
        return [result.summary() for results in self.results.values() for result in results]

    def markdown(self) -> str:
        """Return what the data are, and a table of evidences, accuracies and ranges for each kind.

        All are means over seeds, with the standard deviation if there are several.
        """
        parts = [self._data()]
        for transform in self.transforms:
            parts += [f"{transform_words(transform)}:".capitalize(), self._table(transform)]
        parts.append(f"Log evidence per training image, {self._kind()}.")
        return "\n\n".join(parts)

    def _data(self) -> str:
        """Say which images these are, and what was trained on them."""
        results = list(itertools.chain(*self.results.values()))
        first = results[0]
        seeds = sorted({result.config.seed for result in results})
        words = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
        return f"{first.config.data}: {images_words(first.data)}; network {first.net}; {words}."

    def _kind(self) -> str:
        """Say what evidences are of, with how many samples, and how sure they are."""
        results = list(itertools.chain(*self.results.values()))
        words = f"with {N_COMPARED} samples wherever outputs are averaged"
        if results[0].config.subset_of_weights == "last_layer":
            words = f"of the last layer, {words}"
        largest = max(result.evidence_error for result in results)
        if largest > 0:
            words += f", and standard errors up to {largest:.3f}"
        return words

    def _table(self, transform: str) -> str:
        """Return the table of one kind of images, without columns that are empty."""
        found = {method: self.results.get((transform, method)) for method in self.methods}
        columns = {
            "log evidence": {name: _evidence_cell(runs) for name, runs in found.items() if runs},
            "test accuracy": {name: _accuracy_cell(runs) for name, runs in found.items() if runs},
            "ranges": {name: _ranges_cell(runs) for name, runs in found.items() if runs},
        }
        shown = {head: cells for head, cells in columns.items() if set(cells.values()) != {"-"}}
        rows = [["method", *shown], ["---"] * (1 + len(shown))]
        for method in columns["log evidence"]:
            rows.append([method, *(cells[method] for cells in shown.values())])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    __str__ = markdown


def _accuracy_cell(results: Sequence[LearnResult]) -> str:
    found = [100 * result.accuracy for result in results if result.accuracy is not None]
    if not found:
        return "-"
    return f"{_spread(found, '{:.1f}')} %"


def _evidence_cell(results: Sequence[LearnResult]) -> str:
    return _spread([result.comparable for result in results], "{:.3f}")


def _ranges_cell(results: Sequence[LearnResult]) -> str:
    """Say which ranges are open, and how far; of several seeds, the mean and the extremes."""
    first = results[0]
    if not first.magnitudes:
        return "-"
    shape = first.data["in_shape"]
    parts = []
    for name in first.magnitudes:
        widths = [result.magnitudes[name] for result in results]
        if max(widths) < LEAST_SHOWN and name not in first.truth:
            continue
        words = range_words(name, statistics.fmean(widths), shape)
        if len(widths) > 1:
            extremes = [range_words(name, width, shape) for width in (min(widths), max(widths))]
            if extremes[0] != extremes[1]:
                words += f" (from {extremes[0]} to {extremes[1]})"
        if name in first.truth:
            words += f", true {range_words(name, first.truth[name], shape)}"
        parts.append(f"{spaced(name)} {words}")
    if len(parts) < len(first.magnitudes):
        parts.append("others closed" if parts else "all closed")
    return "; ".join(parts)


def _spread(values: Sequence[float], form: str) -> str:
    mean = form.format(statistics.fmean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ± {form.format(statistics.stdev(values))}"


def compare(
    config: CompareConfig,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    progress_bar: bool = False,
) -> CompareResult:
    """Run ``learn`` for every transformation, method and seed, and put the results into one table.

    Args:
        config: Images, network, transformations, methods and seeds.
        out: Directory for one directory per run, the tables (``comparison.md``), ``summary.json``
            and a figure; None keeps nothing.
        resume: Whether to continue in ``out``: finished runs are read, and others, transformations,
            methods and seeds may be added.
        progress_bar: Whether to show progress.

    Returns:
        Results of all runs.

    Raises:
        FailedRuns: If runs in processes of their own failed; the others are kept.
    """
    with RunDirectory(out, config, resume) as directory:
        directory.lock()
        if config.n_jobs == 1:
            found = _in_turn(config, directory, progress_bar)
        else:
            found = _side_by_side(config, directory, progress_bar)
        comparison = CompareResult(_cells(found))
        directory.save("comparison.md", comparison.markdown())
        directory.save("summary.json", comparison.summary())
        pictures.draw_compare(directory, comparison)
        compare_report(directory, config, comparison)
    return comparison


def _cells(found: Sequence[LearnResult]) -> dict[tuple[str, str], list[LearnResult]]:
    """Return results by transformation and method."""
    cells: dict[tuple[str, str], list[LearnResult]] = {}
    for result in found:
        cells.setdefault((result.config.transform, result.config.method), []).append(result)
    return cells


def _name(run: LearnConfig) -> str:
    """Return the name of the directory of a run."""
    return f"{Path(run.data).stem}-{run.transform}-{run.method}-{run.seed}"


def _in_turn(
    config: CompareConfig, directory: RunDirectory, progress_bar: bool
) -> list[LearnResult]:
    """Do one run after the other, in this process."""
    found: list[LearnResult] = []
    for i, run in enumerate(config.runs, start=1):
        name = _name(run)
        say(f"{i} of {len(config.runs)}: {name}", progress_bar)
        path = directory.path(name)
        result = learn(run, path, resume=directory.resume, progress_bar=progress_bar)
        say(f"    {_progress(result)}, {result.seconds:.0f} s", progress_bar)
        found.append(result)
        if i == 1:  # the configuration is possible, so the directory is this comparison's
            directory.begin()
    return found


def _side_by_side(
    config: CompareConfig, directory: RunDirectory, progress_bar: bool
) -> list[LearnResult]:
    """Do several runs at a time, in processes of their own, and read what they have written."""
    runs = {_name(run): run for run in config.runs}
    if directory.finished() is None:
        check_run(config.runs[0])  # so that what is impossible leaves no trace
    directory.begin()
    with tempfile.TemporaryDirectory() as temporary:
        out = directory.out or Path(temporary)
        run_side_by_side(
            runs, out, config.n_jobs, resume=directory.resume, progress_bar=progress_bar
        )
        return [learn(run, out / name, resume=True) for name, run in runs.items()]


def _progress(result: LearnResult) -> str:
    words = f"log evidence {result.comparable:.3f}"
    if result.accuracy is None:
        return words
    return f"{words}, accuracy {result.accuracy:.1%}"
