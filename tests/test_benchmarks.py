"""What the benchmarks derive from their measurements."""

import importlib
import json
import re
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    """Return a function that imports a benchmark."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_the_slope_is_the_exponent_of_a_power(module):
    slope = module("bench").slope
    assert slope((2, 10, 100), (3 * 2**1.5, 3 * 10**1.5, 3 * 100**1.5)) == pytest.approx(1.5)


def test_errors_of_a_gradient_are_split_into_bias_and_spread(module):
    errors = module("bench_estimators").gradient_errors([[3.0, 5.0], [3.0, 3.0]], [0.0, 4.0])
    assert errors["bias"] == pytest.approx(3 / 4)
    assert errors["spread"] == pytest.approx(2**0.5 / 4)
    assert errors["error"] == pytest.approx(10**0.5 / 4)
    assert 0 < errors["cosine"] < 1


def test_a_gradient_of_another_length_has_cosine_one(module):
    errors = module("bench_estimators").gradient_errors([[3.0, 6.0]], [1.0, 2.0])
    assert errors == {
        "cosine": pytest.approx(1),
        "error": pytest.approx(2),
        "bias": pytest.approx(2),
    }


def test_rows_of_another_network_are_left_out(module):
    merge = module("bench_estimators").of_this_state
    results = {"A": {"n": 1}, "A/exact": {}, "B": {"n": 1}, "B/exact": {}}
    assert merge(results, "A", {"n": 1}) == results
    assert merge(results, "A", {"n": 2}) == {"A": {"n": 2}, "B": {"n": 1}, "B/exact": {}}


def test_memory_beyond_the_data_starts_at_zero(module):
    memory = module("bench_memory")
    peaks = [100 + memory.data_size(10), 100 + memory.data_size(30) + 7]
    assert memory.beyond_data([10, 30], peaks) == pytest.approx([0, 7])


@pytest.fixture
def asked():
    """Return a function that makes a result of ``suggest`` from names and verdicts."""

    gains = {"raises it": 0.5, "not clear": 0.02, "lowers it": -0.5}

    def result(transform, *rows):
        found = [
            {"ranges": {name: 1.0}, "words": name, "gain": gains[verdict], "error": 0.1}
            | {"verdict": verdict}
            for name, verdict in rows
        ]
        about = {"net": "mlp", "transform": transform, "seed": 3, "accuracy": 0.5, "seconds": 90}
        return {**about, "suggestions": {"rows": found}}

    return result


def test_rotation_is_suggested_if_it_comes_first_and_is_clear(module, asked):
    suggested = module("bench_suggest").suggests_rotation
    assert suggested(asked("upright", ("rotation", "raises it"), ("shear", "raises it")))
    assert not suggested(asked("upright", ("shear", "raises it"), ("rotation", "raises it")))
    assert not suggested(asked("upright", ("rotation", "not clear"), ("shear", "lowers it")))


def test_suggestions_are_counted_as_they_should_be(module, asked):
    clear = [("rotation", "raises it"), ("shear", "lowers it")]
    vague = [("shear", "not clear"), ("rotation", "lowers it")]
    found = [asked(kind, *rows) for kind in ("fully rotated", "upright") for rows in (clear, vague)]
    table = module("bench_suggest").summary(found).splitlines()
    assert table[2] == "| mlp | fully rotated | 1 of 2 | 1 of 2 | 1.5 to 1.5 |"
    assert table[3] == "| mlp | upright | 1 of 2 | 1 of 2 | 1.5 to 1.5 |"
    second = asked("upright", ("shear", "raises it"), ("rotation", "not clear"))
    assert not module("bench_suggest").is_as_claimed(second)  # a gain that is small is one
    row = module("bench_suggest").details(found[1:2]).splitlines()[2]
    expected = "shear | +0.020 ± 0.100 | not clear | rotation | -0.500 ± 0.100 | lowers it |"
    assert row == f"| mlp, fully rotated | 3 | 50.0 | {expected}"


def test_starts_are_compared_by_evidence_and_choice(module, monkeypatch, tmp_path):
    paths = module("bench_paths")
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    places = ("layer1", "layer2")
    evidences = {"closed": -1.01, "search": -1.0, "open": -2.0}
    for start, evidence in evidences.items():
        result = {
            **{"task": "digit", "seed": 0, "start": start, "evidence": evidence},
            **{"accuracy": 0.9, "seconds": 10.0, "search": None},
            "chosen": dict.fromkeys(places, "CONV"),
            "ablation": {
                "rows": [{"place": place} for place in places],
                "free": {"accuracy": 0.8},
            },
        }
        if start == "open":
            result["chosen"] = {"layer2": "CONV+F-FC"}
        path = paths.Run("digit", 0, start).path
        path.write_text(json.dumps(result))
    rows = [[cell.strip() for cell in line.split("|")] for line in paths.summary().splitlines()]
    found = {row[1]: row[2:5] for row in rows[2:]}
    assert found["closed"] == ["1 of 1", "1 of 1", "0.010"]
    assert found["open"] == ["0 of 1", "0 of 1", "1.000"]
    assert "| cc |" in paths.details()
    assert "| -B |" in paths.details()


def test_the_page_of_the_papers_is_that_of_the_results(module):
    papers = module("papers")
    assert papers.PAGE.read_text() == papers.page()


def test_every_benchmark_has_its_marks_and_is_run_by_make():
    page = (BENCHMARKS / "README.md").read_text()
    makefile = (BENCHMARKS.parent / "Makefile").read_text()
    for path in BENCHMARKS.glob("bench*.py"):
        assert f"benchmarks/{path.name} --write" in makefile
        for name in re.findall(r'\bwrite\("(\w+)"', path.read_text()):
            assert f"<!-- {name} -->\n" in page
            assert f"<!-- end of {name} -->" in page
