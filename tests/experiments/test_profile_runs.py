"""``profile``: it learns once, reads what it knows, and refuses what it cannot look along."""

import json
import math
from typing import get_args

import pytest
from builders import assert_drawn

from laplace_invariance import AffineImage
from laplace_invariance.experiments import learn as learn_module
from laplace_invariance.experiments import profile as module
from laplace_invariance.experiments.choices import RangeName
from laplace_invariance.experiments.learn import LearnConfig, learn, learnt_model
from laplace_invariance.experiments.profile import ProfileConfig, profile

SMALL = {"n_train": 60, "n_test": 20, "n_epochs": 2, "n_samples": 2, "search": "off"}
WORDS = (
    "--transform fully-rotated --train 60 --test 20 --epochs 2 --samples 2 --steps 1 --repeats 1 "
    "--search off"
)


def test_ranges_are_those_of_the_augmentation():
    assert get_args(RangeName) == AffineImage().names
    for name in AffineImage().names:
        ProfileConfig(name=name, values=(0.5,))


def test_command_writes_the_curve_and_reads_it_again(tmp_path, capfd, run_cli, monkeypatch):
    run_cli(f"profile {WORDS} --values 0 1 --quiet --out", tmp_path / "out")
    out, err = capfd.readouterr()
    assert err == ""
    assert "true is ±180.0 degrees\n\nfiles " in out
    assert "experiment.json, learn, profile.json, profile.png, report.html, summary.json" in out
    assert_drawn(tmp_path / "out" / "profile.png")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["name"], summary["truth"]) == ("rotation", pytest.approx(math.pi))
    assert {0.0, 1.0, summary["learnt"]} == set(summary["values"])
    with pytest.raises(SystemExit, match=r"experiment.json exists; pass --resume"):
        run_cli(f"profile {WORDS} --values 0 1 --quiet --out", tmp_path / "out")
    monkeypatch.setattr(module, "evidence_profile", None)  # nothing is computed again
    run_cli(f"profile {WORDS} --values 0 1 --quiet --resume --out", tmp_path / "out")
    assert capfd.readouterr().out == out


def test_values_are_added_to_what_is_known(tmp_path, monkeypatch):
    options = {**SMALL, "n_steps": 1, "n_repeats": 1}
    first = profile(ProfileConfig(values=(0.5,), **options), tmp_path)
    trained = learn_module.marglik_training

    def training(model, loader, **arguments):
        result = trained(model, loader, **arguments)
        assert result.history == first.learnt.training.history  # it was finished
        return result

    with monkeypatch.context() as patch:
        patch.setattr(learn_module, "marglik_training", training)
        more = profile(ProfileConfig(values=(0.5, 1.0), **options), tmp_path, resume=True).profile
    known = dict(zip(first.profile.values, first.profile.evidences, strict=True))
    found = dict(zip(more.values, more.evidences, strict=True))
    assert known.items() <= found.items()
    assert len(found) == len(known) + 1
    unkept = profile(ProfileConfig(values=(0.5, 1.0), **options))
    assert unkept.profile == more
    with pytest.raises(ValueError, match="another experiment: it differs in name"):
        profile(ProfileConfig(name="shear", **options), tmp_path, resume=True)


@pytest.mark.parametrize("estimator", ["running", "refit"])
def test_the_model_of_a_finished_run_comes_back(tmp_path, estimator):
    config = LearnConfig(estimator=estimator, **SMALL | {"n_epochs": 6})
    result = learn(config, tmp_path)
    read = learn(config, tmp_path, resume=True)
    assert read.training is None
    model, images = learnt_model(read, tmp_path)
    wanted = result.training.model.state_dict()
    found = model.state_dict()
    assert all(found[name].equal(value) for name, value in wanted.items())
    assert len(images) == SMALL["n_train"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--method none", "method 'none' learns no range to look along; choose evidence"),
        ("--method fixed", "method 'fixed' learns no range to look along; choose evidence"),
        ("--values 4", "values: rotation must be at most pi"),
        ("--range shear --values -1", "values: shear must be finite and not negative"),
        ("--values 1 0.5 1", "values must differ from one another"),
        ("--steps -1", "n_steps must be finite and not negative"),
        ("--repeats 0", "n_repeats must be positive"),
    ],
)
def test_impossible_profile_is_refused_before_anything_is_learnt(tmp_path, run_cli, words, message):
    with pytest.raises(SystemExit, match=message):
        run_cli(f"profile {words} --out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
