"""Time of a training in two processes with one thread each, beside one process with one thread.

``python benchmarks/bench_ranks.py`` measures and prints the table; ``--write`` also keeps it in
benchmarks/README.md. The clock is that on the wall, from the first epoch to the exact evidence at
the end; processes alternate, and the fastest of several rounds counts. Both cores must be idle.
Two trainings at once that know nothing of each other show what the machine itself allows: they do
twice the work of one in the time of the slower.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench

ROUNDS = 2
# name, shape and number of images, epochs
CASES = {
    "mlp": ("MLP", (1, 28, 28), 2000, 16),
    "cnn": ("CNN", (1, 28, 28), 2000, 16),
    "resnet": ("ResNet-8", (3, 32, 32), 250, 2),
}


def work(net: str, rank: int, size: int, meeting: str) -> float:
    """Train in one process, and return how long it took, in seconds."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    import laplace_invariance as li
    from laplace_invariance.experiments.learn import LEARN_NETWORKS

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if size > 1:
        dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=size)
    _, shape, n_images, n_epochs = CASES[net]
    images, labels = torch.rand(n_images, *shape), torch.randint(10, (n_images,))
    network = LEARN_NETWORKS[net](shape, 10)
    model = li.InvariantModel(network, li.AffineImage(), n_samples=8)
    loader = DataLoader(TensorDataset(images, labels), 125, shuffle=True)
    started = time.perf_counter()
    li.marglik_training(model, loader, n_epochs=n_epochs)
    return time.perf_counter() - started


def seconds(net: str, size: int, copies: int = 1) -> float:
    """Return the time of the slowest of some processes, of one training or of several alike."""
    with tempfile.TemporaryDirectory() as directory:
        meeting = str(Path(directory) / "meeting")
        commands = [
            [sys.executable, __file__, "--work", net, str(rank), str(size), meeting]
            for rank in range(size)
        ] * copies
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        processes = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            for command in commands
        ]
        outputs = [process.communicate()[0] for process in processes]
    return max(float(output.split()[-1]) for output in outputs)


def measured() -> str:
    """Return the table."""
    rows = []
    for net, (name, *_) in CASES.items():
        one, two, apart = (
            min(times) for times in zip(*(_round(net) for _ in range(ROUNDS)), strict=True)
        )
        faster = [f"{one / two:.2f}", f"{2 * one / apart:.2f}"]
        rows.append([name, f"{one:.1f} s", f"{two:.1f} s", *faster])
    heads = ["network", "one process", "two processes", "times faster", "machine's limit"]
    return bench.table(heads, rows)


def _round(net: str) -> tuple[float, float, float]:
    """Return the times of one process, of two, and of two that train apart."""
    return seconds(net, 1), seconds(net, 2), seconds(net, 1, copies=2)


def main() -> None:
    """Measure, or be one of the processes that are measured."""
    if sys.argv[1:2] == ["--work"]:
        net, rank, size, meeting = sys.argv[2:]
        print(work(net, int(rank), int(size), meeting))
        return
    text = measured()
    print(text)
    if "--write" in sys.argv:
        bench.write("ranks", text)


if __name__ == "__main__":
    main()
