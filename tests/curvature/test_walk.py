"""The way from ``fit`` to the gradient of the evidence stays short enough to be read."""

import importlib.util
from pathlib import Path

PATH = Path(__file__).parents[2] / "benchmarks" / "walk.py"


def test_fit_and_gradient_pass_through_few_functions():
    spec = importlib.util.spec_from_file_location("walk", PATH)
    walk = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(walk)
    counts = walk.functions_called(walk.walk())
    files = walk.by_file(counts)
    assert {"invariant.py", "curvature/ggn.py", "curvature/kron.py"} <= set(files)
    assert len(counts) <= 192
    assert len(files) <= 25
