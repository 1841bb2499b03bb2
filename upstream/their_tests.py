"""Run the tests of a checkout of laplace-torch with our backends in the place of its own.

Lists every test that passes with laplace's own backends and fails with ours, with the reason, and
fails if one has none. Backends are substituted where a test leaves the backend to laplace
(``default``), or also where a test imports one (``all``). The tests run against the laplace-torch
that is installed.

    git clone https://github.com/aleximmer/Laplace
    python upstream/their_tests.py Laplace
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from plugin import ENGINES, SUBSTITUTES
from suite import ROOT, Outcome, broken, counts, prepare, replace_table, run

RESULTS = ROOT / "upstream/results/their_tests.json"
PAGE = ROOT / "docs/laplace.md"

# Why tests fail with our backends, by what their names match
REASONS = {
    r"test_(online|overriding)_fit#": (
        "the test asks for `type(la.H) is KronDecomposed`; ours is a subclass, for which "
        "`isinstance` holds"
    ),
    r"test_functional_laplace": (
        "`FunctionalLaplace` accepts laplace-torch's own classes only, by an assertion"
    ),
    r"test_dtype": (
        "ours refuses weights in half precision, in which an evidence is off by many nats"
    ),
    r"test_dict_data": (
        "the test expects an error, as `CurvlinopsEF` has no diagonal on mappings; ours has"
    ),
    r"test_incompatible_backend": (
        "the test expects an error, as BackPACK needs all parameters to require grad; ours does not"
    ),
    r"test_(kron|full)_ggn_(set_kfac_approx|stochastic)": (
        "the test passes keyword arguments of curvlinops to `kron` or `full`, which ours has as "
        "options of the backend"
    ),
    r"test_complex_diag_ggn_stoch_cls": (
        "one random direction per input: unbiased as laplace-torch's sampled labels are, with more "
        "variance for two classes; give `num_samples`"
    ),
}


def reason_of(test: str) -> str | None:
    """Return why a test fails with our backends, None if that is not known."""
    for pattern, reason in REASONS.items():
        if re.search(pattern, test):
            return reason
    return None


def compare(name: str, theirs: Sequence[Outcome], ours: Sequence[Outcome]) -> dict:
    """Return counts of a run, its files, and the tests that fail with ours only, by reason."""
    failures: dict[str, list[str]] = {}
    for one in broken(theirs, ours):
        reason = reason_of(one.test) or f"unknown: {one.message}"
        failures.setdefault(reason, []).append(one.test)
    files = sorted({one.test.partition("::")[0] for one in ours})
    return {"run": name, "files": files, "counts": counts(ours), "failures": failures}


def with_earlier(results: Sequence[dict]) -> list[dict]:
    """Return results with those of other runs that were written before, of the same files."""
    found = {one["run"]: one for one in results}
    if RESULTS.exists():
        for one in json.loads(RESULTS.read_text()):
            if one["files"] == results[0]["files"]:
                found.setdefault(one["run"], one)
    return list(found.values())


def described(outcomes: dict[str, int]) -> str:
    """Return counts in words."""
    return ", ".join(f"{n} {how}" for how, n in outcomes.items())


def table(results: Sequence[dict]) -> str:
    """Return the counts of all runs, and what fails with ours, as two tables."""
    lines = ["| backends | files | tests | fail with ours only |", "|---|---|---|---|"]
    reasons: dict[str, dict[str, int]] = {}
    for found in results:
        n_failed = sum(map(len, found["failures"].values()))
        shown = "" if found["run"] == "laplace-torch's own" else n_failed
        ended = described(found["counts"])
        lines.append(f"| {found['run']} | {len(found['files'])} | {ended} | {shown} |")
        for reason, tests in found["failures"].items():
            for test in tests:
                function = test.partition("::")[2].partition("#")[0]
                largest = reasons.setdefault(reason, {})
                largest[function] = max(largest.get(function, 0), _n_of(function, tests))
    lines += ["", "| test | at most | why it fails with ours |", "|---|---|---|"]
    for reason, functions in reasons.items():
        for function, n in functions.items():
            lines.append(f"| `{function}` | {n} | {reason} |")
    return "\n".join(lines) + "\n"


def _n_of(function: str, tests: Sequence[str]) -> int:
    return sum(f"::{function}#" in test for test in tests)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="checkout with the tests")
    parser.add_argument("--engines", nargs="*", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--substitute", nargs="*", choices=SUBSTITUTES, default=["default"])
    parser.add_argument("--tests", nargs="*", default=["tests"], help="files of the checkout's")
    parser.add_argument("--skip", default="large_init", help="names of tests that are left out")
    parser.add_argument("--reports", type=Path, help="where outcomes are kept; runs there stay")
    parser.add_argument("--write", action="store_true", help="write tables into docs/laplace.md")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything, print tables, and return 1 if a test fails without a reason."""
    options = parsed(arguments)
    chosen = [*options.tests, "-k", f"not ({options.skip})"]
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "place"
        prepare(place, options.checkout / "tests")
        reports = options.reports or Path(name) / "reports"
        theirs = run(place, reports / "stock.jsonl", chosen)
        results = [compare("laplace-torch's own", theirs, theirs)]
        for substitute in options.substitute:
            for engine in options.engines:
                flags = ["--engine", engine, "--substitute", substitute]
                ours = run(place, reports / f"{engine}-{substitute}.jsonl", [*chosen, *flags])
                results.append(compare(f"{engine}, {substitute}", theirs, ours))
    print(table(results), end="")
    if options.write:
        results = with_earlier(results)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(replace_table(PAGE, "their tests", table(results)))
    unknown = [reason for one in results for reason in one["failures"] if "unknown" in reason]
    return int(bool(unknown))


if __name__ == "__main__":
    sys.exit(main())
