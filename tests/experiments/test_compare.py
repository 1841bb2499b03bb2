"""``compare``: its tables, and what it reads again."""

import json

import numpy as np
import pytest

from laplace_invariance.experiments import compare as module
from laplace_invariance.experiments.compare import CompareConfig, CompareResult, compare
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.learn import LearnConfig, LearnResult

SMALL = {"n_train": 60, "n_test": 50, "n_epochs": 1, "n_samples": 2, "search": "off"}
CELLS = {
    "transforms": ("fully_rotated", "original"),
    "methods": ("evidence", "none"),
    "seeds": (0, 1),
}


def result_of(magnitudes=(), truth=(), accuracy=0.5, error=0.0, compared=-1.0, **options):
    return LearnResult(
        LearnConfig(**options),
        data={"n_train": 9, "n_test": 5, "in_shape": [1, 28, 28], "n_classes": 3},
        net="mlp",
        accuracy=accuracy,
        evidence=-2.0,
        evidence_error=error,
        newton_decrement=0.0,
        n_samples=8,
        evidence_compared=compared,
        ranges={},
        magnitudes=dict(magnitudes),
        truth=dict(truth),
        scale_correlation=None,
        seconds=1.0,
    )


def test_every_cell_is_a_run():
    runs = CompareConfig(net="cnn", **CELLS).runs
    assert [(run.transform, run.method, run.seed) for run in runs[:3]] == [
        ("fully_rotated", "evidence", 0),
        ("fully_rotated", "evidence", 1),
        ("fully_rotated", "none", 0),
    ]
    assert len(runs) == 8
    assert {run.net for run in runs} == {"cnn"}


def test_tables_have_means_and_spreads(tmp_path, capfd):
    config = CompareConfig(**CELLS, **SMALL)
    comparison = compare(config, tmp_path, progress_bar=True)
    table = str(comparison)
    assert (tmp_path / "comparison.md").read_text() == table + "\n"
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "summary.json").read_text())) == 8
    assert "8 of 8: digits-original-none-1" in capfd.readouterr().err
    values = [100 * result.accuracy for result in comparison.results["original", "none"]]
    assert f"| {np.mean(values):.1f} ± {np.std(values, ddof=1):.1f} % |" in table
    data = "digits: 60 to train on, 50 to test on, 8 x 8 pixels, grey, 10 classes; network mlp; "
    assert table.startswith(f"{data}2 seeds.\n\nFully rotated:\n\n| method | log evidence | test")
    assert "\n\nImages as they are:\n\n| method |" in table
    assert table.count("true ±180.0 degrees") == 1  # of images that were rotated, and no others
    with pytest.raises(FileExistsError, match=f"{tmp_path}/experiment.json exists; .*--resume"):
        compare(config, tmp_path)
    assert str(compare(config, tmp_path, resume=True)) == table
    fewer = CompareConfig(**CELLS | {"methods": ("none",)}, **SMALL)
    assert compare(fewer, tmp_path, resume=True).methods == ["none"]
    with pytest.raises(ValueError, match="another experiment: it differs in net"):
        compare(CompareConfig(net="cnn", **CELLS, **SMALL), tmp_path, resume=True)


def test_ranges_are_in_words_and_closed_ones_are_not_listed():
    found = {"rotation": 0.0003, "x_translation": 0.5, "x_scale": 0.2}
    result = result_of(found, {"x_translation": 4 / 7}, transform="translated")
    table = CompareResult({("translated", "evidence"): [result]}).markdown()
    ranges = "x translation ±6.8 pixels, true ±7.7 pixels; x scale factor 0.82 to 1.22"
    assert f"| {ranges}; others closed |" in table
    others = [result_of({"rotation": width}) for width in (1.0, 2.0)]
    table = CompareResult({("original", "evidence"): others}).markdown()
    assert "rotation ±85.9 degrees (from ±57.3 degrees to ±114.6 degrees) |" in table
    assert "true" not in table


def test_evidences_are_compared_at_equal_samples_and_come_with_their_errors():
    table = CompareResult(
        {
            ("original", "evidence"): [result_of(), result_of()],
            ("original", "none"): [result_of(method="none", compared=-1.5)],
            ("original", "fixed"): [result_of(method="fixed", compared=None)],
        }
    ).markdown()
    caption = "Log evidence per training image, with 32 samples wherever outputs are averaged."
    assert table.endswith(caption)
    assert "| evidence | -1.000 ± 0.000 | 50.0 ± 0.0 % |" in table
    assert "| none | -1.500 | 50.0 % |" in table
    assert "| fixed | -2.000 | 50.0 % |" in table  # of an earlier version, which has no other
    estimated = result_of(error=0.02, subset_of_weights="last_layer")
    table = CompareResult({("original", "evidence"): [estimated]}).markdown()
    assert "image, of the last layer, with 32 samples wherever" in table
    assert table.endswith("averaged, and standard errors up to 0.020.")


def test_without_test_images_accuracies_are_left_out():
    found = CompareResult({("original", "none"): [result_of(method="none", accuracy=None)]})
    assert "accuracy" not in found.markdown()
    assert "| method | log evidence |\n" in found.markdown()
    assert found.accuracies() == {}


def test_every_run_gets_the_estimator_and_the_weights():
    (run,) = CompareConfig(
        transforms=("original",),
        methods=("none",),
        estimator="refit",
        subset_of_weights="last-layer",
    ).runs
    assert (run.estimator, run.subset_of_weights) == ("refit", "last_layer")


def test_cells_may_be_absent():
    plain = result_of(method="none")
    other = result_of(method="fixed", transform="original", accuracy=0.25)
    comparison = CompareResult({("fully_rotated", "none"): [plain], ("original", "fixed"): [other]})
    assert "\n| none | -1.000 | 50.0 % |\n\nImages" in comparison.markdown()
    assert "\n| fixed | -1.000 | 25.0 % |\n\nLog" in comparison.markdown()
    assert comparison.accuracies() == {"fully_rotated": {"none": 0.5}, "original": {"fixed": 0.25}}


def test_compare_prints_its_tables_and_nothing_else(tmp_path, capfd, run_cli):
    words = "--train 100 --test 50 --epochs 2 --samples 2 --transform original --method none fixed"
    run_cli(f"compare {words} --quiet --out", tmp_path)
    out, err = capfd.readouterr()
    assert out == (tmp_path / "comparison.md").read_text()
    assert "| none |" in out
    assert err == ""


def test_comparison_in_use_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "learn", None)
    with RunDirectory(tmp_path) as other:
        other.lock()
        with pytest.raises(BlockingIOError, match="is in use by another run"):
            compare(CompareConfig(), tmp_path)


def test_impossible_comparison_writes_nothing(tmp_path, run_cli):
    with pytest.raises(SystemExit, match="unknown source 'nothing'"):
        run_cli("compare --data nothing --quiet --out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
