"""Draw random networks, check on each what must hold for all, and keep the counts.

``python benchmarks/networks.py`` draws networks from the grammar of ``tests/grammar.py``, makes the
checks of ``tests/curvature/test_random_networks.py`` on each, and writes how many of them passed,
and every network that did not as code, to benchmarks/results/networks.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from hypothesis import given, seed, settings

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/curvature")]

from grammar import Case, cases  # noqa: E402
from test_random_networks import OPTIONS, check_every_property  # noqa: E402

RESULTS = ROOT / "benchmarks/results/networks.json"
CHECKS = ("coverage", "diagonals", "engines", "gradients")


def check(n_networks: int, number: int) -> dict:
    """Check random networks.

    Args:
        n_networks: How many networks to draw.
        number: Seed of the draws.

    Returns:
        Counts, and the networks that failed.
    """
    found: dict = {"networks": 0, "failures": [], "checks": list(CHECKS), "seed": number}
    start = time.perf_counter()

    @seed(number)
    @settings(max_examples=n_networks, **OPTIONS | {"derandomize": False})
    @given(cases)
    def one(case: Case) -> None:
        found["networks"] += 1
        try:
            check_every_property(case)
        except Exception as error:
            found["failures"].append({"case": repr(case), "error": str(error)[:500]})
            print(found["failures"][-1], file=sys.stderr, flush=True)
        if found["networks"] % 25 == 0:
            seconds = time.perf_counter() - start
            print(f"{found['networks']} networks, {seconds:.0f} s", file=sys.stderr, flush=True)
            keep(found | {"seconds": round(seconds)})  # should the rest be interrupted

    one()
    return found | {"seconds": round(time.perf_counter() - start)}


def keep(found: dict) -> None:
    """Write the counts."""
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Check networks, and keep the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=500, help="number of networks")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)  # as in the tests
    found = check(arguments.networks, arguments.seed)
    keep(found)
    print(f"{len(found['failures'])} of {found['networks']} networks fail a check")


if __name__ == "__main__":
    main()
