"""``plane``: points whose labels ignore rotations or not, and its command line."""

import json
import math

import pytest
from builders import assert_drawn

from laplace_invariance.experiments.plane import N_PIXELS, PlaneConfig, plane

SHORT = {"n_train": 20, "n_samples": 3, "n_epochs": 6}


@pytest.mark.parametrize("by", ["evidence", "elbo"])
def test_runs_are_kept_and_read(tmp_path, by):
    config = PlaneConfig(by=by, **SHORT)
    result = plane(config, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "experiment.json",
        "plane.png",
        "summary.json",
    }
    assert_drawn(tmp_path / "plane.png")
    picture = json.loads((tmp_path / "summary.json").read_text())["picture"]
    assert [len(row) for row in picture["probabilities"]] == [N_PIXELS] * N_PIXELS
    assert sum(len(points) for points in picture["points"].values()) == 20
    assert plane(config, tmp_path, resume=True) == result
    assert f"±{result.range:.0f} degrees" in str(result)


def test_all_rotations_predict_the_same_along_circles():
    found = {}
    for method in ("none", "all"):
        config = PlaneConfig(by="elbo", method=method, n_samples=64, n_train=20, n_epochs=6)
        rows = plane(config).picture["probabilities"]
        middle, quarter = N_PIXELS // 2, N_PIXELS // 4
        corners = [rows[middle][quarter], rows[quarter][middle], rows[middle][-1 - quarter]]
        found[method] = max(corners) - min(corners)
    assert found["all"] < 0.05 < found["none"]


@pytest.mark.slow
def test_a_range_opens_where_labels_ignore_rotations():
    found = {labels: plane(PlaneConfig(labels=labels, by="elbo")) for labels in ("radius", "angle")}
    assert found["radius"].range > 150
    assert found["angle"].range < 60
    assert found["radius"].accuracy > 0.93


def test_plane_prints_a_summary(tmp_path, capfd, run_cli):
    run_cli("plane --by elbo --method none --train 20 --epochs 3 --quiet --out", tmp_path / "run")
    out = capfd.readouterr().out
    assert "ELBO" in out
    assert "±0 degrees" in out
    with pytest.raises(SystemExit, match="n_epochs must be at least 2"):
        run_cli("plane --epochs 1 --out", tmp_path / "other")


def test_labels_follow_radius_or_angle():
    from laplace_invariance.datasets import labelled_points

    x, y = labelled_points(500, "radius").tensors
    assert (y == (x.norm(dim=-1) > 1)).all()
    x, y = labelled_points(500, "angle").tensors
    assert (y == (x[:, 1] < 0)).all()
    assert x.norm(dim=-1).max() <= 2 + 1e-5
    assert y.double().mean() == pytest.approx(0.5, abs=0.1)
    assert math.isclose(x.norm(dim=-1).mean().item(), 1, abs_tol=0.1)
    with pytest.raises(ValueError, match="unknown labels 'colour'"):
        labelled_points(5, "colour")
