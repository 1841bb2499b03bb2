"""Time of a training in two processes with one thread each, beside one process with one thread.

``python benchmarks/bench_ranks.py`` measures and prints the table; ``--write`` also keeps it in
benchmarks/README.md. The clock is that on the wall, from the first epoch to the exact evidence at
the end; processes alternate, and the fastest of several rounds counts. Both cores must be idle.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench

ROUNDS = 3
N_IMAGES = 2000
CASES = {"mlp": "MLP", "cnn": "CNN"}


def work(net: str, rank: int, size: int, meeting: str) -> float:
    """Train in one process, and return how long it took, in seconds."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    import laplace_invariance as li
    from laplace_invariance.layers import cnn, mlp

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if size > 1:
        dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=size)
    images, labels = torch.rand(N_IMAGES, 1, 28, 28), torch.randint(10, (N_IMAGES,))
    network = {"cnn": cnn, "mlp": mlp}[net]((1, 28, 28), 10)
    model = li.InvariantModel(network, li.AffineImage(), n_samples=8)
    loader = DataLoader(TensorDataset(images, labels), 125, shuffle=True)
    started = time.perf_counter()
    li.marglik_training(model, loader, n_epochs=16)
    return time.perf_counter() - started


def seconds(net: str, size: int) -> float:
    """Return the time of the slowest of some processes."""
    with tempfile.TemporaryDirectory() as directory:
        meeting = str(Path(directory) / "meeting")
        commands = [
            [sys.executable, __file__, "--work", net, str(rank), str(size), meeting]
            for rank in range(size)
        ]
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
    for net, name in CASES.items():
        best = {1: float("inf"), 2: float("inf")}
        for _ in range(ROUNDS):
            for size in best:
                best[size] = min(best[size], seconds(net, size))
        times = [f"{best[size]:.1f} s" for size in best]
        rows.append([name, *times, f"{best[1] / best[2]:.2f}"])
    return bench.table(["network", "one process", "two processes", "times faster"], rows)


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
