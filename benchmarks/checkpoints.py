"""Change checkpoints in a thousand ways, resume from each, and keep the counts.

``python benchmarks/checkpoints.py`` makes the checks of ``tests/marglik/test_checkpoint_fuzz.py``:
a changed checkpoint is refused, with model and file left as they were, or makes no difference. The
counts of what each kind of change ended in go to benchmarks/results/checkpoints.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/marglik")]

from test_checkpoint_fuzz import N_FUZZED, fuzz, make_whole  # noqa: E402

RESULTS = ROOT / "benchmarks/results/checkpoints.json"
STEP = 50  # changes after which counts are kept


def keep(outcomes: Counter, failures: list[str]) -> None:
    """Write the counts."""
    kinds: dict[str, dict[str, int]] = {}
    for (mutation, outcome), n in sorted(outcomes.items()):
        kinds.setdefault(mutation, {})[outcome] = n
    found = {"changes": outcomes.total(), "outcomes": kinds, "failures": failures}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(failures)} of {outcomes.total()} changes went wrong", file=sys.stderr, flush=True)


def main() -> None:
    """Change checkpoints, and keep the counts."""
    torch.set_default_dtype(torch.float64)  # as in the tests
    outcomes: Counter = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        whole = make_whole(Path(name))
        directory = Path(name) / "runs"
        directory.mkdir()
        for start in range(0, N_FUZZED, STEP):
            numbers = range(start, min(start + STEP, N_FUZZED))
            more, wrong = fuzz(numbers, directory, whole)
            outcomes += more
            failures += wrong
            keep(outcomes, failures)  # should the rest be interrupted


if __name__ == "__main__":
    main()
