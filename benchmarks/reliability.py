"""Print the counts of docs/reliability.md, or write them into it with ``--write``.

The counts are read from the files that networks.py, checkpoints.py, mutants.py and soak.py left in
benchmarks/results. Nothing is run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
SURVIVORS = ROOT / "benchmarks/survivors.json"
PAGE = ROOT / "docs/reliability.md"
BEGIN, END = "<!-- counts: begin -->\n", "<!-- counts: end -->\n"
N_BREAKS = 60  # breaks of the core that are wanted at least
N_NETWORKS = 500
N_CHANGES = 1000
N_SECONDS = 7200


def of_networks(found: dict) -> str:
    """Return what is known of random networks."""
    failed = len(found["failures"])
    return f"{found['networks']} of {N_NETWORKS} networks, of which {failed} fail a check"


def of_checkpoints(found: dict) -> str:
    """Return what is known of changed checkpoints."""
    equal = sum(kind.get("equal", 0) for kind in found["outcomes"].values())
    wrong = len(found["failures"])
    refused = found["changes"] - equal - wrong
    return (
        f"{found['changes']} of {N_CHANGES} changes: {refused} refused, {equal} without a "
        f"difference, {wrong} wrong"
    )


def of_mutants(rows: list[dict]) -> str:
    """Return what is known of breaks of the core."""
    explained = [
        (one["module"], one["was"], one["is"]) for one in json.loads(SURVIVORS.read_text())
    ]
    undecided = [one for one in rows if "undecided" in one]  # not all tests have run
    decided = [one for one in rows if "undecided" not in one]
    survived = [(one["module"], one["was"], one["is"]) for one in decided if one["by"] is None]
    without = [one for one in survived if one not in explained]
    return (
        f"{len(rows)} breaks of {N_BREAKS} wanted: {len(decided) - len(survived)} noticed, "
        f"{len(survived) - len(without)} that no test can notice, {len(without)} unexplained, "
        f"{len(undecided)} undecided"
    )


def of_soak(found: dict) -> str:
    """Return what is known of interrupted runs."""
    counts = found["counts"]
    signals = ", ".join(
        f"{counts.get(name, 0)} {name}" for name in ("SIGKILL", "SIGINT", "SIGTERM")
    )
    return (
        f"{found['seconds']} of {N_SECONDS} seconds: {counts.get('runs', 0)} runs with {signals}, "
        f"{len(found['problems'])} problems"
    )


def read(name: str) -> dict | list[dict] | None:
    """Return what a file of results has; None if there is none."""
    path = RESULTS / name
    if not path.exists():
        return None
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return json.loads(path.read_text())


ROWS = {
    "random networks": ("networks.json", of_networks, "make networks"),
    "changed checkpoints": ("checkpoints.json", of_checkpoints, "make fuzz"),
    "breaks of the core": ("mutants.jsonl", of_mutants, "make mutants"),
    "interrupted runs": ("soak.json", of_soak, "make soak"),
}


def table() -> str:
    """Return the counts as a table."""
    lines = ["| what | result so far | command |", "|---|---|---|"]
    for what, (name, describe, command) in ROWS.items():
        found = read(name)
        text = "no run was kept yet" if found is None else describe(found)
        lines.append(f"| {what} | {text} | `{command}` |")
    return "\n".join(lines) + "\n"


def page_with(counts: str) -> str:
    """Return the page with these counts in place of its own."""
    text = PAGE.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    return head + BEGIN + counts + END + tail


def main() -> None:
    """Print the counts, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write them into the page")
    if parser.parse_args().write:
        PAGE.write_text(page_with(table()))
    print(table(), end="")


if __name__ == "__main__":
    main()
