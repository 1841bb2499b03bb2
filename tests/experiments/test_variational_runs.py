"""``variational``: runs from several starts, and its command line."""

import json
import math
import shutil

import pytest
from builders import assert_drawn

from laplace_invariance.experiments.variational import VariationalConfig, variational

SMALL = {"n_features": 20, "n_samples": 3, "n_epochs": 2, "n_train": 60, "n_test": 30}
STARTS = {"learnt": (5, 90), "fixed": (0, 180), "point": (20,)}
FILES = {"experiment.json", "filters.png", "ranges.png", "summary.json"}


@pytest.fixture(scope="module")
def finished(run_once):
    """A finished experiment: its configuration, directory and result."""
    return run_once(variational, VariationalConfig(batch_size=30, **SMALL, **STARTS))


def test_every_start_is_run(finished):
    _, out, result = finished
    plan = [("learnt", 5), ("learnt", 90), ("fixed", 0), ("fixed", 180), ("point", 20)]
    assert [(run.method, run.start) for run in result.runs] == plan
    assert {path.name for path in out.iterdir()} == FILES
    for run in result.runs:
        (degrees,) = ([math.degrees(one) for one in values] for values in run.ranges.values())
        assert len(degrees) == 3
        assert degrees[0] == pytest.approx(run.start)
        assert math.degrees(run.magnitudes["rotation"]) == degrees[-1]
        if run.method == "fixed":
            assert degrees[-1] == pytest.approx(run.start, abs=1e-4)
        else:
            assert degrees[-1] != pytest.approx(run.start, abs=1e-4)
        assert (run.elbo is None) == (run.method == "point")
        assert run.elbo is None or run.elbo < run.log_likelihood < 0


def test_the_best_run_has_the_highest_bound(finished):
    result = finished[2]
    bounds = [run.elbo for run in result.runs if run.method == "fixed"]
    assert result.best("fixed").elbo == max(bounds)
    assert result.best("point") is None


def test_finished_runs_are_read_and_others_run(finished, tmp_path, capfd):
    config, out, result = finished
    with pytest.raises(FileExistsError, match="--resume"):
        variational(config, out)
    assert variational(config, out, resume=True) == result
    shutil.copy(out / "experiment.json", tmp_path)
    summary = json.loads((out / "summary.json").read_text())
    summary["runs"] = summary["runs"][:4]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    capfd.readouterr()
    again = variational(config, tmp_path, resume=True, progress_bar=True)
    said = [line for line in capfd.readouterr().err.splitlines() if "from ±" in line]
    assert said == ["ranges learnt by the likelihood at a point estimate, from ±20 degrees"]
    for run, expected in zip(again.runs, result.runs, strict=True):
        assert (run.elbo, run.ranges, run.accuracy) == (
            expected.elbo,
            expected.ranges,
            expected.accuracy,
        )


def test_several_ranges_are_learnt_at_once(tmp_path):
    learn = ("x_translation", "rotation", "y_scale")
    config = VariationalConfig(transform="translated_scaled", learn=learn, **SMALL)
    result = variational(config, tmp_path)
    (run,) = result.runs
    assert tuple(run.ranges) == learn
    for values in run.ranges.values():
        assert values[0] == math.radians(5)
        assert values[-1] != pytest.approx(values[0])
    assert "true: translation ±0.59, scale" in str(result)
    assert_drawn(tmp_path / "ranges.png")
    again = variational(config, tmp_path, resume=True)
    assert again == result


# The command line.


def test_variational_prints_a_table(tmp_path, capfd, run_cli):
    words = "--init 5 90 --fixed 0 --features 20 --samples 3 --epochs 2 --train 60 --test 30"
    arguments = f"variational {words} --transform partially-rotated", "--out", tmp_path / "run"
    run_cli(*arguments)
    out, err = capfd.readouterr()
    assert "true: rotation ±90°" in out
    for word in ("learnt     5.0", "learnt    90.0", "fixed      0.0", "best bound", "filters.png"):
        assert word in out
    for word in ("ranges learnt by the ELBO, from ±5 degrees", "2/2", "elbo", "rotation"):
        assert word in err
    run_cli(*arguments, "--resume", "--quiet")
    assert capfd.readouterr().out == out


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("--init 500", "between 0 and 180 degrees"),
        ("--features 7", "even for cosines, got 7"),
        ("--data nothing", "unknown source 'nothing'"),
    ],
)
def test_variational_explains_bad_arguments_and_writes_nothing(tmp_path, run_cli, arguments, match):
    with pytest.raises(SystemExit, match=match):
        run_cli(f"variational {arguments} --train 60 --quiet --out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
