"""What each estimator of the evidence learns, and at what cost: whole trainings, side by side.

``python benchmarks/bench_learning.py`` trains what is missing, one process per run and as many at a
time as ``--jobs``, and writes one small file per run to benchmarks/results/learning; ``--table``
prints the table of what is there, and ``--write`` keeps it in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import bench
from runs import file_name, results, run_missing

RESULTS = bench.ROOT / "benchmarks/results/learning"
DATA = bench.ROOT.parent / "shared/data"

# How the evidence is estimated, by name; the first is the recipe of the first release.
VARIANTS: dict[str, dict[str, Any]] = {
    "refit, output_rank=3": {"estimator": "refit", "backend_kwargs": {"output_rank": 3}},
    "refit, exact": {"estimator": "refit"},
    "refit, stochastic": {"estimator": "refit", "backend_kwargs": {"stochastic": True}},
    "running": {"estimator": "running"},
    "running, hybrid": {
        "estimator": "running",
        "backend_kwargs": {"output_rank": 2, "stochastic": True},
    },
    "kernel bound": {"estimator": "kernel"},
    "running, last layer": {"estimator": "running", "subset_of_weights": "last_layer"},
    "running, search": {"estimator": "running", "search": True},
}
ESTIMATED = [name for name in VARIANTS if name != "running, search"]
FAR = 2.0  # a rotation, in radians, until which time is measured


class Run(NamedTuple):
    """One training."""

    data: str
    n_train: int
    net: str
    n_epochs: int
    transform: str
    variant: str
    seed: int

    @property
    def path(self) -> Path:
        """Return the file of the result."""
        return RESULTS / file_name(self)


def suite(name: str) -> list[Run]:
    """Return the runs of a part of the table, most telling first."""
    new, old = "running", "refit, output_rank=3"
    if name == "digits":
        return [
            Run("digits", 1198, "mlp", 100, "fully_rotated", variant, seed)
            for seed, variant in itertools.product(range(3), ESTIMATED)
            if seed == 0 or variant not in ("refit, exact", "kernel bound")
        ]
    if name == "rotated":
        return [
            Run("mnist", 5000, net, n_epochs, "fully_rotated", variant, 0)
            for variant in ESTIMATED
            for net, n_epochs in (("mlp", 30), ("cnn", 16))
        ]
    kinds = ("fully_rotated", "translated", "original")
    if name == "last-layer":
        return [
            Run("mnist", 2000, "mlp", 50, kind, "running, last layer", seed)
            for seed, kind in itertools.product(range(3), kinds)
        ]
    if name == "search":
        return [
            Run("mnist", 2000, "cnn", 24, kind, "running, search", seed)
            for kind, seed in itertools.product(kinds, range(3))
        ]
    net, n_epochs = {"mlp": ("mlp", 50), "cnn": ("cnn", 24)}[name]
    return [
        Run("mnist", 2000, net, n_epochs, kind, variant, seed)
        for seed, kind, variant in itertools.product(range(3), kinds, (new, old))
    ]


SUITES = ("digits", "mlp", "last-layer", "cnn", "rotated", "search")


def train(run: Run, **changes: Any) -> dict[str, Any]:
    """Train one network, and return what it learnt and what it cost."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from laplace_invariance.augmentations import AffineImage
    from laplace_invariance.experiments import base
    from laplace_invariance.experiments.learn import LEARN_NETWORKS
    from laplace_invariance.experiments.options import LearnConfig
    from laplace_invariance.marglik import loop, marglik_training

    torch.set_num_threads(1)
    # the history has times of the clock, which other processes disturb
    loop.time = SimpleNamespace(perf_counter=time.thread_time)
    source = run.data if run.data == "digits" else str(DATA / f"{run.data}.npz")
    config = LearnConfig(data=source, n_train=run.n_train, transform=run.transform, seed=run.seed)
    clock = {"start": time.thread_time(), "far": None}
    augmentation = AffineImage()

    def watch(record: dict[str, Any], model: Any) -> None:
        if clock["far"] is None and augmentation.magnitudes()["rotation"] > FAR:
            clock["far"] = time.thread_time() - clock["start"]

    with base.seeded(run.seed):
        split = base.load_transformed(config, run.transform, run.seed)
        net = LEARN_NETWORKS[run.net](split.in_shape, split.n_classes)
        model = base.image_model(net, split.x_train, augmentation, config.n_samples)
        loader = DataLoader(TensorDataset(split.x_train, split.y_train), base.BATCH, shuffle=True)
        options = {**base.cosine_recipe(run.n_epochs, len(loader)), "backend_kwargs": None}
        options |= VARIANTS[run.variant] | changes
        clock["start"] = time.thread_time()
        result = marglik_training(
            model,
            loader,
            marglik_loader=DataLoader(loader.dataset, base.MARGLIK_BATCH),
            callbacks=[watch],
            **options,
        )
        seconds = time.thread_time() - clock["start"]
        accuracy = base.accuracy(model, TensorDataset(split.x_test, split.y_test))
    trained = sum(record["seconds"]["train"] for record in result.history)
    estimated = sum(record["seconds"]["estimate"] for record in result.history)
    return {
        **run._asdict(),
        "n_samples": config.n_samples,
        "accuracy": accuracy,
        "evidence": result.evidence / len(loader.dataset),
        "evidence_error": result.evidence_error / len(loader.dataset),
        "ranges": augmentation.magnitudes(),
        "prior_precisions": result.prior_precisions,
        "seconds": seconds,
        "train": trained,
        "estimate": estimated,
        "end": seconds - trained - estimated,
        "seconds_to_far": clock["far"],
        "torch": torch.__version__,
    }


def tables() -> str:
    """Return a table of the results, one row per setting and estimator, over seeds."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for found in results(RESULTS):
        key = tuple(found[name] for name in ("data", "n_train", "net", "n_epochs", "transform"))
        groups.setdefault((*key, found["variant"]), []).append(found)
    order = list(VARIANTS)
    rows = []
    for key in sorted(groups, key=lambda key: (*map(str, key[:5]), order.index(key[5]))):
        rows.append(row(key, groups[key]))
    header = ["data", "network", "estimator", "seeds", "estimates / training", "with the end"]
    header += ["rotation, rad", "s to 2 rad", "exact evidence", "accuracy, %"]
    return bench.table(header, rows)


def row(key: tuple[Any, ...], found: list[dict[str, Any]]) -> list[str]:
    """Return the cells of a setting and an estimator."""
    data, n_train, net, n_epochs, transform, variant = key

    def mean(values: list[float], digits: int) -> str:
        text = f"{statistics.mean(values):.{digits}f}"
        if len(values) > 1:
            text += f" ± {statistics.stdev(values):.{digits}f}"
        return text

    far = [r["seconds_to_far"] for r in found if r["seconds_to_far"] is not None]
    return [
        f"{data} {n_train}, {transform.replace('_', ' ')}",
        f"{net}, {n_epochs} epochs",
        variant,
        str(len(found)),
        mean([r["estimate"] / r["train"] for r in found], 2),
        mean([(r["estimate"] + r["end"]) / r["train"] for r in found], 2),
        mean([r["ranges"]["rotation"] for r in found], 2),
        f"{statistics.mean(far):.0f}" if len(far) == len(found) else "-",
        mean([r["evidence"] for r in found], 3),
        mean([100 * r["accuracy"] for r in found], 1),
    ]


def main() -> None:
    """Train what is missing, and print or write the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--suite", nargs="*", default=list(SUITES), choices=SUITES)
    options.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    options.add_argument("--table", action="store_true", help="print the table, train nothing")
    options.add_argument("--write", action="store_true", help="keep the table in README.md")
    arguments = options.parse_args()
    if not arguments.table:
        runs = list(itertools.chain(*map(suite, arguments.suite)))
        run_missing("bench_learning", runs, arguments.jobs)
    found = tables()
    print(found)
    if arguments.write:
        bench.write("learning", found)


if __name__ == "__main__":
    main()
