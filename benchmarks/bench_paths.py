"""What layers choose, and at which evidence, from open and closed starts and with a search.

``python benchmarks/bench_paths.py`` trains what is missing, one process per run, and writes one
small file per run to benchmarks/results/paths; ``--table`` prints the tables of what is there, and
``--write`` keeps them in benchmarks/README.md.

A cell is a task on quadrants and a seed. All its runs have the same images, network and recipe, and
differ in where free paths start. The run with a search is built open, as *open* is.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import bench
from runs import file_name, options, results, run_missing

RESULTS = bench.ROOT / "benchmarks/results/paths"
UNFINISHED = bench.ROOT / "benchmarks/results/unfinished"
DATA = bench.ROOT.parent / "shared/data"
TASKS = ("digit", "both")
NEEDED = ("closed", "search", "open")  # before a cell is in the tables
STARTS = (*NEEDED, "off", "half-open")
RECIPE = {
    "width": 4,
    "n_train": 2000,
    "n_test": 1000,
    "n_epochs": 30,
    "batch_size": 50,
    "lr": 2e-3,  # with 5e-3, and this batch size, the network on both tasks stays at chance
    "n_epochs_burnin": 2,
    "marglik_frequency": 2,  # with 5, evidences were below that of guessing
}
MOST_REGRET = 0.02
SHORT = {"CONV": "c", "F-FC": "f", "CONV+F-FC": "B", "": "-"}


class Run(NamedTuple):
    """One training."""

    task: str
    seed: int
    start: str

    @property
    def path(self) -> Path:
        """Return the file of the result."""
        return RESULTS / file_name(self)


def runs(seeds: list[int]) -> list[Run]:
    """Return all runs, seed by seed, those without which a cell is not in the tables first."""
    found = [Run(task, seed, start) for seed in seeds for task in TASKS for start in NEEDED]
    others = [start for start in STARTS if start not in NEEDED]
    return found + [Run(task, seed, start) for seed in seeds for task in TASKS for start in others]


def train(run: Run) -> dict[str, Any]:
    """Train one network, and return what it chose and what it cost."""
    import torch

    from laplace_invariance.allocator import keep_freed_memory
    from laplace_invariance.experiments.layers import LayersConfig, layers

    torch.set_num_threads(1)
    keep_freed_memory()
    config = LayersConfig(
        data=str(DATA / "mnist.npz"),
        task=run.task,
        seed=run.seed,
        start=run.start,
        scale=0.01 if run.start == "closed" else 1.0,
        **RECIPE,
    )
    unfinished = UNFINISHED / run.path.stem  # from where an interrupted run goes on
    started = time.thread_time()
    result = layers(config, unfinished, resume=unfinished.exists())
    seconds = time.thread_time() - started
    training = result.training
    assert training is not None
    shutil.rmtree(unfinished)
    return {
        **run._asdict(),
        **RECIPE,
        "accuracy": result.accuracy,
        "evidence": result.evidence,
        "evidence_error": result.evidence_error,
        "chosen": result.ablation.chosen,
        "ablation": result.ablation.as_dict(),
        "newton_decrement": training.newton_decrement / config.n_train,
        "search": result.search,
        "seconds": seconds,
        "torch": torch.__version__,
    }


def cells() -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """Return results by cell and start."""
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for result in results(RESULTS):
        found.setdefault((result["task"], result["seed"]), {})[result["start"]] = result
    return {key: runs for key, runs in found.items() if set(NEEDED) <= set(runs)}


def letters(result: dict[str, Any]) -> str:
    """Return what each layer chose as a letter: c convolution, f free, B both, - neither."""
    places = dict.fromkeys(row["place"] for row in result["ablation"]["rows"])
    return "".join(SHORT[result["chosen"].get(place, "")] for place in places)


def details() -> str:
    """Return a table with a row per run."""
    rows = []
    for (task, seed), found in sorted(cells().items()):
        best = max(run["evidence"] for run in found.values())
        for start in STARTS:
            if start not in found:
                continue
            run = found[start]
            ablation = run["ablation"]
            rows.append(
                [
                    f"{task}, seed {seed}",
                    start,
                    f"{run['evidence']:.3f}",
                    f"{best - run['evidence']:.3f}",
                    f"{run['accuracy']:.1%}",
                    letters(run),
                    f"{ablation['free']['accuracy']:.1%}",
                    f"{run['seconds']:.0f}",
                    f"{run['seconds'] / found['closed']['seconds']:.1f}",
                ]
            )
    header = ["task", "start", "log evidence", "regret", "accuracy", "layers"]
    header += ["accuracy without free paths", "seconds", "times closed"]
    return bench.table(header, rows)


def summary() -> str:
    """Return a table with a row per start: how often it is among the best, and as closed."""
    rows = []
    known = cells()
    for start in STARTS:
        having = [found for found in known.values() if start in found]
        if not having:
            continue
        regrets = []
        same = 0
        for found in having:
            regrets.append(max(r["evidence"] for r in found.values()) - found[start]["evidence"])
            same += letters(found[start]) == letters(found["closed"])
        n_good = sum(value <= MOST_REGRET for value in regrets)
        counts = [f"{count} of {len(having)}" for count in (n_good, same)]
        rows.append([start, *counts, f"{max(regrets):.3f}"])
    header = ["start", f"regret at most {MOST_REGRET}", "chooses as closed", "largest regret"]
    return bench.table(header, rows)


def searched() -> str:
    """Return a table of what the searches tried: the best, and by how much others lost."""
    from laplace_invariance.marglik import SearchResult

    rows = []
    for (task, seed), found in sorted(cells().items()):
        result = SearchResult.from_state_dict(found["search"]["search"])
        others = [f"{trial} {trial.loss:.3f}" for trial in result.trials if trial != result.best]
        rows.append([f"{task}, seed {seed}", str(result.best), "; ".join(others)])
    return bench.table(["task", "search starts at", "lost by"], rows)


def main() -> None:
    """Train what is missing, and print or write the tables."""
    arguments = options(__doc__, range(3)).parse_args()
    if not arguments.table:
        run_missing("bench_paths", runs(arguments.seeds), arguments.jobs)
    if not cells():
        sys.exit(f"there is no cell with all of {', '.join(NEEDED)} yet")
    text = f"{summary()}\n\n{details()}\n\nWhat the searches tried:\n\n{searched()}"
    print(text)
    if arguments.write:
        bench.write("paths", text)


if __name__ == "__main__":
    main()
