"""Compare methods on several transformations, over several seeds, in one table.

Every cell of the table is a run of ``learn``. Runs of one transformation and seed have the same
images, transformed in the same way, and the same initial weights.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laplace_invariance.experiments import pictures
from laplace_invariance.experiments.base import say
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.learn import LearnResult, learn
from laplace_invariance.experiments.options import CompareConfig
from laplace_invariance.experiments.reports import compare_report

__all__ = ["CompareConfig", "CompareResult", "compare"]


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
        """Return mean test accuracies by transformation and method."""
        means: dict[str, dict[str, float]] = {}
        for (transform, method), results in self.results.items():
            mean = statistics.fmean(result.accuracy for result in results)
            means.setdefault(transform, {})[method] = mean
        return means

    def summary(self) -> list[dict[str, Any]]:
        """Return the summaries of all runs, for JSON."""
        return [result.summary() for results in self.results.values() for result in results]

    def markdown(self) -> str:
        """Return three tables: test accuracies, learnt ranges and evidences.

        All are means over seeds, with the standard deviation if there are several.
        """
        parts = [
            "Test accuracy in percent:",
            self._table(_accuracy_cell),
            "Ranges, and the true ones:",
            self._table(_ranges_cell),
            f"Log evidence per training image, {self._kind()}, samples {self._samples()}:",
            self._table(_evidence_cell),
        ]
        return "\n\n".join(parts)

    def _kind(self) -> str:
        """Say of which weights evidences are, and whether of all directions of the loss Hessian."""
        results = list(itertools.chain(*self.results.values()))
        largest = max(result.evidence_error for result in results)
        words = "exact"
        if largest > 0:
            words = f"with standard errors up to {largest:.3f}"
        if results[0].config.subset_of_weights == "last_layer":
            words = f"of the last layer, {words}"
        return words

    def _samples(self) -> str:
        """Say how many samples networks are averaged over, since more make evidences higher."""
        numbers: dict[int, list[str]] = {}
        for method in self.methods:
            found = next(runs[0] for (_, name), runs in self.results.items() if name == method)
            numbers.setdefault(found.n_samples, []).append(method)
        parts = [f"S = {n} ({', '.join(methods)})" for n, methods in numbers.items()]
        return " and ".join(parts)

    def _table(self, cell: Callable[[list[LearnResult]], str]) -> str:
        head = ["method", *(transform.replace("_", " ") for transform in self.transforms)]
        rows = [head, ["---"] * len(head)]
        for method in self.methods:
            pairs = [(transform, method) for transform in self.transforms]
            cells = [cell(self.results[pair]) if pair in self.results else "-" for pair in pairs]
            if any(text != "-" for text in cells):
                rows.append([method, *cells])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    __str__ = markdown


def _accuracy_cell(results: Sequence[LearnResult]) -> str:
    return _spread([100 * result.accuracy for result in results], "{:.1f}")


def _evidence_cell(results: Sequence[LearnResult]) -> str:
    return _spread([result.evidence for result in results], "{:.3f}")


def _ranges_cell(results: Sequence[LearnResult]) -> str:
    """Say how wide the ranges are that should be, and the widest of the others."""
    if not results[0].magnitudes:
        return "-"
    truth = results[0].truth
    parts = []
    others: list[tuple[float, str]] = []
    for name in results[0].magnitudes:
        values = [result.magnitudes[name] for result in results]
        if truth[name] > 0:
            parts.append(f"{_short(name)} {_spread(values, '{:.2f}')} ({truth[name]:.2f})")
        else:
            others.append((max(values), name))
    widest, name = max(others)
    return ", ".join([*parts, f"others ≤ {widest:.2f} ({_short(name)})"])


def _spread(values: Sequence[float], form: str) -> str:
    mean = form.format(statistics.fmean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ± {form.format(statistics.stdev(values))}"


def _short(name: str) -> str:
    return name.replace("_translation", " shift").replace("_", " ")


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
    """
    runs = config.runs
    results: dict[tuple[str, str], list[LearnResult]] = {}
    with RunDirectory(out, config, resume) as directory:
        directory.lock()
        for i, run in enumerate(runs, start=1):
            name = f"{Path(run.data).stem}-{run.transform}-{run.method}-{run.seed}"
            say(f"{i} of {len(runs)}: {name}", progress_bar)
            result = learn(run, directory.path(name), resume=resume, progress_bar=progress_bar)
            say(f"    accuracy {result.accuracy:.1%}, {result.seconds:.0f} s", progress_bar)
            results.setdefault((run.transform, run.method), []).append(result)
            if i == 1:  # the configuration is possible, so the directory is this comparison's
                directory.begin()
        comparison = CompareResult(results)
        directory.save("comparison.md", comparison.markdown())
        directory.save("summary.json", comparison.summary())
        pictures.draw_compare(directory, comparison)
        compare_report(directory, config, comparison)
    return comparison
