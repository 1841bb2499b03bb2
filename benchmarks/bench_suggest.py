"""What ``li.suggest`` says of ordinary networks, trained on rotated and on upright digits.

``python benchmarks/bench_suggest.py`` runs what is missing, one process per network, and writes one
small file per network to benchmarks/results/suggest; ``--table`` prints the tables of what is
there, and ``--write`` keeps them in benchmarks/README.md.

A network is trained in the ordinary way, by Adam and the cross entropy, without augmentation,
priors or weight decay. ``li.suggest`` then has its defaults, and is not told what was done to the
images.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import bench
from runs import file_name, options, results, run_missing

RESULTS = bench.ROOT / "benchmarks/results/suggest"
DATA = bench.ROOT.parent / "shared/data"
TRANSFORMS = {"fully rotated": "fully_rotated", "upright": "original"}
ROTATED = "fully rotated"
N_TRAIN = 2000
N_EPOCHS = 30
LR = 2e-3
N_CNNS = 2  # seeds for which the CNN is trained as well
RAISES = "raises it"


class Run(NamedTuple):
    """One network, and what is suggested for it."""

    net: str
    transform: str
    seed: int

    @property
    def path(self) -> Path:
        """Return the file of the result."""
        return RESULTS / file_name(self)


def runs(seeds: list[int], n_cnns: int) -> list[Run]:
    """Return all runs, the fast ones first.

    Args:
        seeds: Seeds of images, weights and batches.
        n_cnns: Number of these with which the CNN is trained.
    """
    wanted = {"mlp": seeds, "cnn": seeds[:n_cnns]}
    return [
        Run(net, transform, seed)
        for net, own_seeds in wanted.items()
        for seed in own_seeds
        for transform in TRANSFORMS
    ]


def train(run: Run) -> dict[str, Any]:
    """Train one network, ask what would help it, and return the answer."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import laplace_invariance as li
    from laplace_invariance import datasets
    from laplace_invariance.experiments import base
    from laplace_invariance.experiments.learn import LEARN_NETWORKS

    torch.set_num_threads(1)
    with base.seeded(run.seed):
        split = datasets.load(str(DATA / "mnist.npz"), n_train=N_TRAIN, seed=run.seed)
        generator = torch.Generator().manual_seed(run.seed)
        kind = TRANSFORMS[run.transform]
        x_train = datasets.transformed(split.x_train, kind, generator)
        x_test = datasets.transformed(split.x_test, kind, generator)
        net = LEARN_NETWORKS[run.net](split.in_shape, split.n_classes)
        model = base.image_model(net, x_train, None, 1)
        loader = DataLoader(TensorDataset(x_train, split.y_train), base.BATCH, shuffle=True)
        started = time.thread_time()
        train_in_the_ordinary_way(model, loader)
        trained = time.thread_time()
        accuracy = base.accuracy(model, TensorDataset(x_test, split.y_test))
        asked = time.thread_time()
        found = li.suggest(model, loader)
        ended = time.thread_time()
    return {
        **run._asdict(),
        "n_train": N_TRAIN,
        "n_epochs": N_EPOCHS,
        "accuracy": accuracy,
        "suggestions": found.to_dict(),
        "training_seconds": trained - started,
        "seconds": ended - asked,
        "torch": torch.__version__,
    }


def train_in_the_ordinary_way(model, loader) -> None:
    """Train a network by Adam, with a step size that falls to zero along half a cosine."""
    import torch
    from torch import nn

    optimizer = torch.optim.Adam(model.parameters(), LR)
    n_steps = N_EPOCHS * len(loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    model.train()
    for _ in range(N_EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
    model.eval()


def is_rotation(row: dict[str, Any]) -> bool:
    """Return whether an augmentation is a rotation and nothing else."""
    return list(row["ranges"]) == ["rotation"]


def suggests_rotation(result: dict[str, Any]) -> bool:
    """Return whether rotation comes first, and clearly raises the evidence."""
    first = result["suggestions"]["rows"][0]
    return is_rotation(first) and first["verdict"] == RAISES


def is_as_claimed(result: dict[str, Any]) -> bool:
    """Return whether rotation is suggested for rotated images, or gains nothing on upright ones."""
    if result["transform"] == ROTATED:
        return suggests_rotation(result)
    rotations = filter(is_rotation, result["suggestions"]["rows"])
    return not any(is_positive(row) for row in rotations)


def is_positive(row: dict[str, Any]) -> bool:
    """Return whether the evidence rises, clearly or not; a gain of None is minus infinity."""
    return row["gain"] is not None and row["gain"] > 0


def summary(found: list[dict[str, Any]]) -> str:
    """Return a table with a row per network and kind of images, over seeds."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in found:
        groups.setdefault((result["net"], result["transform"]), []).append(result)
    rows = []
    for (net, transform), own in groups.items():
        n_suggested = sum(map(suggests_rotation, own))
        n_as_claimed = sum(map(is_as_claimed, own))
        minutes = [result["seconds"] / 60 for result in own]
        rows.append(
            [
                net,
                transform,
                f"{n_suggested} of {len(own)}",
                f"{n_as_claimed} of {len(own)}",
                f"{min(minutes):.1f} to {max(minutes):.1f}",
            ]
        )
    header = ["network", "images", "rotation first, and raises the evidence", "as it should be"]
    return bench.table([*header, "minutes of one core"], rows)


def details(found: list[dict[str, Any]]) -> str:
    """Return a table with a row per run: what comes first, and the best rotation."""
    rows = []
    for result in found:
        suggested = result["suggestions"]["rows"]
        rotation = next(row for row in suggested if is_rotation(row))
        rows.append(
            [
                f"{result['net']}, {result['transform']}",
                str(result["seed"]),
                f"{100 * result['accuracy']:.1f}",
                *in_words(suggested[0]),
                *in_words(rotation),
            ]
        )
    header = ["network, images", "seed", "accuracy in %", "first", "its gain", "its verdict"]
    header += ["best rotation", "its gain", "its verdict"]
    return bench.table(header, rows)


def in_words(row: dict[str, Any]) -> list[str]:
    """Return an augmentation, its gain with standard error, and its verdict."""
    gain = "minus infinity"
    if row["gain"] is not None:
        gain = f"{row['gain']:+.3f} ± {row['error']:.3f}"
    return [row["words"], gain, row["verdict"]]


def in_order() -> list[dict[str, Any]]:
    """Return all results, in the order of networks, images and seeds."""
    nets, transforms = ["mlp", "cnn"], list(TRANSFORMS)

    def order(result: dict[str, Any]) -> tuple[int, int, int]:
        net, transform = result["net"], result["transform"]
        return nets.index(net), transforms.index(transform), result["seed"]

    return sorted(results(RESULTS), key=order)


def main() -> None:
    """Run what is missing, and print or write the tables."""
    parser = options(__doc__, range(5))
    parser.add_argument("--cnns", type=int, default=N_CNNS, help="seeds of the CNN")
    arguments = parser.parse_args()
    if not arguments.table:
        wanted = runs(arguments.seeds, arguments.cnns)
        run_missing("bench_suggest", wanted, arguments.jobs)
    found = in_order()
    if not found:
        sys.exit("there is no result yet")
    text = f"{summary(found)}\n\nGains in nats per image:\n\n{details(found)}"
    print(text)
    if arguments.write:
        bench.write("suggest", text)


if __name__ == "__main__":
    main()
