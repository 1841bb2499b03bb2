"""Break the core in many places, one at a time, and count which breaks the tests notice.

``python benchmarks/mutants.py`` breaks a copy of the package, runs the tests of its core on each
break, and writes one line per break to benchmarks/results/mutants.jsonl; what is there stays.
Breaks are drawn from all places where an operator, a comparison, a constant or a call can be
changed, equally many of each module, the same ones every time. The tests that are likely to notice
a break run first. It has survived if all others pass as well; those are spared where
benchmarks/survivors.json has the reason why no test can notice it. At the end, all tests that
noticed something must pass on the package as it is.

``--table`` prints the counts, and what survived, with the reason if benchmarks/survivors.json has
one. ``--again`` tries once more what survived without a reason.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/mutants.jsonl"
SURVIVORS = ROOT / "benchmarks/survivors.json"
PACKAGE = "laplace_invariance"
RANDOM = "curvature/test_random_networks.py"
MODULES = {  # and which tests are likely to notice a break
    "curvature/kfac.py": ("curvature/test_kfac.py", "curvature/test_rules.py"),
    "curvature/kron.py": ("curvature/test_kron.py", "curvature/test_laplace.py"),
    "curvature/rules.py": ("curvature/test_rules.py", "curvature/test_check.py"),
    "curvature/recompute.py": ("curvature/test_recompute.py", "curvature/test_evidence.py"),
    "curvature/eigen.py": ("curvature/test_eigen.py", "curvature/test_kron.py"),
    "curvature/loss_hessian.py": ("curvature/test_loss_hessian.py",),
    "curvature/trace/calls.py": ("curvature/test_architectures.py", "curvature/test_uses.py"),
    "curvature/trace/chunks.py": ("curvature/test_chunks.py", "curvature/test_keep.py"),
    "curvature/trace/explaining.py": ("curvature/test_architectures.py", "curvature/test_uses.py"),
    "curvature/trace/following.py": ("curvature/test_uses.py", "curvature/test_architectures.py"),
    "curvature/trace/matching.py": ("curvature/test_architectures.py", "curvature/test_uses.py"),
    "curvature/trace/shortcuts.py": ("curvature/test_shortcuts.py", "curvature/test_rerun.py"),
    "curvature/trace/uses.py": ("curvature/test_uses.py", "curvature/test_architectures.py"),
    "draws.py": ("test_draws.py", "test_invariant.py"),
}
TESTS = (
    "tests/curvature",
    "tests/test_draws.py",
    "tests/test_invariant.py",
    "tests/test_torture.py",
)
LOADED = ("torch", "torchvision", "laplace", "backpack", "asdl", "hypothesis", "sklearn.datasets")
N_BREAKS = 7  # of each module
SECONDS = 1800  # of computation; a break that makes the tests hang is noticed, too
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.Pow: ast.Mult,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
METHODS = ("detach", "clone", "sum", "square", "sqrt", "contiguous", "mean", "flip")


def places(tree: ast.Module) -> list[int]:
    """Return the numbers of all nodes that can be broken."""
    return [number for number, node in enumerate(ast.walk(tree)) if can_break(node)]


def can_break(node: ast.AST) -> bool:
    """Return whether :func:`broken` knows how to change a node."""
    if isinstance(node, ast.BinOp | ast.BoolOp):
        return type(node.op) in OPERATORS
    if isinstance(node, ast.Compare):
        return type(node.ops[0]) in OPERATORS
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, bool)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not | ast.USub)
    if isinstance(node, ast.Attribute):
        return node.attr == "mT"
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_method and node.func.attr in METHODS and not node.args


def broken(source: str, number: int) -> str:
    """Return the source with one node changed."""
    tree = ast.parse(source)
    return unparsed_with_break(tree, list(ast.walk(tree))[number])


def unparsed_with_break(tree: ast.AST, node: ast.AST) -> str:
    """Return the source of a tree with one of its nodes changed."""
    if isinstance(node, ast.BinOp | ast.BoolOp):
        node.op = OPERATORS[type(node.op)]()
        return ast.unparse(tree)
    if isinstance(node, ast.Compare):
        node.ops[0] = OPERATORS[type(node.ops[0])]()
        return ast.unparse(tree)
    if isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
        return ast.unparse(tree)
    inside = {
        ast.UnaryOp: lambda: node.operand,
        ast.Attribute: lambda: node.value,
        ast.Call: lambda: node.func.value,
    }[type(node)]()

    class Replace(ast.NodeTransformer):
        def visit(self, other: ast.AST) -> ast.AST:
            return inside if other is node else super().generic_visit(other)

    return ast.unparse(Replace().visit(tree))


def statements(tree: ast.Module) -> list[ast.stmt]:
    """Return the statements of a module and of its classes, and the heads of these."""
    found = []
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            found += statement.body
            statement.body = [ast.Pass()]
        found.append(statement)
    return found


def breaks_of(module: str) -> dict[str, dict]:
    """Return all breaks of a module, by a digest of the line as it was and as it is then."""
    tree = ast.parse((ROOT / PACKAGE / module).read_text())
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}
    found = {}
    for statement in statements(tree):
        lines = ast.unparse(statement).splitlines()
        for position, node in enumerate(ast.walk(statement)):
            if not can_break(node):
                continue
            copy = deepcopy(statement)
            changed = unparsed_with_break(copy, list(ast.walk(copy))[position]).splitlines()
            was, now = next(pair for pair in zip(lines, changed, strict=True) if pair[0] != pair[1])
            one = {"module": module, "was": was.strip(), "is": now.strip()}
            key = hashlib.sha256(json.dumps(one).encode()).hexdigest()
            found.setdefault(key, one | {"node": numbers[id(node)]})
    return found


def breaks() -> list[dict]:
    """Return the breaks to try; a change of one line of the core changes no others."""
    found = []
    for module in MODULES:
        of_module = breaks_of(module)
        found += [of_module[key] for key in sorted(of_module)[:N_BREAKS]]
    return found


@contextlib.contextmanager
def a_copy() -> Iterator[Path]:
    """Yield a directory with a copy of package and tests."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        for name in (PACKAGE, "tests", "benchmarks"):
            ignored = shutil.ignore_patterns("results", "__pycache__")
            shutil.copytree(ROOT / name, place / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", place)
        yield place


class FirstFailure:
    """Plugin of pytest that writes the name of the first test that fails to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the name of a test that failed."""
        if report.failed and not self._path.exists():
            self._path.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the name of a file that cannot be collected."""
        self.pytest_runtest_logreport(report)


def noticed_by(place: Path, tests: list[str]) -> str | None:
    """Run tests in a fork of this process, which has loaded torch, until one fails.

    Returns:
        The name of that test; None if all pass.
    """
    failure = place / "failure"
    failure.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.chdir(place)
        os.setsid()
        os.environ["PYTHONPATH"] = str(place)
        sys.path[0] = str(place)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        # Limits of the clock would take a busy machine for a failure.
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        command = ["-x", "-q", "-n", "0", "--timeout", "0", "-p", "no:cacheprovider", *tests]
        os._exit(pytest.main(command, plugins=[FirstFailure(failure)]))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"an end by signal {-code}"
    name = failure.read_text() if failure.exists() else "an end before the tests"
    return name if code else None


def check_unbroken(place: Path, tests: list[str]) -> None:
    """Raise if a test fails on the package as it is, which would notice every break."""
    by = noticed_by(place, tests)
    if by is not None:
        raise RuntimeError(f"{by} fails without any break")


def tests_of(module: str, place: Path) -> tuple[list[str], list[str]]:
    """Return the tests that are likely to notice a break of a module, and all others."""
    first = [f"tests/{name}" for name in MODULES[module]]
    rest = [f"tests/{RANDOM}"]
    for name in TESTS:
        path = place / name
        files = sorted(path.glob("test_*.py")) if path.is_dir() else [path]
        rest += [str(file.relative_to(place)) for file in files]
    return first, [name for name in dict.fromkeys(rest) if name not in first]


def try_break(one: dict, place: Path, likely: bool) -> dict:
    """Return a break with the name of the test that notices it, None if there is none.

    Args:
        one: The break.
        place: Copy of package and tests.
        likely: Whether to run the tests that are likely to notice it, or all others.
    """
    target = place / PACKAGE / one["module"]
    source = target.read_text()
    target.write_text(broken(source, one["node"]))
    first, rest = tests_of(one["module"], place)
    start = time.perf_counter()
    try:
        by = noticed_by(place, first if likely else rest)
    finally:
        target.write_text(source)
    seconds = round(time.perf_counter() - start)
    return {key: one[key] for key in ("module", "was", "is")} | {"by": by, "seconds": seconds}


def read_lines() -> list[dict]:
    """Return what is known of breaks."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def identity(one: dict) -> tuple[str, str, str]:
    """Return what tells a break from all others."""
    return one["module"], one["was"], one["is"]


def reasons() -> dict[tuple[str, str, str], str]:
    """Return why breaks survived that no test can notice."""
    return {identity(one): one["why"] for one in json.loads(SURVIVORS.read_text())}


def try_missing(most: int) -> None:
    """Try the breaks that are not known yet."""
    for name in LOADED:
        importlib.import_module(name)
    known = [identity(one) for one in read_lines() if "undecided" not in one]
    missing = [one for one in breaks() if identity(one) not in known][:most]
    with a_copy() as place:
        left = []
        for one in missing:
            found = try_break(one, place, likely=True)
            if found["by"] is None and identity(one) not in reasons():
                left.append(one)
                found["undecided"] = True  # until all other tests have run
            keep(found)
        for one in left:
            keep(try_break(one, place, likely=False))
        noticing = {one["by"] for one in read_lines() if one["by"]}
        check_unbroken(place, sorted(name for name in noticing if name.startswith("tests/")))


def keep(found: dict) -> None:
    """Put what is known of a break into the results, in place of what was known before."""
    others = [one for one in read_lines() if identity(one) != identity(found)]
    RESULTS.write_text("".join(json.dumps(one) + "\n" for one in [*others, found]))
    print(json.dumps(found), file=sys.stderr, flush=True)


def forget_survivors() -> None:
    """Remove what survived without a reason from the results."""
    kept = [one for one in read_lines() if one["by"] or identity(one) in reasons()]
    RESULTS.write_text("".join(json.dumps(one) + "\n" for one in kept))


def print_table() -> None:
    """Print the counts, and what survived."""
    found = read_lines()
    survived = [one for one in found if one["by"] is None]
    print(f"{len(found) - len(survived)} of {len(found)} breaks are noticed")
    for one in survived:
        why = reasons().get(identity(one), "no reason is known")
        if "undecided" in one:
            why = "undecided: only the tests that are likely to notice it have run"
        print(f"\n{one['module']}\n  was: {one['was']}\n  is:  {one['is']}\n  why: {why}")


def main() -> None:
    """Try the breaks that are missing, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print the counts, run nothing")
    parser.add_argument("--again", action="store_true", help="try again what survived")
    parser.add_argument("--most", type=int, default=10**6, help="number of breaks to try")
    arguments = parser.parse_args()
    if arguments.again:
        forget_survivors()
    if not arguments.table:
        try_missing(arguments.most)
    print_table()


if __name__ == "__main__":
    main()
