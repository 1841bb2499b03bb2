"""Tables of papers: what their cells are, that runs are kept and continued, and how they print."""

import json
from typing import get_args

import pytest

from laplace_invariance.experiments import choices, papers, reproduce
from laplace_invariance.experiments.jobs import FailedRuns, verb_of
from laplace_invariance.experiments.options import LearnConfig, ReproduceConfig
from laplace_invariance.experiments.papers import Cell, Measure, Table
from laplace_invariance.experiments.papers.base import NOT_RUN, spread


def test_there_is_a_table_of_every_name():
    assert sorted(papers.TABLES) == sorted(get_args(choices.TableName))


@pytest.mark.parametrize("scale", get_args(choices.Scale))
@pytest.mark.parametrize("name", papers.TABLES)
def test_cells_are_runs_that_exist_under_names_of_their_own(name, scale):
    cells = papers.TABLES[name].cells(scale)
    assert len({cell.name for cell in cells}) == len(cells) > 1
    assert {verb_of(cell.config) for cell in cells} <= set(reproduce.KEPT)
    if scale == "small":  # without data that are not there
        assert {getattr(cell.config, "data", "digits") for cell in cells} == {"digits"}


def table_of(accuracies):
    cells = [
        Cell("digits", row, column, LearnConfig(seed=seed))
        for row in ("a", "b")
        for column in ("x", "y")
        for seed in range(2)
    ]
    found = {
        cell.name: {"accuracy": value, "seconds": 1800.0, "version": "1"}
        for cell, value in zip(cells, accuracies, strict=False)
    }
    measure = Measure("accuracy", lambda results: spread([r["accuracy"] for r in results]))
    table = Table("title", "source", "claim", lambda scale: cells, (measure,))
    return table.markdown("small", found)


def test_cells_that_were_not_run_say_so():
    found = table_of([1.0, 2.0, 5.0])
    assert "| a | 1.5 ± 0.7 (2) | 5.0 |" in found
    assert f"| b | {NOT_RUN} | {NOT_RUN} |" in found
    assert "3 of 8 runs; seeds 0, 1; 1.5 hours of one core; version 1." in found


def test_a_table_without_runs():
    assert "0 of 8 runs." in table_of([])


@pytest.fixture
def tiny(monkeypatch):
    """A table of two short runs, of which one is impossible until it is mended."""
    configs = {
        "fine": LearnConfig(data="digits", n_train=50, n_epochs=1, method="none"),
        "broken": LearnConfig(data="nothing.npz", n_epochs=1, method="none"),
    }
    measure = Measure("accuracy", lambda results: spread([r["accuracy"] for r in results]))

    def cells(scale):
        return [Cell("", row, "x", config) for row, config in configs.items()]

    table = Table("title", "source", "claim", cells, (measure,))
    monkeypatch.setitem(papers.TABLES, "input-mlp", table)
    return configs


def test_what_is_missing_is_run_and_kept(tiny, tmp_path):
    config = ReproduceConfig(name="input-mlp", n_jobs=2)
    with pytest.raises(FailedRuns, match=r"1 of 2 runs failed.*broken.*no file nothing.npz"):
        reproduce.reproduce(config, tmp_path)
    place = tmp_path / "input-mlp" / "small"
    kept = place / "fine-x-0.json"
    before = kept.read_text()
    assert json.loads(before)["config"]["n_train"] == 50
    assert not (place / "unfinished" / "fine-x-0").exists()
    tiny["broken"] = LearnConfig(data="digits", n_train=40, n_epochs=1, method="none")
    result = reproduce.reproduce(config, tmp_path)
    assert not result.missing
    assert kept.read_text() == before  # not run again
    assert not (place / "unfinished").exists()
    assert NOT_RUN not in str(result)
    tiny["fine"] = LearnConfig(data="digits", n_train=30, n_epochs=1, method="none")
    found = reproduce.read_results(config, tmp_path)
    assert list(found) == ["broken-x-0"]  # the other is of another configuration


def test_histories_are_cut_to_their_end():
    found = reproduce._shortened({"networks": {"a": {"history": [1, 2, 3], "orbit": [1]}}})
    assert found == {"networks": {"a": {"history": [3]}}}
