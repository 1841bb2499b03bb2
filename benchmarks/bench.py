"""Time and memory of curvature and of its gradient, as multiples of one training step.

``python benchmarks/bench.py`` measures and prints tables; ``--write`` also keeps them in
benchmarks/README.md. Ratios are measured side by side in one process on the same batch, as the
minimum of several rounds; memory is measured in a fresh process each, as peak above the start.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# glibc returns large blocks to the system, and the page faults then cost up to 3.5 times the work.
# The same settings hold for all that is compared.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
BATCH, CLASSES = 100, 10
NETWORKS = ("MLP", "LeNet", "LeNet-ReLU")
SAMPLES = (1, 8, 31)
VARIANTS = ("GGN, exact", "GGN, output_rank=2", "EF")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a checkout measures itself, whichever one is installed


def network(name: str):
    """Return an untrained network, one of ``NETWORKS``."""
    from torch import nn

    if name == "MLP":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, 1000), nn.Tanh(), nn.Linear(1000, CLASSES)
        )
    activation = nn.ReLU if name == "LeNet-ReLU" else nn.Tanh
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        activation(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        activation(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        activation(),
        nn.Linear(120, 84),
        activation(),
        nn.Linear(84, CLASSES),
    )


def conv_net(channels: int, size: int, n_classes: int = CLASSES):
    """Return two convolutions of 8 and 16 channels, each with ReLU and pooling, and a linear layer.

    Args:
        channels: Number of channels of the images.
        size: Height and width of the images.
        n_classes: Number of classes.
    """
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (size // 4) ** 2, n_classes),
    )


def setting(name: str, n_samples: int):
    """Return a model with moderately confident predictions, and a batch."""
    import torch

    import laplace_invariance as li

    torch.manual_seed(0)
    torch.set_num_threads(2)
    model = li.InvariantModel(network(name), li.AffineImage(init=0.1), n_samples)
    x, y = torch.rand(BATCH, 1, 28, 28), torch.randint(CLASSES, (BATCH,))
    return model, x, y


def backend(variant: str, model):
    """Return the backend of a variant, one of ``VARIANTS``."""
    from laplace_invariance.curvature import AugmentedEF, AugmentedGGN

    if variant == "EF":
        return AugmentedEF(model, "classification")
    if variant == "GGN, output_rank=2":
        return AugmentedGGN(model, "classification", output_rank=2)
    return AugmentedGGN(model, "classification")


def outputs_of(loss, kron) -> list:
    """Return all that a backend computes for a batch: the loss and every Kronecker factor."""
    outputs = [loss]
    for factors in kron.kfacs:
        outputs += factors
    return outputs


def steps(name: str, n_samples: int) -> dict[str, Callable[[], object]]:
    """Return the functions to time, by name; the first is the unit."""
    model, x, y = setting(name, n_samples)
    model.eval()
    result = {"forward + backward": training_step(model, [(x, y)])}
    for variant in VARIANTS:
        result |= curvature_steps(variant, backend(variant, model), model, [(x, y)])
    return result


def training_step(model, batches: list[tuple]) -> Callable[[], object]:
    """Return a function that runs a model forward and backward on every batch."""
    import torch

    def training() -> None:
        for x, y in batches:
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()

    return training


def curvature_steps(
    label: str, curvature, model, batches: list[tuple]
) -> dict[str, Callable[[], object]]:
    """Return functions that compute the factors of all batches, and their gradient in ``eta``.

    Args:
        label: What the names of the functions begin with.
        curvature: Backend that computes the factors.
        model: Model of the backend, with an augmentation.
        batches: Inputs and targets of each batch.
    """
    import torch

    n = sum(len(y) for _, y in batches)

    def factors() -> list:
        total: list = []
        for x, y in batches:
            found = outputs_of(*curvature.kron(x, y, N=n))
            total = list(map(torch.add, total, found)) if total else found
        return total

    outputs = factors()
    weights = cotangents(outputs)

    def gradient() -> None:
        torch.autograd.grad(outputs, model.augmentation.eta, weights)

    return {f"{label}: kron": factors, f"{label}: gradient": gradient}


def cotangents(outputs: list) -> list:
    """Return random weights of all outputs, symmetric like the outputs and marked as such.

    Those of the log determinant are, too.
    """
    import torch

    from laplace_invariance.curvature import kfac

    mark = getattr(kfac, "mark_symmetric", lambda matrix: matrix)
    weights = []
    for output in outputs:
        weight = torch.randn_like(output)
        if weight.ndim >= 2:
            weight = mark(weight + weight.mT)
        weights.append(weight)
    return weights


def times(name: str, n_samples: int, rounds: int) -> dict[str, float]:
    """Return the smallest time of each step in seconds, over rounds in which all alternate."""
    return fastest(steps(name, n_samples), rounds)


def fastest(
    measured: dict[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the smallest time of each function in seconds, over rounds in which all alternate."""
    best = dict.fromkeys(measured, float("inf"))
    for _ in range(rounds):
        for label, step in measured.items():
            best[label] = min(best[label], seconds_of(step, clock))
    return best


def seconds_of(step: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return how long a function takes by a clock, in seconds."""
    start = clock()
    step()
    return clock() - start


def fastest_alone(measured: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return what :func:`fastest` does, with one thread and in its CPU time.

    Other processes of the machine disturb this clock less than that on the wall.
    """
    import torch

    torch.set_num_threads(1)
    return fastest(measured, rounds, time.thread_time)


def resident() -> float:
    """Return the resident memory of this process in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def peak() -> float:
    """Return the largest resident memory of this process so far in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def memory(name: str, n_samples: int, step: str) -> float:
    """Return the peak memory of one step above the start, in MB."""
    import torch

    model, x, y = setting(name, n_samples)
    model.eval()
    variant, _, what = step.partition(": ")
    curvature = backend(variant, model)  # before the start, since it imports
    start = resident()
    if step == "forward + backward":
        torch.nn.functional.cross_entropy(model(x), y).backward()
        return peak() - start
    outputs = outputs_of(*curvature.kron(x, y, N=BATCH))
    if what == "gradient":
        weights = [torch.ones_like(output) for output in outputs]
        torch.autograd.grad(outputs, model.augmentation.eta, weights)
    return peak() - start


def evidence_memory(n: int) -> float:
    """Fit ``n`` images, differentiate the evidence, and return the peak memory in MB."""
    import torch
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    from laplace_invariance.curvature import AugmentedGGN

    model, _, _ = setting("LeNet", 8)
    data = TensorDataset(torch.rand(n, 1, 28, 28), torch.randint(CLASSES, (n,)))
    la = Laplace(
        model,
        "classification",
        subset_of_weights="all",
        hessian_structure="kron",
        backend=AugmentedGGN,
    )
    la.fit(DataLoader(data, batch_size=BATCH))
    la.log_marginal_likelihood().backward()
    return peak()


def fresh(call: str, module: str = "bench", allocator: dict[str, str] = ALLOCATOR) -> object:
    """Return the value of a call to this or another module, in a fresh process.

    Args:
        call: Call of a function of the module, as it is written in Python.
        module: Name of a module in this directory.
        allocator: Variables that set glibc's allocator; without any it has its defaults.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    lines = [
        "import json, sys, warnings",
        "warnings.simplefilter('ignore')",
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})",
        f"import {module}",
        f"print('RESULT ' + json.dumps({module}.{call}))",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env=inherited | allocator,
        capture_output=True,
        text=True,
        check=False,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not results:
        raise RuntimeError(f"{call} failed:\n{done.stderr}")
    return json.loads(results[-1].removeprefix("RESULT "))


def restart_with_allocator() -> None:
    """Start this program again with the allocator set as in ``ALLOCATOR``, unless it is."""
    if not ALLOCATOR.items() <= os.environ.items():
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, os.environ | ALLOCATOR)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def multiple(seconds: float, unit: float, is_unit: bool = False) -> str:
    """Return a time as a multiple of the unit, with the time itself; of the unit only that."""
    time_itself = f"{seconds * 1e3:.0f} ms"
    if seconds < 0.01:
        time_itself = f"{seconds * 1e3:.1f} ms"
    if is_unit:
        return time_itself
    return f"{seconds / unit:.2f}x ({time_itself})"


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the least-squares slope of values in sizes, both by their logarithms."""
    return statistics.linear_regression(
        [math.log(size) for size in sizes], [math.log(value) for value in values]
    ).slope


def curvature_tables(rounds: int, networks: tuple[str, ...], samples: tuple[int, ...]) -> str:
    """Measure time and memory of all steps, and return them as tables."""
    cells = [(name, n) for name in networks for n in samples]
    seconds, megabytes = {}, {}
    for name, n in cells:
        print(f"timing {name}, S = {n} ...", file=sys.stderr, flush=True)
        seconds[name, n] = fresh(f"times({name!r}, {n}, {rounds})")
        for label in seconds[name, n]:
            megabytes[name, n, label] = fresh(f"memory({name!r}, {n}, {label!r})")
    labels = list(seconds[cells[0]])
    header = ["", *(f"{name}, S = {n}" for name, n in cells)]
    rows = []
    for label in labels:
        row = [label]
        for cell in cells:
            unit = seconds[cell][labels[0]]
            row.append(multiple(seconds[cell][label], unit, label == labels[0]))
        rows.append(row)
    memories = [
        [label, *(f"{megabytes[(*cell, label)]:.0f}" for cell in cells)] for label in labels
    ]
    return "\n\n".join(
        [
            "Time, as a multiple of one forward + backward:",
            table(header, rows),
            "Peak memory above the start, MB:",
            table(header, memories),
        ]
    )


def evidence_table() -> str:
    """Measure the memory of an evidence and its gradient for two data sets, and return a table."""
    sizes = (2000, 8000)
    values = []
    for n in sizes:
        print(f"memory of fit + backward, N = {n} ...", file=sys.stderr, flush=True)
        values.append(fresh(f"evidence_memory({n})"))
    header = ["LeNet, S = 8, batches of 100", *(f"N = {n}" for n in sizes), "ratio"]
    cells = [*(f"{value:.0f}" for value in values), f"{values[1] / values[0]:.3f}"]
    return table(header, [["peak resident memory, MB", *cells]])


def parser(description: str, rounds: int | None = 7) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have; None is one without rounds."""
    made = argparse.ArgumentParser(description=description)
    if rounds is not None:
        made.add_argument(
            "--rounds", type=int, default=rounds, help="rounds of which the minimum is taken"
        )
    made.add_argument(
        "--write", action="store_true", help="replace the tables in benchmarks/README.md"
    )
    return made


def main() -> None:
    """Measure, print the tables, and write them if asked to."""
    options = parser(__doc__)
    options.add_argument("--networks", nargs="*", default=["MLP", "LeNet"], choices=NETWORKS)
    options.add_argument("--samples", nargs="*", type=int, default=list(SAMPLES))
    arguments = options.parse_args()
    import torch

    tables = "\n\n".join(
        [
            f"torch {torch.__version__}, {platform.machine()}, two threads, batch {BATCH}, "
            f"C = {CLASSES}, 28 x 28, minimum of {arguments.rounds} rounds,\n"
            "malloc set as in `benchmarks/bench.py` for all.",
            curvature_tables(arguments.rounds, tuple(arguments.networks), tuple(arguments.samples)),
            "Memory of `fit` + `log_marginal_likelihood().backward()`, whole processes:",
            evidence_table(),
        ]
    )
    print(tables)
    if arguments.write:
        write("tables", tables)


def write(name: str, text: str, file: str = "benchmarks/README.md") -> None:
    """Put a text between the marks of that name in a page, by default benchmarks/README.md."""
    page = ROOT / file
    before, start, rest = page.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not (start and end):
        raise ValueError(f"{file} has no marks <!-- {name} --> and <!-- end of {name} -->")
    page.write_text(f"{before}{start}{text}\n{end}{after}")


if __name__ == "__main__":
    main()
