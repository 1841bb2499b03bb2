"""By how much learnt ranges fall short of the best that is known, in evidence and in accuracy.

``python benchmarks/bench_regret.py`` trains what is missing, hard cells first, one process per run,
and writes one small file per run to benchmarks/results/regret; ``--table`` prints the tables of
what is there, and ``--write`` keeps them in benchmarks/README.md.

A cell is a data set, a transformation and a seed. All its runs have the same recipe, and differ in
where ranges start and whether they are learnt. Evidences are exact, with 32 samples, common draws,
and priors at their optimum.
"""

from __future__ import annotations

import itertools
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import bench
from runs import file_name, options, results, run_missing

RESULTS = bench.ROOT / "benchmarks/results/regret"
DATA = bench.ROOT.parent / "shared/data"
TRANSFORMS: dict[str, dict[str, float]] = {
    "±90": {"rotation": math.pi / 2},
    "shifted": {"x_translation": 0.37, "y_translation": 0.37},
    "±70": {"rotation": math.radians(70)},
    "±60, scaled": {
        "rotation": math.radians(60),
        "x_scale": math.log(2),
        "y_scale": math.log(2),
    },
    "fully rotated": {"rotation": math.pi},
    "scaled": {"x_scale": math.log(2), "y_scale": math.log(2)},
    "as is": {},
}
# How ranges are learnt: by default, from one start, by Augerino, or not at all
VARIANTS = ("search", "zero", "found", "open", "augerino", "truth", "none")
NEEDED = ("search", "truth", "none", "zero")  # before a cell is in the tables
# Whole commands, to compare their costs: of this checkout, and of the first release
COMMANDS = {"command": None, "release": "5f7a902"}
COST = ("mnist", 2000, "mlp", "fully rotated")
N_EPOCHS = {"mlp": 100, "cnn": 40}
SAMPLES = 32  # at which evidences are compared
MOST_REGRET = 0.02


class Run(NamedTuple):
    """One training."""

    data: str
    n_train: int
    net: str
    transform: str
    seed: int
    variant: str

    @property
    def path(self) -> Path:
        """Return the file of the result."""
        return RESULTS / file_name(self).replace("±", "")


def runs(seeds: list[int]) -> list[Run]:
    """Return all runs, hard cells first."""
    sources = [("fashion_mnist", 1000), ("mnist", 1000), ("digits", 1198)]
    sources += [("fashion_mnist", 2000), ("mnist", 2000)]
    cells = []
    for seed in seeds:
        cells += [
            (data, n_train, "mlp", transform, seed)
            for data, n_train in sources
            for transform in TRANSFORMS
        ]
        cells += [(data, 2000, "cnn", "fully rotated", seed) for data in ("fashion_mnist", "mnist")]
    needed = [Run(*cell, variant) for cell, variant in itertools.product(cells, NEEDED)]
    needed += [Run(*COST, seed, variant) for seed in seeds for variant in COMMANDS]
    others = [variant for variant in VARIANTS if variant not in NEEDED]
    return needed + [Run(*cell, variant) for cell, variant in itertools.product(cells, others)]


def augmentation(run: Run):
    """Return the augmentation of a run at its start."""
    from laplace_invariance.augmentations import AffineImage
    from laplace_invariance.files import read_json

    starts = {"open": 0.3, "augerino": 0.1, "truth": TRANSFORMS[run.transform]}
    if run.variant == "found":
        starts["found"] = read_json(run._replace(variant="search").path)["search"]["best"]["ranges"]
    made = AffineImage(init=starts.get(run.variant, 0.0))
    return made.frozen() if run.variant in ("truth", "found", "none") else made


def train(run: Run) -> dict[str, Any]:
    """Train one network, and return what it learnt and what it cost."""
    if run.variant in COMMANDS:
        return call(run)
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import laplace_invariance as li
    from laplace_invariance import datasets
    from laplace_invariance.experiments import base
    from laplace_invariance.experiments.learn import LEARN_NETWORKS
    from laplace_invariance.marglik import Augerino, Evidence

    torch.set_num_threads(1)
    source = run.data if run.data == "digits" else str(DATA / f"{run.data}.npz")
    n_train = None if run.data == "digits" else run.n_train
    with base.seeded(run.seed):
        split = datasets.load(source, n_train=n_train, seed=run.seed)
        generator = torch.Generator().manual_seed(run.seed)
        ranges = TRANSFORMS[run.transform]
        x_train = datasets.transformed(split.x_train, ranges, generator)
        x_test = datasets.transformed(split.x_test, ranges, generator)
        net = LEARN_NETWORKS[run.net](split.in_shape, split.n_classes)
        learnt = augmentation(run)
        n_samples = 1 if run.variant == "none" else 8  # all would be the same
        model = base.image_model(net, x_train, learnt, n_samples)
        loader = DataLoader(TensorDataset(x_train, split.y_train), base.BATCH, shuffle=True)
        is_augerino = run.variant == "augerino"
        n_epochs = N_EPOCHS[run.net]
        started = time.thread_time()
        result = li.marglik_training(
            model,
            loader,
            estimator="running",
            search=run.variant == "search",
            objective=Augerino(0.1) if is_augerino else Evidence(),
            lr_aug=0.03 if is_augerino else None,
            marglik_loader=DataLoader(loader.dataset, base.MARGLIK_BATCH),
            **base.cosine_recipe(n_epochs, len(loader)),
        )
        seconds = time.thread_time() - started
        ordered = DataLoader(loader.dataset, base.MARGLIK_BATCH)
        compared = li.log_evidence(model, ordered, n_samples=SAMPLES)
        accuracy = base.accuracy(model, TensorDataset(x_test, split.y_test))
    n_data = len(x_train)
    found: dict[str, Any] = {
        **run._asdict(),
        "n_epochs": n_epochs,
        "accuracy": accuracy,
        "evidence": result.evidence / n_data,
        "evidence_32": compared / n_data,
        "ranges": learnt.magnitudes(),
        "prior_precisions": result.prior_precisions,
        "newton_decrement": result.newton_decrement / n_data,
        "seconds": seconds,
        "train": sum(record["seconds"]["train"] for record in result.history),
        "torch": torch.__version__,
    }
    if result.search is not None:
        found["search"] = result.search.state_dict()
    return found


def call(run: Run) -> dict[str, Any]:
    """Call ``learn`` of the command line as a user would, and return the CPU time of all of it."""
    from laplace_invariance.files import read_json

    words = f"--train {run.n_train} --net {run.net} --epochs {N_EPOCHS[run.net]} --seed {run.seed}"
    words += f" --transform {run.transform.replace(' ', '-')} --quiet"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        checkout = bench.ROOT
        commit = COMMANDS[run.variant]
        if commit is not None:
            checkout = directory / "release"
            extract(commit, checkout)
        command = [sys.executable, "-W", "ignore", "-m", "laplace_invariance", "learn"]
        command += [*words.split(), "--data", str(DATA / f"{run.data}.npz")]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [*command, "--out", str(directory / "out")],
            cwd=checkout,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        summary = read_json(directory / "out/summary.json")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**run._asdict(), "accuracy": summary["accuracy"], "seconds": seconds}


def extract(commit: str, directory: Path) -> None:
    """Put the files of a commit into a new directory."""
    directory.mkdir()
    archive = subprocess.run(
        ["git", "archive", commit], cwd=bench.ROOT, check=True, stdout=subprocess.PIPE
    )
    subprocess.run(["tar", "-x"], cwd=directory, check=True, input=archive.stdout)


def cells() -> dict[tuple[Any, ...], dict[str, dict[str, Any]]]:
    """Return results by cell and variant."""
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for result in results(RESULTS):
        key = tuple(result[name] for name in ("data", "n_train", "net", "transform", "seed"))
        found.setdefault(key, {})[result["variant"]] = result
    return {key: runs for key, runs in found.items() if set(NEEDED) <= set(runs)}


def regret(runs: dict[str, dict[str, Any]], variant: str) -> float:
    """Return by how much the evidence of a variant is below the best of its cell."""
    best = max(runs[name]["evidence_32"] for name in VARIANTS if name in runs)
    return best - runs[variant]["evidence_32"]


def summary() -> str:
    """Return a table of all cells together, one row per way to learn."""
    rows = []
    known = cells()
    for variant in VARIANTS:
        having = [runs for runs in known.values() if variant in runs]
        if not having:
            continue
        regrets = [regret(runs, variant) for runs in having]
        gaps = [100 * (r[variant]["accuracy"] - r["truth"]["accuracy"]) for r in having]
        over = [100 * (r[variant]["accuracy"] - r["none"]["accuracy"]) for r in having]
        rows.append(
            [
                variant,
                str(len(having)),
                f"{sum(value <= MOST_REGRET for value in regrets) / len(regrets):.0%}",
                f"{statistics.mean(regrets):.3f}",
                f"{max(regrets):.3f}",
                f"{statistics.mean(gaps):+.1f}",
                f"{min(over):+.1f}",
            ]
        )
    header = ["ranges", "cells", f"regret at most {MOST_REGRET}", "mean regret", "largest regret"]
    header += ["accuracy above truth's, points", "least above none's"]
    return bench.table(header, rows)


def details() -> str:
    """Return a table with a row per data set and transformation, over seeds."""
    groups: dict[tuple[Any, ...], list[dict[str, dict[str, Any]]]] = {}
    for (*key, _), runs in cells().items():
        groups.setdefault(tuple(key), []).append(runs)
    rows = []
    for (data, n_train, net, transform), found in sorted(groups.items()):
        row = [f"{data} {n_train}, {net}", transform, str(len(found))]
        for variant in VARIANTS:
            having = [runs for runs in found if variant in runs]
            regrets = [regret(runs, variant) for runs in having]
            accuracies = [100 * runs[variant]["accuracy"] for runs in having]
            mean = statistics.mean
            row.append(f"{mean(regrets):.3f} / {mean(accuracies):.1f}" if having else "")
        rows.append([*row, learnt(found)])
    header = ["data", "transformed", "seeds", *VARIANTS, "ranges by search"]
    return bench.table(header, rows)


def cost() -> str:
    """Return a table of the CPU time of ``learn``, with its search, and of that of the release."""
    rows = []
    found = {(run["seed"], run["variant"]): run for run in results(RESULTS)}
    for seed in sorted({seed for seed, _ in found}):
        if any((seed, variant) not in found for variant in COMMANDS):
            continue
        both = [found[seed, variant] for variant in COMMANDS]
        seconds = [run["seconds"] for run in both]
        row = [f"{value:.0f}" for value in seconds] + [f"{seconds[0] / seconds[1]:.2f}"]
        rows.append([str(seed), *row, *(f"{run['accuracy']:.1%}" for run in both)])
    if not rows:
        return ""
    header = ["seed", "CPU s", "of the first release", "ratio"]
    header += ["accuracy", "of the first release"]
    return bench.table(header, rows)


def learnt(found: list[dict[str, dict[str, Any]]]) -> str:
    """Return the ranges above 0.05 that search learnt, as least and largest over seeds."""
    words = []
    for name in found[0]["search"]["ranges"]:
        values = [runs["search"]["ranges"][name] for runs in found]
        if max(values) > 0.05:
            words.append(f"{name} {min(values):.2f}" + f" to {max(values):.2f}" * (len(values) > 1))
    return ", ".join(words) or "none"


def main() -> None:
    """Train what is missing, and print or write the tables."""
    arguments = options(__doc__, range(3)).parse_args()
    if not arguments.table:
        run_missing("bench_regret", runs(arguments.seeds), arguments.jobs)
    if not cells():
        sys.exit(f"there is no cell with all of {', '.join(NEEDED)} yet")
    text = f"{summary()}\n\nMean regret in nats per image / accuracy in %, per cell:\n\n{details()}"
    costs = cost()
    if costs:
        data, n_train, net, transform = COST
        words = f"{data}, {n_train} images, {net}, {transform}"
        text += f"\n\nThe cost of `laplace-invariance learn`, {words}:\n\n{costs}"
    print(text)
    if arguments.write:
        bench.write("regret", text)


if __name__ == "__main__":
    main()
