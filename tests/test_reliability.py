"""The page about reliability, and the programs that its counts come from."""

import ast
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def program(name):
    specification = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # where dataclasses look for it
    specification.loader.exec_module(module)
    return module


def test_the_page_has_the_counts_of_the_results():
    reliability = program("reliability")
    assert reliability.PAGE.read_text() == reliability.page_with(reliability.table())


def test_counts_say_what_went_wrong():
    reliability = program("reliability")
    assert "of which 1 fail" in reliability.of_networks({"networks": 7, "failures": [{}]})
    changes = {"a": {"equal": 2, "ValueError": 5}, "b": {"wrong": 1, "ValueError": 1}}
    found = {"changes": 9, "outcomes": changes, "failures": ["b"]}
    assert "6 refused, 2 without a difference, 1 wrong" in reliability.of_checkpoints(found)
    rows = [{"module": "m", "was": "a", "is": "b", "by": by} for by in ("a test", None)]
    rows.append({**rows[1], "undecided": True})
    expected = "1 noticed, 0 that no test can notice, 1 unexplained, 1 undecided"
    assert expected in reliability.of_mutants(rows)


def test_survivors_have_a_reason_and_survived():
    found = [json.loads(line) for line in (BENCHMARKS / "results/mutants.jsonl").open()]
    survived = [(one["module"], one["was"], one["is"]) for one in found if one["by"] is None]
    for one in json.loads((BENCHMARKS / "survivors.json").read_text()):
        assert (one["module"], one["was"], one["is"]) in survived
        assert len(one["why"]) > 20


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a * b", "x = a + b"),
        ("x = a.mT", "x = a"),
        ("x = y.detach()", "x = y"),
        ("x = not y", "x = y"),
        ("x = True", "x = False"),
        ("x = a not in b", "x = a in b"),
    ],
)
def test_a_break_changes_one_thing(source, expected):
    mutants = program("mutants")
    (place,) = mutants.places(ast.parse(source))
    assert mutants.broken(source, place) == expected


def test_differences_of_runs_are_seen_to_the_last_bit():
    soak = program("soak")
    one = {"a": [torch.zeros(2), 1.0], "b": {"c": "d"}}
    assert soak.differences(one, one) == []
    assert soak.differences({**one, "a": [-torch.zeros(2), 1.0]}, one) == [".a.0"]
    assert soak.differences({**one, "a": [torch.zeros(2), 1.0 + 2**-52]}, one) == [".a.1"]
    assert soak.differences({**one, "b": {}}, one) == [".b"]
    assert soak.differences({**one, "a": [torch.zeros(2)]}, one) == [".a"]


@pytest.mark.parametrize(("epochs", "n"), [((0, 1, 2), 0), ((0, 1, 1), 1), ((0, 2), 1)])
def test_lost_and_doubled_lines_are_seen(tmp_path, epochs, n):
    path = tmp_path / "history.jsonl"
    path.write_text("".join(f'{{"epoch": {epoch}}}\n' for epoch in epochs) + '{"epo')
    assert len(program("soak").broken_lines(path)) == n


def test_growth_over_epochs_is_seen():
    soak = program("soak")
    flat = soak.Watched(0, 1.0, dict.fromkeys(range(20), 100), 0)
    rising = soak.Watched(0, 1.0, {i: 100 + 10 * i for i in range(20)}, 0)
    assert soak.growth_over_epochs(flat) == 1
    assert soak.growth_over_epochs(rising) > soak.MORE


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of processes from /proc")
def test_interrupted_runs_lose_nothing():
    found = program("soak").soak(60, names=("running",))
    assert found["problems"] == []
    assert found["counts"]["runs"] >= 1
