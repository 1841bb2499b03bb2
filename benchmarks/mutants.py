"""Break the core in many places, one at a time, and count which breaks the tests notice.

``python benchmarks/mutants.py`` breaks a copy of the package, runs the tests of its core on each
break, and writes one line per break to benchmarks/results/mutants.jsonl; what is there stays.
``--table`` prints the counts, and what survived. Breaks are drawn from all places where an
operator, a comparison, a constant or a call can be changed, the same ones every time.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/mutants.jsonl"
PACKAGE = "laplace_invariance"
MODULES = (
    "curvature/kfac.py",
    "curvature/kron.py",
    "curvature/rules.py",
    "curvature/recompute.py",
    "curvature/eigen.py",
    "curvature/trace/calls.py",
    "curvature/trace/chunks.py",
    "curvature/trace/matching.py",
    "curvature/trace/shortcuts.py",
    "draws.py",
)
TESTS = (
    "tests/curvature",
    "tests/test_draws.py",
    "tests/test_invariant.py",
    "tests/test_torture.py",
)
N_BREAKS = 80
SECONDS = 900  # a break that makes the tests hang is noticed, too
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
    ast.And: ast.Or,
    ast.Or: ast.And,
}
METHODS = ("detach", "clone", "sum", "square", "sqrt", "contiguous", "mean", "flip")


def places(tree: ast.Module) -> list[tuple[int, str, int]]:
    """Return all places that can be broken: number of the node, kind, and line."""
    found = []
    for number, node in enumerate(ast.walk(tree)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            found.append((number, "operator", line))
        elif isinstance(node, ast.BoolOp):
            found.append((number, "logic", line))
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
            found.append((number, "comparison", line))
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            found.append((number, "constant", line))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            found.append((number, "sign", line))
        elif isinstance(node, ast.Attribute) and node.attr == "mT":
            found.append((number, "transposition", line))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in METHODS
            and not node.args
        ):
            found.append((number, "call", line))
    return found


def broken(source: str, number: int) -> str:
    """Return the source with one node changed."""
    tree = ast.parse(source)
    node = list(ast.walk(tree))[number]
    if isinstance(node, (ast.BinOp, ast.BoolOp)):
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


def breaks() -> list[dict]:
    """Return the breaks, the same ones as long as the core is the same."""
    found = []
    for module in MODULES:
        tree = ast.parse((ROOT / PACKAGE / module).read_text())
        found += [
            {"module": module, "node": node, "kind": kind, "line": line}
            for node, kind, line in places(tree)
        ]
    random.Random(0).shuffle(found)
    return found[:N_BREAKS]


def is_noticed(one: dict, place: Path) -> bool:
    """Run the tests on a broken copy, and return whether one fails."""
    target = place / PACKAGE / one["module"]
    source = target.read_text()
    target.write_text(broken(source, one["node"]))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS]
    environment = os.environ | {"PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, timeout=SECONDS
        )
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        target.write_text(source)


def results() -> list[dict]:
    """Return what is known of breaks."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def main() -> None:
    """Try the breaks that are missing, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print the counts, run nothing")
    parser.add_argument("--most", type=int, default=N_BREAKS, help="number of breaks to try")
    arguments = parser.parse_args()
    if not arguments.table:
        known = [{key: one[key] for key in ("module", "node", "kind", "line")} for one in results()]
        missing = [one for one in breaks() if one not in known][: arguments.most]
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            for name in (PACKAGE, "tests", "benchmarks", "pyproject.toml"):
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                copy(ROOT / name, place / name)
            for one in missing:
                one = one | {"noticed": is_noticed(one, place)}
                RESULTS.parent.mkdir(exist_ok=True)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(one) + "\n")
                print(one, file=sys.stderr, flush=True)
    found = results()
    counts = Counter(one["noticed"] for one in found)
    print(f"{counts[True]} of {len(found)} breaks are noticed")
    for one in found:
        if not one["noticed"]:
            print(f"survived: {one['module']}, line {one['line']}, {one['kind']}")


if __name__ == "__main__":
    main()
