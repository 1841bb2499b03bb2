"""Interrupt and resume runs of ``learn`` for hours, and check that nothing is lost.

``python benchmarks/soak.py --seconds 7200`` trains networks, each once undisturbed and then again
and again under SIGKILL, SIGINT and SIGTERM at random moments, with little more memory than the
undisturbed run took. Every interrupted run is resumed until it has ended, and must then have the
same files as the undisturbed one: weights, ranges and evidence bit for bit, and a history without a
lost or doubled line. The counts go to benchmarks/results/soak.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laplace_invariance.experiments.learn import LearnConfig, learn

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/soak.json"
SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
COMMON = {
    "data": "digits",
    "transform": "fully_rotated",
    "n_train": 200,
    "n_test": 50,
    "n_samples": 3,
}
CONFIGURATIONS = {
    "running": LearnConfig(**COMMON, n_epochs=20, search="off"),
    "search": LearnConfig(**COMMON, n_epochs=20, search="on", learn=("rotation",)),
    "refit": LearnConfig(**COMMON, n_epochs=12, search="off", estimator="refit"),
    "Augerino": LearnConfig(**COMMON, n_epochs=20, method="augerino"),
}
TIMES = ("seconds", "time")  # which differ from run to run
MORE = 1.15  # memory of a resumed run, at most, by that of the undisturbed one
ROOM = 64 << 20  # bytes of memory that any run may take in addition
INTERVAL = 0.02  # seconds between looks at a process


@dataclass
class Watched:
    """What was seen of a process.

    Attributes:
        exit_code: Its exit code, negative for a signal.
        seconds: How long it lived.
        resident: Most resident memory at each number of lines in its history, in bytes.
        data: Most writable memory, in bytes, which is what RLIMIT_DATA limits.
    """

    exit_code: int
    seconds: float
    resident: dict[int, int]
    data: int

    @property
    def peak(self) -> int:
        """Most resident memory, in bytes."""
        return max(self.resident.values(), default=0)


def start(config: LearnConfig, out: Path, limit: int | None) -> int:
    """Start or resume a run in a fork of this process; return its number."""
    child = os.fork()
    if child:
        return child
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed(0)  # which a fork seeds from the system, and checkpoints keep
    code = 1
    try:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        with (out.parent / "messages").open("a") as messages:
            os.dup2(messages.fileno(), 1)
            os.dup2(messages.fileno(), 2)
        learn(config, out, resume=True)
        code = 0
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def watch(child: int, out: Path, sent: signal.Signals | None, moment: float) -> Watched:
    """Look at a process until it ends, and send it a signal after some seconds."""
    begin = time.perf_counter()
    resident: dict[int, int] = {}
    data = 0
    while True:
        memory = memory_of(child)
        lines = n_lines(out / "history.jsonl")
        resident[lines] = max(resident.get(lines, 0), memory.get("VmRSS", 0))
        data = max(data, memory.get("VmData", 0))
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return Watched(code, time.perf_counter() - begin, resident, data)
        if sent is not None and time.perf_counter() - begin > moment:
            os.kill(child, sent)
            sent = None
        time.sleep(INTERVAL)


def memory_of(process: int) -> dict[str, int]:
    """Return the memory of a process in bytes, as Linux reports it."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = [line.split() for line in lines if line.startswith(("VmRSS", "VmData"))]
    return {name.rstrip(":"): int(size) << 10 for name, size, _ in pairs}


def n_lines(path: Path) -> int:
    """Return the number of lines of a file, 0 if there is none."""
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


def without_times(value: Any) -> Any:
    """Return a value without the entries that say how long something took."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not any(word in str(k) for word in TIMES)}
        return {key: without_times(item) for key, item in kept.items()}
    if isinstance(value, list | tuple):
        return [without_times(item) for item in value]
    return value


def outcome(out: Path) -> dict[str, Any]:
    """Return all that a finished run must share with the undisturbed one."""
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    return {
        "files": sorted(path.name for path in out.iterdir()),
        "model": torch.load(out / "model.pt", weights_only=True),
        "checkpoint": without_checksum(torch.load(out / "checkpoint.pt", weights_only=True)),
        "summary": without_times(json.loads((out / "summary.json").read_text())),
        "history": without_times(history),
        "epochs": [record["epoch"] for record in history],
    }


def without_checksum(state: dict) -> dict:
    """Return a checkpoint without times, and without the checksum, which covers them."""
    return without_times({key: item for key, item in state.items() if key != "checksum"})


def differences(found: Any, wanted: Any, where: str = "") -> list[str]:
    """Return the places at which two values differ in any bit."""
    if isinstance(wanted, torch.Tensor):
        same = isinstance(found, torch.Tensor) and found.dtype == wanted.dtype
        equal = same and found.shape == wanted.shape and bool((bits(found) == bits(wanted)).all())
        return [] if equal else [where]
    if isinstance(wanted, dict) and isinstance(found, dict) and list(found) == list(wanted):
        return [place for k in wanted for place in differences(found[k], wanted[k], f"{where}.{k}")]
    if isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        pairs = enumerate(zip(found, wanted, strict=True))
        return [place for i, pair in pairs for place in differences(*pair, f"{where}.{i}")]
    return [] if repr(found) == repr(wanted) else [where]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def broken_lines(path: Path) -> list[str]:
    """Return what is wrong with the history of an interrupted run; its last line may be cut."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    epochs = [json.loads(line)["epoch"] for line in lines]
    expected = list(range(epochs[0], epochs[0] + len(epochs))) if epochs else []
    return [] if epochs == expected else [f"{path.name} has epochs {epochs}"]


class Soak:
    """Runs that are interrupted, and what was seen of them.

    Args:
        place: Directory of the runs.
        seed: Seed of moments and signals.
    """

    def __init__(self, place: Path, seed: int) -> None:
        self._place = place
        self._source = random.Random(seed)
        self._whole: dict[str, tuple[dict, Watched]] = {}
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.growth: dict[str, float] = {}

    def undisturbed(self, name: str) -> tuple[dict, Watched]:
        """Return the outcome of a run that is left alone, and what was seen of it."""
        if name not in self._whole:
            out = self._place / f"whole {name}" / "run"
            out.parent.mkdir()
            seen = watch(start(CONFIGURATIONS[name], out, None), out, None, 0.0)
            if seen.exit_code:
                raise RuntimeError((out.parent / "messages").read_text())
            self._whole[name] = outcome(out), seen
            self.growth[f"{name}, over epochs"] = round(growth_over_epochs(seen), 3)
        return self._whole[name]

    def disturbed(self, name: str, number: int) -> None:
        """Interrupt and resume a run until it ends, and compare it with the undisturbed one."""
        wanted, whole = self.undisturbed(name)
        out = self._place / f"{number} {name}" / "run"
        out.parent.mkdir()
        limit = int(MORE * whole.data) + ROOM
        sent: signal.Signals | None = None
        while True:
            # Now and then a run is left alone, so that each ends at some time.
            sent = self._source.choice((*SIGNALS, *SIGNALS, None))
            moment = self._source.uniform(0, 0.6 * whole.seconds)
            seen = watch(start(CONFIGURATIONS[name], out, limit), out, sent, moment)
            self.counts["starts"] += 1
            self._check_memory(name, seen, whole)
            self._note(broken_lines(out / "history.jsonl"), name, number)
            if seen.exit_code == 0:
                break
            if sent is None or seen.exit_code not in (-sent, 128 + sent):
                text = (out.parent / "messages").read_text()[-2000:]
                self._note([f"ended with {seen.exit_code} after {sent}: {text}"], name, number)
                return
            self.counts[sent.name] += 1
        self.counts["runs"] += 1
        self.counts["epochs"] += len(wanted["epochs"])
        self._note(differences(outcome(out), wanted), name, number)

    def summary(self, seconds: float) -> dict:
        """Return counts, growth of memory and problems, after some seconds."""
        grown = {name: share for name, share in self.growth.items() if share > MORE}
        problems = [f"{name}: memory grows by a factor of {x}" for name, x in grown.items()]
        return {
            "seconds": round(seconds),
            "counts": dict(sorted(self.counts.items())),
            "growth": dict(sorted(self.growth.items())),
            "problems": self.problems + problems,
        }

    def _note(self, problems: list[str], name: str, number: int) -> None:
        self.problems += [f"{name}, run {number}: {problem}" for problem in problems]

    def _check_memory(self, name: str, seen: Watched, whole: Watched) -> None:
        key = f"{name}, over resumptions"
        share = seen.peak / whole.peak
        self.growth[key] = max(self.growth.get(key, 0.0), round(share, 3))
        if seen.peak > MORE * whole.peak + ROOM:
            self.problems.append(f"{name}: {seen.peak} bytes, undisturbed {whole.peak}")


def growth_over_epochs(seen: Watched) -> float:
    """Return the memory of the last quarter of the epochs by that of the second quarter."""
    last = max(seen.resident)
    early = [size for line, size in seen.resident.items() if last / 4 <= line < last / 2]
    late = [size for line, size in seen.resident.items() if 3 * last / 4 <= line < last]
    return max(late, default=0) / max(early, default=1)


def soak(
    seconds: float,
    seed: int = 0,
    names: tuple[str, ...] = tuple(CONFIGURATIONS),
    keep: Callable[[dict], object] | None = None,
) -> dict:
    """Interrupt and resume runs for some time.

    Args:
        seconds: How long; the last run is finished.
        seed: Seed of moments and signals.
        names: Configurations, which take turns.
        keep: Called with what is known after each run.

    Returns:
        Counts, growth of memory, and problems, of which there should be none.
    """
    begin = time.perf_counter()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        found = Soak(Path(directory), seed)
        number = 0
        while number < len(names) or time.perf_counter() - begin < seconds:
            found.disturbed(names[number % len(names)], number)
            number += 1
            print(dict(found.counts), found.problems, file=sys.stderr, flush=True)
            if keep is not None:
                keep(found.summary(time.perf_counter() - begin))
    return found.summary(time.perf_counter() - begin)


def write(found: dict) -> None:
    """Write what is known."""
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Interrupt runs, and keep the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=7200, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="seed of moments and signals")
    arguments = parser.parse_args()
    found = soak(arguments.seconds, arguments.seed, keep=write)
    print(json.dumps(found, indent=1))
    sys.exit(bool(found["problems"]))


if __name__ == "__main__":
    main()
