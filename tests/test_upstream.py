"""The change for laplace-torch, and the scripts that run its tests."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import laplace
import pytest
from laplace import curvature
from laplace.baselaplace import BaseLaplace
from torch import nn

from laplace_invariance.curvature import find_backend

ROOT = Path(__file__).parent.parent
UPSTREAM = ROOT / "upstream"
INSTALLED = Path(laplace.__file__).parent

# Tests in the style of laplace-torch, two of which depend on the backend
TESTS = """
import pytest
import torch
from laplace import Laplace
from laplace.curvature import CurvlinopsGGN
from torch import nn

@pytest.mark.parametrize("backend", [None, CurvlinopsGGN])
def test_name(backend):
    la = Laplace(nn.Linear(2, 2), "classification", "all", backend=backend)
    assert la._backend_cls.__name__ == "CurvlinopsGGN"

def test_online_fit():
    la = Laplace(nn.Linear(2, 2), "classification", "all", "diag")
    assert la._backend_cls is CurvlinopsGGN

@pytest.mark.skip
def test_skipped():
    pass

def test_that_fails():
    raise ValueError("as ever")
"""


@pytest.fixture
def module(monkeypatch):
    """Return a function that imports a script."""
    monkeypatch.syspath_prepend(str(UPSTREAM))
    return importlib.import_module


@pytest.fixture
def checkout(tmp_path):
    tests = tmp_path / "checkout/tests"
    tests.mkdir(parents=True)
    (tests / "__init__.py").touch()
    (tests / "test_small.py").write_text(TESTS)
    return tests.parent


def test_anchors_are_found_once(module, tmp_path):
    """In the release that is installed; each part alone, and all together."""
    apply = module("apply")
    for name, parts in {"all": apply.PARTS, **{p.name: [p] for p in apply.PARTS}}.items():
        directory = tmp_path / name
        source = apply.changed(INSTALLED.parent, parts, directory)
        for path in source.rglob("*.py"):
            compile(path.read_text(), path, "exec")
        with pytest.raises(ValueError, match="anchor was found 0 times"):  # not twice
            module("edits").apply_part(parts[0], directory)


def test_parts_have_tests_and_a_text(module):
    for part in module("apply").PARTS:
        assert part.tests
        text = (part.directory / "pull_request.md").read_text()
        assert text.startswith("# ")
        assert all(f"tests/{test.name}" in text for test in part.tests)


def test_anchors_that_are_not_there_are_refused(module, tmp_path):
    edit = module("edits").Edit("a.py", "x = 1", "x = 2")
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    with pytest.raises(ValueError, match="found 2 times"):
        edit.apply(tmp_path)
    (tmp_path / "a.py").write_text("y = 1\n")
    with pytest.raises(ValueError, match="found 0 times"):
        edit.apply(tmp_path)


def test_tests_that_break_are_listed(module):
    suite = module("suite")

    def outcomes(**found):
        return [suite.Outcome(name, name, outcome, "") for name, outcome in found.items()]

    before = outcomes(a="passed", b="failed", c="passed", d="passed", e="skipped")
    after = outcomes(a="passed", b="passed", c="failed", e="failed")
    assert [one.test for one in suite.broken(before, after)] == ["c", "d"]
    assert suite.counts(before) == {"passed": 3, "failed": 1, "skipped": 1}


@pytest.fixture
def restored(monkeypatch):
    """Put laplace's own backends back after the test."""
    modules = (curvature, curvature.asdl, curvature.backpack, curvature.curvlinops)
    monkeypatch.setattr(BaseLaplace, "__init__", BaseLaplace.__init__)
    for module in modules:
        for name in ("AsdlEF", "AsdlGGN", "BackPackGGN", "CurvlinopsEF", "CurvlinopsGGN"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name))


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("engine", ["native", "backpack", "asdl"])
def test_our_backends_take_the_place_of_others(module, engine):
    """Where the backend is left to laplace, and, if wanted, where a class is imported."""
    plugin = module("plugin")
    ggn, ef = (find_backend(plugin.ENGINES[engine] + kind) for kind in ("ggn", "ef"))
    net, own = nn.Linear(2, 2), curvature.CurvlinopsGGN

    plugin.substitute(engine, everywhere=False)
    assert laplace.Laplace(net, "classification", "all")._backend_cls is ggn
    assert laplace.Laplace(net, "classification", backend=own)._backend_cls is own
    assert curvature.CurvlinopsGGN is own
    plugin.substitute(engine, everywhere=True)
    assert curvature.CurvlinopsGGN is curvature.asdl.AsdlGGN is ggn
    assert curvature.AsdlEF is curvature.curvlinops.CurvlinopsEF is ef
    with pytest.raises(AssertionError):  # laplace still knows its own
        laplace.FunctionalLaplace(net, "classification", n_subset=1, backend=ggn)


def test_outcomes_are_kept_by_number(module, tmp_path):
    """As names of tests change with the backends, and files of interrupted runs have another."""
    report = tmp_path / "report.jsonl"
    outcomes = module("plugin").Outcomes(report)
    ids = ["tests/test_a.py::test_b[AsdlGGN]", "tests/test_a.py::test_b[BackPackGGN]"]
    outcomes.pytest_collection_modifyitems([SimpleNamespace(nodeid=one) for one in ids])
    for one, outcome in zip(ids, ("passed", "failed"), strict=True):
        text = "a\nE  ValueError" if outcome == "failed" else None
        outcomes.pytest_runtest_logreport(
            SimpleNamespace(
                when="call", nodeid=one, outcome=outcome, passed=text is None, longrepr=text
            )
        )
    assert not report.exists()
    outcomes.pytest_sessionfinish(1)
    found = module("suite").read(report)
    assert [one.test for one in found] == ["tests/test_a.py::test_b#0", "tests/test_a.py::test_b#1"]
    assert [one.message for one in found] == ["", "E  ValueError"]


def test_failures_have_reasons(module):
    suite, theirs = module("suite"), module("their_tests")
    names = [f"tests/a.py::test_{name}" for name in ("online_fit#1", "online_fit#4", "new#0")]
    before = [suite.Outcome(name, name, "passed", "") for name in names]
    after = [suite.Outcome(name, name, "failed", "E  KeyError") for name in names]
    found = theirs.compare("native, default", before, after)
    shown = theirs.table([theirs.compare("laplace-torch's own", before, before), found])
    assert "| laplace-torch's own | 1 | 3 passed |  |" in shown
    assert "| native, default | 1 | 3 failed | 3 |" in shown
    assert "| `test_online_fit` | 2 | the test asks for `type(la.H)" in shown
    assert "| `test_new` | 1 | unknown: E  KeyError |" in shown


def test_runs_of_the_same_files_are_kept(module, monkeypatch, tmp_path):
    theirs = module("their_tests")
    monkeypatch.setattr(theirs, "RESULTS", tmp_path / "their_tests.json")

    def result(run, n_passed, files=("a.py",)):
        return {"run": run, "files": list(files), "counts": {"passed": n_passed}, "failures": {}}

    assert theirs.with_earlier([result("stock", 1)]) == [result("stock", 1)]
    earlier = [result("stock", 2), result("native", 2), result("asdl", 2, ("a.py", "b.py"))]
    theirs.RESULTS.write_text(json.dumps(earlier))
    found = theirs.with_earlier([result("stock", 1), result("backpack", 1)])
    assert found == [result("stock", 1), result("backpack", 1), result("native", 2)]


@pytest.mark.slow
def test_the_script_runs_tests_of_a_checkout(module, checkout, tmp_path, capsys):
    """Where a test leaves the backend to laplace, and, if wanted, where it imports one."""
    theirs = module("their_tests")
    reports = tmp_path / "reports"
    arguments = [str(checkout), "--engines", "native", "--reports", str(reports)]
    assert theirs.main([*arguments, "--substitute", "default"]) == 1
    shown = capsys.readouterr().out
    assert "| laplace-torch's own | 1 | 3 passed, 1 failed, 1 skipped |" in shown
    assert "| native, default | 1 | 1 passed, 3 failed, 1 skipped | 2 |" in shown
    assert "| `test_name` | 1 | unknown:" in shown
    assert "| `test_online_fit` | 1 | the test asks for `type(la.H)" in shown
    assert theirs.main([*arguments, "--substitute", "all"]) == 1
    shown = capsys.readouterr().out
    assert "| native, all | 1 | 1 passed, 3 failed, 1 skipped | 2 |" in shown


def test_pages_show_the_results_that_were_kept(module):
    pages = {
        "changes": (module("apply"), "counts"),
        "their_tests": (module("their_tests"), "their tests"),
    }
    for name, (script, place) in pages.items():
        results = json.loads((UPSTREAM / f"results/{name}.json").read_text())
        page = script.PAGE
        assert module("suite").replace_table(page, place, script.table(results)) == page.read_text()


@pytest.mark.slow
def test_new_tests_pass_after_the_change_and_not_before(checkout, tmp_path):
    sdist = tmp_path / "sdist"
    shutil.copytree(INSTALLED, sdist / "laplace")
    command = [sys.executable, str(UPSTREAM / "apply.py"), str(sdist), str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| new")]
    assert len(rows) == 4
    for row in rows:
        _, _, _, before, after, broken, _ = (cell.strip() for cell in row.split("|"))
        assert "failed" in before or "error" in before
        assert "failed" not in after
        assert broken == "0"
