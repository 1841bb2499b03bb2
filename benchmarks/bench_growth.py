"""How time grows: curvature and its gradient in data, samples, classes and width.

``python benchmarks/bench_growth.py`` measures and prints the tables; ``--write`` also keeps them in
benchmarks/README.md. Times are CPU time of one thread, the minimum of several rounds in which all
steps of a size alternate in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import bench

UNIT = "training step"
STOCHASTIC = {"stochastic": True, "num_samples": 1}
HYBRID = {"output_rank": 2, **STOCHASTIC}
LARGEST_EXACT = 100  # classes
FIT_IMAGES = 500  # of which the decomposition's share is told

Steps = dict[str, Callable[[], object]]
Times = dict[str, float]

fresh = partial(bench.fresh, module="bench_growth")


def mlp(width: int, n_classes: int = bench.CLASSES):
    """Return a network with one hidden layer, for images of 28 x 28."""
    from torch import nn

    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, n_classes)
    )


def prepared(net, n_images: int, n_samples: int = 2, n_classes: int = bench.CLASSES) -> tuple:
    """Return a model that averages a network over samples, and random images with labels."""
    import torch

    import laplace_invariance as li

    model = li.InvariantModel(net, li.AffineImage(init=0.1), n_samples).eval()
    return model, torch.rand(n_images, 1, 28, 28), torch.randint(n_classes, (n_images,))


def steps(model, batches: list[tuple], variants: dict[str, dict]) -> Steps:
    """Return the training step, and curvature and gradient of each variant that is not refused.

    Args:
        model: The model, in evaluation mode.
        batches: Inputs and targets of each batch.
        variants: Options of ``AugmentedGGN`` by name.
    """
    from laplace_invariance.curvature import AugmentedGGN

    found: Steps = {UNIT: bench.training_step(model, batches)}
    for label, options in variants.items():
        try:
            curvature = AugmentedGGN(model, "classification", **options)
        except ValueError as error:
            print(f"{label} is refused: {error}", file=sys.stderr)
            continue
        found |= bench.curvature_steps(label, curvature, model, batches)
    return found


# One function per series: the times of one size.


def in_data(n: int, rounds: int) -> Times:
    """Return times of all of ``n`` images, in batches of 100."""
    model, x, y = prepared(bench.conv_net(1, 28), n)
    batches = list(zip(x.split(bench.BATCH), y.split(bench.BATCH), strict=True))
    return bench.fastest_alone(steps(model, batches, {"stochastic": STOCHASTIC}), rounds)


def in_samples(n_samples: int, rounds: int) -> Times:
    """Return times of a batch of 50 images with so many samples each."""
    model, x, y = prepared(bench.conv_net(1, 28), 50, n_samples)
    variants = {"exact": {}, "stochastic": STOCHASTIC}
    return bench.fastest_alone(steps(model, [(x, y)], variants), rounds)


def in_classes(network: str, n_classes: int, rounds: int) -> Times:
    """Return times of a batch of 16 images with so many classes."""
    net = bench.conv_net(1, 28, n_classes)
    if network == "MLP":
        net = mlp(128, n_classes)
    model, x, y = prepared(net, 16, n_classes=n_classes)
    variants = {"stochastic": STOCHASTIC, "output_rank=2 + stochastic": HYBRID}
    if n_classes <= LARGEST_EXACT:
        variants = {"exact": {}, **variants}
    return bench.fastest_alone(steps(model, [(x, y)], variants), rounds)


def in_width(width: int, rounds: int) -> Times:
    """Return times of a batch of 100 images, and of the decomposition of its factors."""
    from laplace_invariance.curvature import AugmentedGGN

    model, x, y = prepared(mlp(width), bench.BATCH)
    variants = {"exact": {}, "stochastic": STOCHASTIC}
    measured = steps(model, [(x, y)], variants)
    _, kron = AugmentedGGN(model, "classification").kron(x, y, N=len(y))
    measured["decomposition"] = kron.decompose
    return bench.fastest_alone(measured, rounds)


# Tables.


@dataclass(frozen=True)
class Series:
    """One table: the times of several sizes.

    Attributes:
        title: What is measured.
        symbol: What the sizes are.
        sizes: The sizes, one column each.
        call: Function of this module and its first arguments; size and rounds are added.
    """

    title: str
    symbol: str
    sizes: tuple[int, ...]
    call: str


SERIES = {
    "N": Series(
        "Convolutions, S = 2, all of N images in batches of 100; the unit is a training epoch",
        "N",
        (500, 2000, 8000),
        "in_data(",
    ),
    "S": Series("Convolutions, a batch of 50", "S", (1, 2, 4, 8, 16, 32), "in_samples("),
    "C": Series(
        "Convolutions, a batch of 16, S = 2", "C", (2, 10, 100, 1000), "in_classes('conv', "
    ),
    "C-MLP": Series(
        "MLP 784-128-C, a batch of 16, S = 2", "C", (2, 10, 100, 1000), "in_classes('MLP', "
    ),
    "width": Series(
        "MLP 784-w-10, a batch of 100, S = 2", "w", (128, 512, 1024, 2304), "in_width("
    ),
}


def measure(series: Series, rounds: int) -> list[Times]:
    """Return the times of all sizes, each from a process of its own."""
    found = []
    for size in series.sizes:
        print(f"{series.title}: {series.symbol} = {size} ...", file=sys.stderr, flush=True)
        found.append(fresh(f"{series.call}{size}, {rounds})"))
    return found


def labels_of(times: list[Times]) -> list[str]:
    """Return the names of all steps, of which some sizes may lack some."""
    longest = max(times, key=len)
    return list(longest)


def row(label: str, sizes: tuple[int, ...], times: list[Times]) -> list[str]:
    """Return a step's multiples of the unit, and the slope of its time."""
    cells = []
    for found in times:
        if label in found:
            cells.append(bench.multiple(found[label], found[UNIT], label == UNIT))
        else:
            cells.append("")
    pairs = [(s, found[label]) for s, found in zip(sizes, times, strict=True) if label in found]
    growth = ""
    if len(pairs) > 1:
        growth = f"{bench.slope(*zip(*pairs, strict=True)):.2f}"
    return [label, *cells, growth]


def share_row(times: list[Times]) -> list[str]:
    """Return the share of the decomposition in the time of an exact fit."""
    cells = []
    for found in times:
        factors = found["exact: kron"] * FIT_IMAGES / bench.BATCH
        share = found["decomposition"] / (found["decomposition"] + factors)
        cells.append(f"{share:.0%}")
    return [f"decomposition's share of an exact fit of {FIT_IMAGES} images", *cells, ""]


def series_table(series: Series, times: list[Times]) -> str:
    """Return a series as a table with its title, and a note on what was refused."""
    rows = [row(label, series.sizes, times) for label in labels_of(times)]
    if "decomposition" in times[0]:
        rows.append(share_row(times))
    header = ["", *(f"{series.symbol} = {size}" for size in series.sizes), "slope"]
    text = f"{series.title}:\n\n{bench.table(header, rows)}"
    if series.symbol == "C" and not any("output_rank" in label for label in labels_of(times)):
        text += "\n\n`output_rank` and `stochastic` together are refused by this version."
    return text


def main() -> None:
    """Measure, print the tables, and write them if asked to."""
    options = bench.parser(__doc__)
    options.add_argument("--series", nargs="*", default=list(SERIES), choices=SERIES)
    arguments = options.parse_args()
    parts = [
        f"CPU time of one thread, minimum of {arguments.rounds} rounds, as a multiple of a "
        "training step."
    ]
    for name in arguments.series:
        parts.append(series_table(SERIES[name], measure(SERIES[name], arguments.rounds)))
    text = "\n\n".join(parts)
    print(text)
    if arguments.write:
        bench.write("growth", text)


if __name__ == "__main__":
    main()
