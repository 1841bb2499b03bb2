"""Experiments and the command line: what they learn, write, resume and refuse."""

import json
import math

import numpy as np
import pytest
import torch

from laplace_invariance import cli
from laplace_invariance.experiments import learn as experiments
from laplace_invariance.experiments.compare import Comparison, compare
from laplace_invariance.experiments.learn import METHODS, Experiment, Outcome, learn

SMALL = {"n_train": 100, "n_test": 50, "n_epochs": 4, "n_samples": 2}
FILES = {
    "checkpoint.pt",
    "experiment.json",
    "history.jsonl",
    "summary.json",
    "evidence.png",
    "ranges.png",
    "samples.png",
    "flow.png",
}


@pytest.fixture(autouse=True)
def _single_precision(_double_precision):
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_and_leaves_the_generator_alone(method):
    state = torch.get_rng_state()
    outcome = learn(Experiment(method=method, **SMALL))
    assert torch.equal(torch.get_rng_state(), state)
    assert 0 <= outcome.accuracy <= 1
    assert math.isfinite(outcome.evidence)
    assert bool(outcome.magnitudes) == (method in ("evidence", "augerino", "fixed"))
    if method == "fixed":
        assert outcome.magnitudes["rotation"] == pytest.approx(math.pi)
        assert outcome.magnitudes["shear"] == 0
    assert "test accuracy" in str(outcome)


@pytest.mark.parametrize("net", experiments.NETWORKS)
def test_every_network_runs(net):
    assert math.isfinite(learn(Experiment(net=net, **SMALL | {"n_epochs": 1})).evidence)


def test_methods_share_images_and_initial_weights(monkeypatch):
    seen = []

    def spy(model, loader, **kwargs):
        net = model.net if hasattr(model, "net") else model
        data = kwargs["marglik_loader"].dataset.tensors[0]
        seen.append(
            (
                data,
                [p.detach().clone() for p in net.parameters()],
                kwargs["valid_loader"].dataset.tensors[0],
            )
        )
        raise KeyboardInterrupt

    monkeypatch.setattr(experiments, "marglik_training", spy)
    for method in METHODS:
        with pytest.raises(KeyboardInterrupt):
            learn(Experiment(method=method, **SMALL))
    for data, weights, test in seen[1:]:
        assert torch.equal(data, seen[0][0])
        assert torch.equal(test, seen[0][2])
        assert all(torch.equal(a, b) for a, b in zip(weights, seen[0][1], strict=True))


def test_directory_has_everything_and_is_not_overwritten(tmp_path):
    experiment = Experiment(**SMALL)
    outcome = learn(experiment, tmp_path / "new")
    files = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert set(files) == FILES
    assert all(files[name].startswith(b"\x89PNG") for name in files if name.endswith(".png"))
    summary = json.loads(files["summary.json"])
    assert summary["ranges"]["rotation"].endswith("degrees")
    assert summary["magnitudes"] == outcome.magnitudes
    assert len(files["history.jsonl"].splitlines()) == 4
    with pytest.raises(FileExistsError, match="--resume"):
        learn(experiment, tmp_path / "new")
    assert learn(experiment, tmp_path / "new", resume=True) == outcome
    with pytest.raises(ValueError, match="another experiment: it differs in seed"):
        learn(Experiment(**SMALL, seed=1), tmp_path / "new", resume=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == files


def test_interrupted_experiment_goes_on(tmp_path, monkeypatch):
    experiment = Experiment(**SMALL)
    whole = learn(experiment)
    monkeypatch.setattr(
        experiments, "_draw", lambda *_: 1 / 0
    )  # dies after training, before the summary
    with pytest.raises(ZeroDivisionError):
        learn(experiment, tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="another experiment: it differs in transform, seed"):
        learn(Experiment(transform="translated", seed=5, **SMALL), tmp_path, resume=True)
    resumed = learn(Experiment(root="elsewhere", **SMALL), tmp_path, resume=True)
    assert (resumed.accuracy, resumed.evidence, resumed.magnitudes) == (
        whole.accuracy,
        whole.evidence,
        whole.magnitudes,
    )


def test_scale_correlation_is_that_of_samples():
    from laplace_invariance import AffineImage

    augmentation = AffineImage(init={"x_scale": 0.3, "y_scale": 0.2}, correlated=True)
    augmentation.mixing.data[4, 3] = 0.4
    coefficients = augmentation.coefficients(augmentation.sample(20000, 1)).flatten(0, 1)
    expected = np.corrcoef(coefficients.detach().numpy().T)[3, 4]
    assert experiments._scale_correlation(augmentation) == pytest.approx(expected, abs=0.02)


def test_comparison_prints_means_and_spreads(tmp_path):
    said = []
    runs = [
        Experiment(transform=kind, method=method, seed=seed, **SMALL)
        for kind in ("fully_rotated", "original")
        for method in ("evidence", "none")
        for seed in (0, 1)
    ]
    comparison = compare(runs, tmp_path, say=said.append)
    table = str(comparison)
    assert (tmp_path / "comparison.md").read_text() == table + "\n"
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert len(said) == 16
    values = [100 * o.accuracy for o in comparison.outcomes["original", "none"]]
    assert f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}" in table
    assert "| method | fully rotated | original |" in table
    assert "(3.14)" in table
    again = compare(runs, tmp_path, resume=True)
    assert str(again) == table


def test_table_names_what_was_wanted_and_the_widest_of_the_rest():
    truth = {"rotation": 0.0, "x_translation": 0.57, "shear": 0.0}
    found = {"rotation": 0.03, "x_translation": 0.5, "shear": 0.07}
    outcome = Outcome(Experiment(transform="translated"), 0.5, -1.0, {}, found, truth, None, 1.0)
    table = Comparison({("translated", "evidence"): [outcome]}).markdown()
    assert "x shift 0.50 (0.57), others ≤ 0.07 (shear)" in table


def test_comparison_may_lack_cells_but_not_mix():
    plain = Outcome(Experiment(method="none"), 0.5, -1.0, {}, {}, {}, None, 1.0)
    other = Outcome(
        Experiment(method="fixed", transform="original"), 0.25, -1.0, {}, {}, {}, None, 1.0
    )
    comparison = Comparison({("fully_rotated", "none"): [plain], ("original", "fixed"): [other]})
    assert "| none | 50.0 | - |\n| fixed | - | 25.0 |" in comparison.markdown()
    assert comparison.accuracies() == {"fully_rotated": {"none": 0.5}, "original": {"fixed": 0.25}}
    with pytest.raises(ValueError, match="must differ in seed only"):
        compare([Experiment(**SMALL), Experiment(net="cnn", **SMALL)])


# The command line.


def test_learn_prints_words(tmp_path, capfd):
    arguments = [
        "--train",
        "100",
        "--test",
        "50",
        "--epochs",
        "4",
        "--samples",
        "2",
        "--transform",
        "fully-rotated",
    ]
    cli.main(["learn", *arguments, "--out", str(tmp_path / "run")])
    out, err = capfd.readouterr()
    for word in ("rotation        ±", "true ±180.0 degrees", "test accuracy", "history.jsonl"):
        assert word in out
    for word in ("4/4", "evidence", "accuracy", "rotation"):
        assert word in err
    cli.main(["learn", *arguments, "--out", str(tmp_path / "run"), "--resume", "--quiet"])
    again = capfd.readouterr()
    assert again.out == out
    assert again.err == ""


def test_compare_prints_one_table(tmp_path, capsys):
    arguments = ["--train", "100", "--test", "50", "--epochs", "2", "--samples", "2", "--quiet"]
    cli.main(
        [
            "compare",
            *arguments,
            "--transform",
            "original",
            "--method",
            "none",
            "fixed",
            "--out",
            str(tmp_path),
        ]
    )
    assert "| none |" in capsys.readouterr().out


def npz(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--data", "nothing"], "unknown source 'nothing'"),
        (["--data", "missing.npz"], "there is no file missing.npz"),
        (["--data", "mnist", "--root", "nowhere"], "--download"),
        (["--train", "100000"], "n_train must be between"),
        (["--epochs", "0"], "n_epochs must be positive"),
        (["--samples", "0"], "n_samples must be a positive integer"),
        (["--method", "augerino", "--strength", "-1"], "strength must not be negative"),
        (["--method", "fixed", "--fixed", "twist=1"], "no generator 'twist'"),
    ],
)
def test_bad_arguments_are_explained_and_write_nothing(tmp_path, arguments, match):
    with pytest.raises(SystemExit, match=match):
        cli.main(["learn", *arguments, "--quiet", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_range_that_is_not_finite_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(
            [
                "learn",
                "--method",
                "fixed",
                "--fixed",
                "rotation=nan",
                "--out",
                str(tmp_path / "out"),
            ]
        )
    assert "the range of rotation must be finite" in capsys.readouterr().err


def test_data_without_labels_is_refused(tmp_path):
    path = npz(
        tmp_path / "images.npz",
        x_train=np.zeros((9, 8, 8), np.uint8),
        x_test=np.zeros((9, 8, 8), np.uint8),
    )
    with pytest.raises(SystemExit, match="lacks y_train, y_test"):
        cli.main(["learn", "--data", path, "--quiet", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_truncated_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "_draw", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        learn(Experiment(**SMALL), tmp_path)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:1000])
    arguments = ["--train", "100", "--test", "50", "--epochs", "4", "--samples", "2", "--quiet"]
    with pytest.raises(SystemExit, match="not a readable checkpoint"):
        cli.main(["learn", *arguments, "--out", str(tmp_path), "--resume"])
    assert len(path.read_bytes()) == 1000


@pytest.mark.parametrize("context", [None, KeyboardInterrupt()])
def test_interrupt_ends_in_one_line(monkeypatch, tmp_path, context):
    def interrupted(*_, **__):
        if context is None:
            raise KeyboardInterrupt
        error = RuntimeError("unexpected pos 103360 vs 103252")
        error.__context__ = context
        raise error

    monkeypatch.setattr(cli.learn, "learn", interrupted)
    with pytest.raises(SystemExit, match="interrupted; the same command with --resume goes on"):
        cli.main(["learn", "--out", str(tmp_path)])
