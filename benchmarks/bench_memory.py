"""Memory of an evidence and its gradient as the data grow, with glibc's default allocator.

``python benchmarks/bench_memory.py`` measures and prints the table; ``--write`` also keeps it in
benchmarks/README.md. Each number is the peak resident memory of a fresh process.
"""

from __future__ import annotations

import sys
from functools import partial

import bench

SIZES = (2000, 8000, 32000, 60000)
N_SAMPLES = 4
STOCHASTIC = {"stochastic": True, "num_samples": 1}
CALLS = {
    "stock_peak": "`Laplace.fit` and `log_marginal_likelihood().backward()`",
    "training_peak": "`li.marglik_training`, one epoch, one estimate",
}

fresh = partial(bench.fresh, module="bench_memory", allocator={})


def prepared(n: int) -> tuple:
    """Return a model with two small convolutions, and a loader of random images."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import laplace_invariance as li

    torch.manual_seed(0)
    torch.set_num_threads(2)
    model = li.InvariantModel(bench.conv_net(1, 28), li.AffineImage(init=0.1), N_SAMPLES)
    data = TensorDataset(torch.rand(n, 1, 28, 28), torch.randint(bench.CLASSES, (n,)))
    return model, DataLoader(data, batch_size=bench.BATCH)


def stock_peak(n: int) -> float:
    """Fit ``n`` images by stock Laplace, differentiate its evidence, and return the peak in MB."""
    from laplace import Laplace

    from laplace_invariance.curvature import AugmentedGGN

    model, loader = prepared(n)
    la = Laplace(
        model,
        "classification",
        subset_of_weights="all",
        hessian_structure="kron",
        backend=AugmentedGGN,
        backend_kwargs=STOCHASTIC,
    )
    la.fit(loader)
    la.log_marginal_likelihood().backward()
    return bench.peak()


def training_peak(n: int) -> float:
    """Train on ``n`` images for one epoch, with one estimate, and return the peak in MB."""
    import laplace_invariance as li

    model, loader = prepared(n)
    li.marglik_training(model, loader, n_epochs=1, backend_kwargs=STOCHASTIC)
    return bench.peak()


def data_size(n: int) -> float:
    """Return the size of ``n`` images and labels in MB."""
    return n * (28 * 28 * 4 + 8) / 1e6


def beyond_data(sizes: list[int], peaks: list[float]) -> list[float]:
    """Return how far each peak grew over the first, less what the data grew, in MB."""
    first = peaks[0] - data_size(sizes[0])
    return [peak - data_size(n) - first for n, peak in zip(sizes, peaks, strict=True)]


def numbers(values: list[float]) -> list[str]:
    """Return values in whole MB."""
    return [f"{value:.0f}" for value in values]


def rows(call: str, sizes: list[int]) -> list[list[str]]:
    """Measure one call at all sizes; return its peaks and their growth."""
    peaks = []
    for n in sizes:
        print(f"{call}({n}) ...", file=sys.stderr, flush=True)
        peaks.append(fresh(f"{call}({n})"))
    return [
        [f"{CALLS[call]}: peak", *numbers(peaks)],
        ["growth beyond that of the data", *numbers(beyond_data(sizes, peaks))],
    ]


def main() -> None:
    """Measure, print the table, and write it if asked to."""
    options = bench.parser(__doc__, rounds=None)
    options.add_argument("--sizes", nargs="*", type=int, default=list(SIZES))
    arguments = options.parse_args()
    sizes = arguments.sizes
    lines = [["the data", *numbers([data_size(n) for n in sizes])]]
    for call in CALLS:
        lines += rows(call, sizes)
    header = ["MB", *(f"N = {n}" for n in sizes)]
    text = (
        f"Two small convolutions, 28 x 28, S = {N_SAMPLES}, batches of {bench.BATCH}, "
        f"`stochastic=True, num_samples=1`.\n\n{bench.table(header, lines)}"
    )
    print(text)
    if arguments.write:
        bench.write("memory", text)


if __name__ == "__main__":
    main()
