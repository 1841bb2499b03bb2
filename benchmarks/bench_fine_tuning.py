"""What fine-tuning a network that was trained before learns: example 10, on two kinds of images.

``python benchmarks/bench_fine_tuning.py`` runs what is missing, and writes one file per case to
benchmarks/results/fine_tuning; ``--table`` prints the tables of what is there, and ``--write``
keeps them in docs/fine-tuning.md.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench

EXAMPLE = bench.ROOT / "examples/10_fine_tuning.py"
RESULTS = bench.ROOT / "benchmarks/results/fine_tuning"
DATA = bench.ROOT.parent / "shared/data"
CASES = {
    "digits": "",
    "digits_1": "--seed 1",
    "mnist": f"--data {DATA / 'mnist.npz'} --pretrain {DATA / 'fashion_mnist.npz'} "
    "--train 1000 --test 1000 --epochs 12 --pretrain-epochs 4",
}


def example() -> dict[str, Any]:
    """Return the names of the example."""
    return runpy.run_path(str(EXAMPLE))


def run(case: str) -> None:
    """Run the example with the options of a case, and keep its result."""
    with tempfile.TemporaryDirectory() as out:
        example()["main"]([*CASES[case].split(), "--out", out])
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{case}.json").write_text((Path(out) / "results.json").read_text())


def tables() -> str:
    """Return a table per case that has a result."""
    parts = []
    for case in CASES:
        path = RESULTS / f"{case}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        parts.append(
            f"{found['n_train']} images of {found['data']}, rotated by up to "
            f"{found['degrees']:.0f} degrees, after training on {found['pretrained_on']}; "
            f"{found['n_epochs']} epochs,\n{found['n_samples']} samples, "
            f"{found['n_test']} test images, seed {found['seed']}:"
        )
        parts.append(example()["table"](found["results"]))
    return "\n\n".join(parts)


def main() -> None:
    """Run what is missing, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--table", action="store_true", help="print the tables, train nothing")
    parser.add_argument("--write", action="store_true", help="keep them in docs/fine-tuning.md")
    arguments = parser.parse_args()
    if not arguments.table:
        for case in arguments.cases:
            if not (RESULTS / f"{case}.json").exists():
                run(case)
    text = tables()
    if not text:
        sys.exit("there is no result yet")
    print(text)
    if arguments.write:
        bench.write("fine tuning", text, "docs/fine-tuning.md")


if __name__ == "__main__":
    main()
