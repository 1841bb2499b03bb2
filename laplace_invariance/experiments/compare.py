"""Run many experiments and put them into one table: methods against kinds of data, over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from laplace_invariance import plots
from laplace_invariance.experiments.base import identity
from laplace_invariance.experiments.learn import Experiment, Outcome, learn

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """Outcomes by kind of data and method, one per seed."""

    outcomes: dict[tuple[str, str], list[Outcome]]

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(kind for kind, _ in self.outcomes))

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for _, method in self.outcomes))

    def accuracies(self) -> dict[str, dict[str, float]]:
        """Return mean test accuracies by kind and method."""
        return {
            kind: {
                m: statistics.fmean(o.accuracy for o in self.outcomes[k, m])
                for k, m in self.outcomes
                if k == kind
            }
            for kind in self.kinds
        }

    def markdown(self) -> str:
        """Return two tables: test accuracy, and learnt ranges, both mean ± standard deviation over seeds if several."""
        accuracies = self._rows(
            lambda outcomes: _spread([100 * o.accuracy for o in outcomes], "{:.1f}")
        )
        ranges = self._rows(lambda outcomes: _learnt(outcomes) if outcomes[0].magnitudes else "-")
        return "\n".join(
            [
                "Test accuracy in percent:",
                "",
                *accuracies,
                "",
                "Ranges, and the true ones:",
                "",
                *ranges,
            ]
        )

    def _rows(self, cell: Callable[[list[Outcome]], str]) -> list[str]:
        head = ["method", *(kind.replace("_", " ") for kind in self.kinds)]
        rows = [
            [
                m,
                *(
                    cell(self.outcomes[k, m]) if (k, m) in self.outcomes else "-"
                    for k in self.kinds
                ),
            ]
            for m in self.methods
        ]
        kept = [row for row in rows if any(text != "-" for text in row[1:])]
        return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *kept)]

    __str__ = markdown


def _spread(values: Sequence[float], form: str) -> str:
    mean = form.format(statistics.fmean(values))
    return mean if len(values) == 1 else f"{mean} ± {form.format(statistics.stdev(values))}"


def _learnt(outcomes: Sequence[Outcome]) -> str:
    """Say how wide the ranges are that should be, and the widest of the others."""
    truth = outcomes[0].truth
    wanted = [name for name, value in truth.items() if value > 0]
    parts = [
        f"{_short(name)} {_spread([o.magnitudes[name] for o in outcomes], '{:.2f}')} ({truth[name]:.2f})"
        for name in wanted
    ]
    widest = max(
        ((v, name) for o in outcomes for name, v in o.magnitudes.items() if name not in wanted)
    )
    return ", ".join([*parts, f"others ≤ {widest[0]:.2f} ({_short(widest[1])})"])


def _short(name: str) -> str:
    return name.replace("_translation", " shift").replace("_", " ")


def compare(
    experiments: Sequence[Experiment],
    out: str | Path | None = None,
    resume: bool = False,
    progress_bar: bool = False,
    say: Callable[[str], None] | None = None,
) -> Comparison:
    """Run experiments one after the other, and put them into one table.

    Those of one kind and seed have the same images, moved in the same way, and the same initial weights.

    Args:
        experiments: what to run; several of one kind and method are its seeds.
        out: directory for one directory per experiment, the tables (comparison.md), and a figure.
        resume: read what is finished in ``out`` and go on with what is not.
        progress_bar: show one per experiment.
        say: told what is run, and how it went.
    """
    if not experiments:
        raise ValueError("there is nothing to compare: no experiments")
    for e in experiments:
        same = [
            identity(other) | {"seed": 0}
            for other in experiments
            if (e.transform, e.method) == (other.transform, other.method)
        ]
        if any(found != same[0] for found in same):
            raise ValueError(
                f"experiments of {e.transform} with {e.method} must differ in seed only; compare others one by one"
            )
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    for i, e in enumerate(experiments, start=1):
        name = f"{Path(e.data).stem}-{e.transform}-{e.method}-{e.seed}"
        if say is not None:
            say(f"{i} of {len(experiments)}: {name}")
        outcome = learn(e, None if out is None else Path(out) / name, resume, progress_bar)
        outcomes.setdefault((e.transform, e.method), []).append(outcome)
        if say is not None:
            say(f"    accuracy {outcome.accuracy:.1%}, {outcome.seconds:.0f} s")
    comparison = Comparison(outcomes)
    if out is not None:
        (Path(out) / "comparison.md").write_text(comparison.markdown() + "\n")
        figure = plots.figure((2 + 2.4 * len(comparison.kinds), 5))
        plots.accuracies(comparison.accuracies(), figure.subplots())
        figure.savefig(Path(out) / "comparison.png", dpi=120)
    return comparison
