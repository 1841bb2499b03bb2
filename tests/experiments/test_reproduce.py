"""Tables of papers: what their cells are, that runs are kept and continued, and how they print."""

import json
from typing import get_args

import pytest
from builders import assert_drawn

from laplace_invariance.experiments import choices, papers, reproduce
from laplace_invariance.experiments.jobs import FailedRuns, verb_of
from laplace_invariance.experiments.options import LayersConfig, LearnConfig, ReproduceConfig
from laplace_invariance.experiments.papers import Cell, Measure, Table
from laplace_invariance.experiments.papers.base import NOT_RUN, open_ranges, spread
from laplace_invariance.experiments.table_pictures import draw_table
from laplace_invariance.metrics import LayerReport, PathReport


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


def test_a_part_without_runs_is_one_sentence():
    found = table_of([])
    assert f"digits: {NOT_RUN} (rows: a; b; columns: x; y)." in found
    assert "0 of 8 runs." in found
    assert "|" not in found


def test_ranges_that_are_open_are_named():
    runs = [{"rotation": 1.5, "x_scale": 0.01}, {"rotation": 1.6416, "x_scale": 0.02}]
    assert open_ranges(runs) == "rotation ±90°"
    assert open_ranges([{"x_translation": 0.25, "shear": 0.1}]) == "x shift 0.25, shear 0.10"
    assert open_ranges([{}]) == "closed"


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


def test_fields_that_are_newer_than_a_run_have_their_defaults():
    plain, other = LayersConfig(), LayersConfig(elements="positions")
    saved = reproduce._identity(plain)
    assert reproduce._is_of(saved, plain)
    assert not reproduce._is_of(saved, other)
    del saved["elements"]
    assert reproduce._is_of(saved, plain)
    assert not reproduce._is_of(saved, other)
    assert not reproduce._is_of(saved | {"seed": 1}, plain)
    assert not reproduce._is_of(saved | {"older": 1}, plain)


def test_shares_are_means_and_ranges_over_layers():
    def layer(**shares):
        return {name: {"kind": name.upper(), "relative": share} for name, share in shares.items()}

    report = {"a": layer(gconv=0.75, conv=0.25), "b": layer(gconv=0.25, conv=0.75)}
    report |= {"c": layer(gconv=0.5, conv=0.5), "d": layer(conv=None)}
    table = papers.TABLES["layers-groups"]
    (shares,) = [measure for measure in table.measures if "share" in measure.title]
    assert shares.words([{"report": report}]) == "GCONV 50 (25-75), CONV 50 (25-75)"


def test_results_of_before_an_option_was_added_count(tiny, tmp_path):
    del tiny["broken"]
    config = ReproduceConfig(name="input-mlp")
    reproduce.reproduce(config, tmp_path)
    kept = tmp_path / "input-mlp" / "small" / "fine-x-0.json"
    result = json.loads(kept.read_text())
    del result["config"]["correlated"]
    kept.write_text(json.dumps(result))
    assert list(reproduce.read_results(config, tmp_path)) == ["fine-x-0"]
    del result["config"]["n_train"]  # by default all, which it is not of
    kept.write_text(json.dumps(result))
    assert not reproduce.read_results(config, tmp_path)


def test_figures_are_made_from_the_files(tmp_path):
    table = papers.TABLES["input-sizes"]
    found = {cell.name: {"accuracy": 0.5 + 0.01 * i} for i, cell in enumerate(table.cells("small"))}
    place = draw_table(table, "small", found, tmp_path)
    assert_drawn(place)
    assert draw_table(table, "small", {}, tmp_path) is None
    assert draw_table(papers.TABLES["shallow"], "small", found, tmp_path) is None


def test_pictures_of_all_cells_are_in_one_figure(tmp_path):
    table = papers.TABLES["plane"]
    picture = {"reach": 1.0, "probabilities": [[0.1, 0.9]], "points": {"0": [[0.0, 0.5]]}}
    found = {cell.name: {"picture": picture} for cell in table.cells("small")[:4]}
    assert_drawn(draw_table(table, "small", found, tmp_path))


def test_pictures_of_layers_are_those_of_named_rows(tmp_path):
    table = papers.TABLES["layers-cifar"]
    path = PathReport("layer1", "conv", "CONV", 4, 1.0, {"weight": 1.0}, 1.0, 2.0, 0.5, 1.0, True)
    report = LayerReport([path]).as_dict()
    found = {cell.name: {"report": report} for cell in table.cells("small")}
    assert_drawn(draw_table(table, "small", found, tmp_path))
    others = {name: result for name, result in found.items() if not name.startswith("f-fc-conv")}
    assert others
    assert draw_table(table, "small", others, tmp_path) is None


def test_histories_are_cut_to_their_end():
    found = reproduce._shortened({"networks": {"a": {"history": [1, 2, 3], "orbit": [1]}}})
    assert found == {"networks": {"a": {"history": [3]}}}


# What the papers claim, in the small.


def of(result, row, column, part=""):
    """Return what was found in a cell."""
    (cell,) = [
        cell
        for cell in result.table.cells("small")
        if (cell.part, cell.row, cell.column) == (part, row, column)
    ]
    return result.found[cell.name]


def mlp(result):
    found = [of(result, row, "fully rotated", "digits") for row in ("evidence", "none")]
    assert found[0]["accuracy"] > found[1]["accuracy"] + 0.05
    assert found[0]["evidence"] > found[1]["evidence"] + 0.2
    assert found[0]["magnitudes"]["rotation"] > 2


def all_images(result):
    for net in ("mlp", "cnn"):
        found = [of(result, row, net)["accuracy"] for row in ("evidence", "none")]
        assert found[0] > found[1] + 0.05


def sizes(result):
    for size in ("200", "1000"):
        found = [of(result, row, size)["accuracy"] for row in ("evidence", "none")]
        assert found[0] > found[1] + 0.05


def structures(result):
    for kind in ("GGN", "EF"):
        found = [of(result, row, kind) for row in ("Kronecker-factored", "diagonal")]
        assert found[0]["evidence"] > found[1]["evidence"] + 0.3
        assert found[0]["accuracy"] > found[1]["accuracy"] + 0.05


def shallow(result):
    def bound(row, column):
        return of(result, row, column, "cosine features")["runs"][0]["elbo"]

    for true in ("±180°", "±90°"):
        assert bound("learnt, from ±5°", true) > bound("fixed at ±0°", true) + 0.1
    assert bound("fixed at ±0°", "±0°") > bound("fixed at ±180°", "±0°") + 0.1


def affine(result):
    true = {"rotated": "rotation", "translated": "translation", "scaled": "scale"}
    for column, own in true.items():
        bounds = {}
        for row in ("none", "rotation", "translation", "scale", "affine"):
            found = of(result, row, column, "cosine features")["runs"][0]
            bounds[row] = found["elbo"]
        others = [bounds[row] for row in true.values() if row != own]
        assert min(bounds[own], bounds["affine"]) > max(*others, bounds["none"]) + 0.01
        assert bounds["affine"] > bounds[own] - 0.05


def rich_layers(result):
    def error(layer, depth, part, name="code"):
        (network,) = of(result, layer, depth, part)["networks"].values()
        return network["history"][-1][name]

    for depth in ("1", "2"):
        for part in ("moduli, sines and cosines", "encoder alone"):
            assert error("rich", depth, part) < error("selu", depth, part)
    for depth in ("1", "2"):
        decoder = error("selu", depth, "decoder alone", "reconstruction")
        assert decoder < error("selu", depth, "encoder alone")


def hidden(result):
    found = {}
    for column in ("one rich layer", "four SELU"):
        (network,) = of(result, "shifts", column)["networks"].values()
        found[column] = network["history"][-1]
        assert found[column]["different"] > 0.1
    assert found["one rich layer"]["same"] < 0.01 * found["one rich layer"]["different"]
    assert found["one rich layer"]["same"] < found["four SELU"]["same"]


def losses(result):
    rows = ("outputs, learnt ranges", "losses, learnt ranges", "nothing")
    outputs, of_losses, nothing = (of(result, row, "fully rotated") for row in rows)
    assert outputs["magnitudes"]["rotation"] > 2 > of_losses["magnitudes"]["rotation"]
    assert outputs["evidence"] > max(of_losses["evidence"], nothing["evidence"]) + 0.2


def extrapolation(result):
    for part in ("evidence", "ELBO"):
        found = [of(result, row, "labels by radius", part) for row in ("learnt", "none")]
        assert found[0]["range"] > 150
        assert found[0]["evidence"] > found[1]["evidence"]
        assert found[0]["accuracy"] > found[1]["accuracy"]
        assert of(result, "learnt", "labels by angle", part)["range"] < 90


def penalties(result):
    changes = []
    rows = ("plain", "augmented", "regularised", "regularised, saliency too", "averaged")
    for method in rows:
        (network,) = of(result, method, "quarter turns")["networks"].values()
        changes.append([place["predictive"] for place in network["invariance"].values()])
    for place in zip(*changes, strict=True):
        assert list(place) == sorted(place, reverse=True)
        assert place[-1] < 1e-6


CLAIMS = {
    "input-mlp": mlp,
    "input-all": all_images,
    "input-sizes": sizes,
    "input-ablation": structures,
    "shallow": shallow,
    "shallow-affine": affine,
    "codes": rich_layers,
    "pairs": hidden,
    "input-losses": losses,
    "plane": extrapolation,
    "genuine": penalties,
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", papers.TABLES)
def test_small_tables_are_ordered_as_the_papers_say(name, tmp_path):
    """Of the others only that they run: their networks need longer trainings."""
    result = reproduce.reproduce(ReproduceConfig(name=name, n_jobs=2), tmp_path)
    assert not result.missing
    CLAIMS.get(name, str)(result)
