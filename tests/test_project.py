"""The package as a whole: its version, its names, and the layout that the pages describe."""

import ast
import re
import subprocess
import sys
import threading
from pathlib import Path

import processes
import pytest

import laplace_invariance as li

ROOT = Path(__file__).parent.parent


def test_the_version_stands_in_one_place():
    assert "version =" not in (ROOT / "pyproject.toml").read_text().partition("[tool.")[0]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", li.__version__)


def test_public_names_are_found_when_asked_for_without_a_word():
    """In a new process, where nothing has been imported before; warnings of others are errors."""
    code = """
import laplace_invariance as li
assert set(li.__all__) <= set(dir(li))
for name in li.__all__:
    getattr(li, name)
li.curvature.AsdlAugmentedGGN, li.curvature.BackPackAugmentedGGN
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def ask_at_once():
    processes.forget("laplace_invariance")
    import laplace_invariance

    names = laplace_invariance.__all__
    found, start = [], threading.Barrier(len(names))

    def ask(name):
        start.wait()
        found.append(getattr(laplace_invariance, name))

    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(threads)


def test_threads_may_ask_for_public_names_at_once(tmp_path):
    process = processes.start(ask_at_once, log=tmp_path / "log")
    process.join()
    assert process.exitcode == 0, (tmp_path / "log").read_text()


def test_modules_import_names_from_where_they_are():
    """Not through the root of the package, where import-linter cannot see whose they are."""
    for path in (ROOT / "laplace_invariance").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "laplace_invariance":
                names = {alias.name for alias in node.names}
                assert not names & set(li._HOMES), path
            elif isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
                assert "laplace_invariance" not in names, path


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="has no attribute 'Augmentations'"):
        getattr(li, "Augmentations")  # noqa: B009


def test_the_package_itself_does_not_import_torch():
    code = "import sys, laplace_invariance; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_named_in_the_guide_for_developers_exist():
    page = (ROOT / "docs" / "development.md").read_text()
    names = set(re.findall(r"`([\w/]+\.(?:py|md|toml|yaml))`", page))
    assert len(names) > 10
    places = (ROOT, ROOT / "laplace_invariance", ROOT / "docs")
    missing = [name for name in names if not any((place / name).exists() for place in places)]
    assert not missing
