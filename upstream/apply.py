"""Apply the change to a copy of laplace-torch 0.3, and run its tests before and after.

The source is that of the release's sdist, the tests are those of a checkout of its repository,
which the sdist lacks. Both are copied and left alone. Each part of the change is applied alone for
its new tests, and all together for the tests of the checkout:

    pip download --no-deps --no-binary laplace-torch laplace-torch==0.3
    git clone https://github.com/aleximmer/Laplace
    python upstream/apply.py laplace_torch-0.3.tar.gz Laplace
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from edits import Part, apply_part
from parts import differentiable_fit, named_backends, noise_gradient
from suite import ROOT, broken, counts, prepare, replace_table, run

PARTS = [noise_gradient.PART, named_backends.PART, differentiable_fit.PART]
RESULTS = ROOT / "upstream/results/changes.json"
PAGE = ROOT / "upstream/README.md"


def unpack(sdist: Path, directory: Path) -> Path:
    """Unpack a sdist, or copy an unpacked one, and return the tree that ``laplace/`` is in."""
    if sdist.is_dir():
        shutil.copytree(sdist / "laplace", directory / "source/laplace")
    else:
        with tarfile.open(sdist) as archive:
            archive.extractall(directory / "source", filter="data")
    (package,) = (directory / "source").rglob("laplace/__init__.py")
    return package.parents[1]


def changed(tree: Path, parts: Sequence[Part], directory: Path) -> Path:
    """Return a copy of a source tree with some parts applied."""
    shutil.copytree(tree / "laplace", directory / "laplace")
    for part in parts:
        apply_part(part, directory)
    return directory / "laplace"


def tests_of(parts: Sequence[Part], directory: Path) -> Path:
    """Return a directory with the new tests of some parts."""
    directory.mkdir(parents=True)
    for part in parts:
        for test in part.tests:
            shutil.copy(test, directory)
    return directory


class Trial:
    """Runs of tests on the source before and after the change.

    Args:
        tree: Source tree of laplace-torch.
        directory: Where copies are made.
        reports: Where outcomes are kept; runs that are there already are not repeated.
    """

    def __init__(self, tree: Path, directory: Path, reports: Path) -> None:
        self._tree = tree
        self._directory = directory
        self._reports = reports

    def before_and_after(
        self, name: str, tests: Path, parts: Sequence[Part], arguments: Sequence[str] = ()
    ) -> dict:
        """Run tests without and with some parts, and return counts and what the parts broke."""
        found = []
        for state, applied in {"before": [], "after": parts}.items():
            place = self._directory / f"{name}-{state}"
            source = changed(self._tree, applied, self._directory / f"{name}-{state}-source")
            prepare(place, tests, source)
            report = self._reports / f"{name}-{state}.jsonl"
            found.append(run(place, report, arguments))
        before, after = found
        return {
            "files": sorted({one.test.partition("::")[0] for one in after}),
            "before": counts(before),
            "after": counts(after),
            "broken": [one.id for one in broken(before, after)],
        }


def table(results: dict[str, dict]) -> str:
    """Return the counts as a table."""
    lines = ["| tests | files | before | after | broken |", "|---|---|---|---|---|"]
    for name, found in results.items():
        before, after = (
            ", ".join(f"{n} {how}" for how, n in found[state].items())
            for state in ("before", "after")
        )
        n_files, n_broken = len(found["files"]), len(found["broken"])
        lines.append(f"| {name} | {n_files} | {before} | {after} | {n_broken} |")
    return "\n".join(lines) + "\n"


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sdist", type=Path, help="laplace_torch-0.3.tar.gz, or its directory")
    parser.add_argument("checkout", type=Path, help="checkout with the tests")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="files of the checkout's")
    parser.add_argument("--skip", default="large_init", help="names of tests that are left out")
    parser.add_argument("--reports", type=Path, help="where outcomes are kept; runs there stay")
    parser.add_argument("--out", type=Path, help="where the changed source is written")
    parser.add_argument("--write", action="store_true", help="write counts into the README")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything, print counts, and return 1 if a test broke or a new one fails."""
    options = parsed(arguments)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tree = unpack(options.sdist, directory)
        if options.out is not None:
            changed(tree, PARTS, options.out)
        trial = Trial(tree, directory, options.reports or directory / "reports")
        results = {}
        for part in PARTS:
            tests = tests_of([part], directory / f"new/{part.name}/tests")
            results[f"new, {part.name} alone"] = trial.before_and_after(part.name, tests, [part])
        tests = tests_of(PARTS, directory / "new/all/tests")
        results["new, all parts"] = trial.before_and_after("all", tests, PARTS)
        own = [*options.tests, "-k", f"not ({options.skip})"]
        results["of the checkout, all parts"] = trial.before_and_after(
            "checkout", options.checkout / "tests", PARTS, own
        )
    print(table(results), end="")
    for found in results.values():
        for test in found["broken"]:
            print("broken:", test)
    if options.write:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(replace_table(PAGE, "counts", table(results)))
    new = [found["after"] for name, found in results.items() if name.startswith("new")]
    failed = any(found.get("failed") or found.get("error") for found in new)
    return int(failed or any(found["broken"] for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
