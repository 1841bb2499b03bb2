"""Layers learnt one by one: the data of the toy, the experiment from end to end, and the command line."""

import json
import math

import numpy as np
import pytest
import torch

from laplace_invariance import cli, marglik
from laplace_invariance.datasets import framed, quadrants
from laplace_invariance.experiments import layers as layerwise
from laplace_invariance.experiments.layers import LayerExperiment, learn_layers
from laplace_invariance.experiments.learn import Experiment, learn

SMALL = {
    "width": 1,
    "n_train": 60,
    "n_test": 30,
    "n_epochs": 2,
    "n_epochs_burnin": 2,
    "marglik_frequency": 2,
}
SMALL |= {"n_hypersteps": 2, "batch_size": 30, "output_rank": 1}
FILES = {
    "checkpoint.pt",
    "evidence.png",
    "experiment.json",
    "history.jsonl",
    "layers.png",
    "report.txt",
    "result.json",
}


# Data.


def test_quadrants_are_where_the_labels_say():
    images, labels = torch.rand(50, 3, 6, 6), torch.randint(7, (50,))
    x, y = quadrants(images, labels, "both", size=12)
    assert x.shape == (50, 3, 12, 12)
    assert torch.equal(y // 4, labels)
    assert set((y % 4).tolist()) == {0, 1, 2, 3}
    for image, large, place in zip(images, x, (y % 4).tolist(), strict=True):
        top, left = 6 * (place // 2), 6 * (place % 2)
        torch.testing.assert_close(large[:, top : top + 6, left : left + 6], image)
        assert large.sum() == pytest.approx(image.sum().item())  # black elsewhere


def test_quadrants_of_either_task_are_the_same_draws():
    images, labels = torch.rand(9, 1, 5, 7), torch.arange(9)
    x, y = quadrants(images, labels, "digit", torch.Generator().manual_seed(3))
    again, both = quadrants(images, labels, "both", torch.Generator().manual_seed(3))
    assert torch.equal(x, again)
    assert torch.equal(y, labels)
    assert torch.equal(both // 4, labels)
    assert x.shape == (9, 1, 32, 32)
    assert not torch.equal(
        both, quadrants(images, labels, "both", torch.Generator().manual_seed(4))[1]
    )


def test_images_that_shrink_keep_their_mean():
    images = torch.rand(4, 1, 28, 28)
    x, _ = quadrants(images, torch.zeros(4, dtype=torch.long), "digit")
    torch.testing.assert_close(4 * x.mean((1, 2, 3)), images.mean((1, 2, 3)), rtol=0.02, atol=0)
    checkers = (
        (torch.arange(28) % 2).to(x).expand(1, 1, 28, 28)
    )  # alias-free: grey, not stripes of another width
    tile = quadrants(checkers, torch.zeros(1, dtype=torch.long), "digit")[0]
    assert (tile[tile > 0] - 0.5).abs().max() < 0.2


@pytest.mark.parametrize(
    ("images", "labels", "options", "match"),
    [
        (
            torch.rand(2, 1, 4, 4),
            torch.zeros(2).long(),
            {"task": "place"},
            "unknown task 'place'; choose from digit, both",
        ),
        (
            torch.rand(2, 1, 4, 4),
            torch.zeros(2).long(),
            {"size": 15},
            "size must be even and positive.* got 15",
        ),
        (
            torch.rand(2, 4, 4),
            torch.zeros(2).long(),
            {},
            r"\[n, channels, height, width\], got shape \[2, 4, 4\]",
        ),
        (2 + torch.rand(2, 1, 4, 4), torch.zeros(2).long(), {}, r"must be in \[0, 1\]"),
        (
            torch.rand(2, 1, 4, 4),
            torch.zeros(3).long(),
            {},
            r"2 images need labels \[2\] of integers, got shape \[3\]",
        ),
        (torch.rand(2, 1, 4, 4), torch.zeros(2), {}, "of torch.float"),
    ],
)
def test_quadrants_refuses(images, labels, options, match):
    with pytest.raises(ValueError, match=match):
        quadrants(images, labels, **{"task": "digit", **options})


@pytest.mark.parametrize(
    ("shape", "inner"),
    [
        ((28, 28), (slice(2, 30), slice(2, 30))),
        ((8, 8), (slice(0, 32), slice(0, 32))),
        ((10, 10), (slice(1, 31), slice(1, 31))),
        ((5, 15), (slice(11, 21), slice(1, 31))),
        ((64, 32), (slice(0, 32), slice(8, 24))),
        ((32, 32), (slice(0, 32), slice(0, 32))),
    ],
)
def test_framed_images_fill_the_frame_as_far_as_they_fit(shape, inner):
    images = 0.5 + 0.5 * torch.rand(2, 3, *shape)
    x = framed(images)
    assert x.shape == (2, 3, 32, 32)
    filled = torch.zeros(32, 32, dtype=torch.bool)
    filled[inner] = True
    assert torch.equal((x > 0).all(0).all(0), filled)
    assert torch.equal((x > 0).any(0).any(0), filled)
    if max(shape) in (28, 32):
        torch.testing.assert_close(x[:, :, inner[0], inner[1]], images)


def test_framed_refuses():
    with pytest.raises(ValueError, match="got shape"):
        framed(torch.rand(3, 8, 8))
    with pytest.raises(ValueError, match="size must be positive, got 0"):
        framed(torch.rand(2, 1, 8, 8), 0)


# Experiments.


@pytest.fixture
def _single_precision(_double_precision):
    torch.set_default_dtype(torch.float32)


pytestmark = pytest.mark.usefixtures("_single_precision")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished experiment: what was asked, its directory, and its outcome."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    out = tmp_path_factory.mktemp("layers") / "new"
    experiment = LayerExperiment(task="both", **SMALL)
    state = torch.get_rng_state()
    outcome = learn_layers(experiment, out)
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_default_dtype(before)
    return experiment, out, outcome


def test_directory_has_everything(finished):
    experiment, out, outcome = finished
    assert {path.name for path in out.iterdir()} == FILES
    result = json.loads((out / "result.json").read_text())
    assert (result["accuracy"], result["evidence"]) == (outcome.accuracy, outcome.evidence)
    assert result["experiment"]["task"] == experiment.task
    assert result["chosen"] == outcome.report.chosen
    assert list(result["report"]) == [f"layer{i}" for i in range(1, 9)]
    assert set(result["report"]["layer3"]) == {"conv", "f_fc"}
    assert (out / "report.txt").read_text() == f"{outcome.report}\n"
    assert len((out / "history.jsonl").read_text().splitlines()) == 2
    assert 0 <= outcome.accuracy <= 1


def test_evidence_is_the_best_of_training(finished):
    experiment, _, outcome = finished
    best = max(record["evidence"] or -math.inf for record in outcome.history) / experiment.n_train
    assert outcome.evidence == pytest.approx(best, rel=1e-4)


def test_network_sees_classes_and_quadrants(finished):
    _, _, outcome = finished
    assert outcome.result.model(torch.zeros(2, 1, 32, 32)).shape == (2, 40)


@pytest.mark.parametrize("name", ["layers.png", "evidence.png"])
def test_figures_are_not_blank(finished, name):
    from matplotlib.image import imread

    pixels = imread(finished[1] / name)[::3, ::3, :3]
    assert min(pixels.shape[:2]) > 100
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 30
    assert (pixels < 0.9).any(-1).mean() > 0.01


def test_finished_experiment_is_read_and_not_overwritten(finished):
    experiment, out, outcome = finished
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(FileExistsError, match="--resume"):
        learn_layers(experiment, out)
    again = learn_layers(experiment, out, resume=True)
    assert again == outcome
    assert again.result is None
    assert again.report.as_dict() == outcome.report.as_dict()
    assert again.history == outcome.history
    assert str(again) == str(outcome)
    with pytest.raises(ValueError, match="another experiment: it differs in task, seed"):
        learn_layers(LayerExperiment(task="digit", seed=1, **SMALL), out, resume=True)
    with pytest.raises(ValueError, match="is of another kind of experiment"):
        learn(Experiment(), out, resume=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files


def test_interrupted_experiment_goes_on(finished, tmp_path, monkeypatch):
    experiment, _, whole = finished
    save = marglik.checkpoints.Journal.save

    def dies(journal):
        save(journal)
        if journal._run.epoch == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(marglik.checkpoints.Journal, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        learn_layers(experiment, tmp_path)
    monkeypatch.undo()
    assert not (tmp_path / "result.json").exists()
    resumed = learn_layers(experiment, tmp_path, resume=True)
    assert (resumed.accuracy, resumed.evidence) == (whole.accuracy, whole.evidence)
    assert resumed.report.as_dict() == whole.report.as_dict()


def test_map_keeps_priors_and_estimates_the_evidence_once(tmp_path, monkeypatch):
    monkeypatch.setattr(
        layerwise.importlib.util, "find_spec", lambda _: None
    )  # as without matplotlib
    outcome = learn_layers(LayerExperiment(method="map", kind="conv", **SMALL), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        name for name in FILES if not name.endswith("png")
    }
    assert math.isfinite(outcome.evidence)
    assert all(record["evidence"] is None for record in outcome.history)
    assert set(outcome.result.prior_precisions.values()) == {1.0}
    assert {row.precision for row in outcome.report.rows} == {1.0}
    assert set(outcome.report.chosen.values()) == {"CONV"}


def test_priors_may_be_shared_and_slots_told_apart(monkeypatch):
    seen = []

    def spy(model, loader, **kwargs):
        seen.append((model, loader, kwargs))
        raise KeyboardInterrupt

    monkeypatch.setattr(layerwise, "marglik_training", spy)
    for options in (
        {},
        {"prior_structure": [".*bias"], "per_slot": True, "n_epochs_burnin": 9, "lr": 0.02},
    ):
        with pytest.raises(KeyboardInterrupt):
            learn_layers(LayerExperiment(task="plain", **SMALL | options))
    (_, plain, first), (model, loader, second) = seen
    assert (first["prior_structure"], first["backend_kwargs"]["per_slot"]) == ("layerwise", False)
    assert (second["prior_structure"], second["backend_kwargs"]["per_slot"]) == ((".*bias",), True)
    assert second["n_epochs_burnin"] == 2  # no later than the last epoch
    assert second["scheduler_kwargs"]["T_max"] == 2 * 2
    assert second["optimizer_kwargs"] == {"lr": 0.02}
    assert torch.equal(plain.dataset.tensors[0], loader.dataset.tensors[0])
    assert loader.dataset.tensors[0].shape == (60, 1, 32, 32)
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 10)


def test_rotated_images_differ_and_labels_do_not():
    made = [
        layerwise._data(LayerExperiment(transform=kind, **SMALL))[0].tensors
        for kind in ("original", "fully_rotated")
    ]
    assert torch.equal(made[0][1], made[1][1])
    assert (made[0][0] - made[1][0]).abs().mean() > 0.05


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"task": "place"}, "unknown task 'place'; choose from plain, digit, both"),
        ({"method": "none"}, "unknown method 'none'; choose from evidence, map"),
        ({"kind": "conv+dense"}, "'dense' in 'conv.dense'"),
        ({"transform": "bent"}, "unknown kind 'bent'"),
        ({"width": 0}, "width must be positive, got 0"),
        ({"lr": float("nan")}, "lr must be positive, got nan"),
        ({"n_hypersteps": -1}, "n_hypersteps must not be negative, got -1"),
        (
            {"prior_structure": "paths"},
            "unknown prior_structure 'paths'; choose from layerwise, path, scalar",
        ),
    ],
)
def test_experiments_refuse(options, match):
    with pytest.raises(ValueError, match=match):
        LayerExperiment(**options)


# The command line.


def test_layers_prints_the_report(tmp_path, capfd):
    arguments = [
        "--kind",
        "s_conv",
        "--width",
        "1",
        "--train",
        "40",
        "--test",
        "20",
        "--epochs",
        "1",
        "--prior",
        "path",
    ]
    cli.main(["layers", *arguments, "--out", str(tmp_path / "run")])
    out, err = capfd.readouterr()
    assert (tmp_path / "run" / "report.txt").read_text() in out
    for word in (
        "layer8  s_conv (S-CONV)",
        "test accuracy",
        "log evidence",
        "plain: images as they are",
        "layers.png",
    ):
        assert word in out
    for word in ("1/1", "evidence", "accuracy"):
        assert word in err
    saved = json.loads((tmp_path / "run" / "experiment.json").read_text())
    assert (saved["prior_structure"], saved["per_slot"], saved["n_epochs"]) == ("path", False, 1)
    cli.main(["layers", *arguments, "--out", str(tmp_path / "run"), "--resume", "--quiet"])
    again = capfd.readouterr()
    assert again.out == out
    assert again.err == ""


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--data", "nothing"], "unknown source 'nothing'"),
        (["--data", "mnist", "--root", "nowhere"], "--download"),
        (["--train", "100000"], "n_train must be between"),
        (["--epochs", "0"], "n_epochs must be positive"),
        (["--width", "-1"], "width must be positive, got -1"),
        (["--kind", "conv+conv"], "which has a path twice"),
    ],
)
def test_bad_arguments_are_explained_and_write_nothing(tmp_path, arguments, match):
    with pytest.raises(SystemExit, match=match):
        cli.main(["layers", *arguments, "--quiet", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_unknown_task_is_refused_by_the_parser(tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["layers", "--task", "place", "--out", str(tmp_path / "out")])
    assert error.value.code == 2
    assert "invalid choice: 'place'" in capsys.readouterr().err
