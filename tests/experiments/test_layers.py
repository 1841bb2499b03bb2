"""``layers``: the experiment from end to end, and its command line."""

import json
import math

import pytest
import torch
from builders import assert_drawn

from laplace_invariance import marglik
from laplace_invariance.experiments import layers as module
from laplace_invariance.experiments.layers import LayersConfig, layers
from laplace_invariance.experiments.learn import LearnConfig, learn
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.marglik import Refit, Running
from laplace_invariance.marglik.search import PathSpace

SMALL = {
    "width": 1,
    "n_train": 60,
    "n_test": 30,
    "n_epochs": 2,
    "n_epochs_burnin": 2,
    "marglik_frequency": 2,
    "n_hypersteps": 2,
    "batch_size": 30,
}
FIGURES = {"evidence.png", "layers.png"}
FILES = {
    "checkpoint.pt",
    "experiment.json",
    "history.jsonl",
    "report.html",
    "report.txt",
    "summary.json",
}


@pytest.fixture(scope="module")
def finished(run_once):
    """A finished run: its configuration, directory and result."""
    return run_once(layers, LayersConfig(task="both", **SMALL))


def test_directory_has_everything(finished):
    config, out, result = finished
    assert {path.name for path in out.iterdir()} == FILES | FIGURES
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["accuracy"], summary["evidence"]) == (result.accuracy, result.evidence)
    assert summary["experiment"]["task"] == config.task
    assert summary["chosen"] == result.report.chosen
    assert list(summary["report"]) == [f"layer{i}" for i in range(1, 9)]
    assert set(summary["report"]["layer3"]) == {"conv", "f_fc"}
    assert summary["ablation"] == result.ablation.as_dict()
    assert summary["chosen"] == result.ablation.chosen
    assert summary["search"] is None
    assert (out / "report.txt").read_text() == f"{result.report}\n\n{result.ablation}\n"
    assert len((out / "history.jsonl").read_text().splitlines()) == 2
    assert 0 <= result.accuracy <= 1


def test_evidence_of_forty_classes_is_estimated_with_an_error(finished):
    config, _, result = finished
    training = result.training
    assert result.evidence == training.evidence / config.n_train
    assert result.evidence_error == training.evidence_error / config.n_train > 0
    assert f"{result.evidence:.3f} ± {result.evidence_error:.3f} per training" in str(result)


def test_evidence_of_ten_classes_is_exact():
    result = layers(LayersConfig(kind="conv", **SMALL))
    assert result.evidence == result.training.evidence / 60
    assert result.evidence_error == 0
    assert f"{result.evidence:.3f} per training image" in str(result)
    assert result.training.la.backend.stochastic is False


def test_networks_are_averaged_over_transformations_that_are_learnt(tmp_path):
    options = SMALL | {"n_epochs": 4, "n_epochs_burnin": 1, "marglik_frequency": 1}
    config = LayersConfig(kind="conv+gconv", ranges="rotation", n_samples=2, **options)
    result = layers(config, tmp_path)
    model = result.training.model
    assert isinstance(model, InvariantModel)
    assert set(result.report.chosen) <= {f"net.layer{i}" for i in range(1, 9)}
    assert result.magnitudes["rotation"] == pytest.approx(model.augmentation.eta[2].abs().item())
    assert result.magnitudes["rotation"] not in (0, pytest.approx(module.START_OF_RANGES))
    assert not any(value for name, value in result.magnitudes.items() if name != "rotation")
    assert "averaged over   rotation ±" in str(result)
    again = layers(config, tmp_path, resume=True)
    assert again == result
    assert str(again) == str(result)


@pytest.mark.parametrize("options", [{"method": "map"}, {"start": "search"}])
def test_ranges_are_learnt_by_evidence_alone(options):
    with pytest.raises(ValueError, match="ranges 'affine' are learnt by evidence"):
        LayersConfig(ranges="affine", **options)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, Refit),
        ({"ranges": "rotation"}, Running),
        ({"ranges": "rotation", "augment": True}, Refit),  # of images as they are
        ({"estimator": "running"}, Running),
        ({"estimator": "refit", "ranges": "rotation"}, Refit),
    ],
)
def test_estimator(options, kind):
    assert isinstance(module._estimator(LayersConfig(**options)), kind)


def test_no_estimate_is_of_images_that_were_mirrored_and_shifted():
    with pytest.raises(ValueError, match="with augment, use 'refit'"):
        LayersConfig(estimator="running", augment=True)


def test_network_sees_classes_and_quadrants(finished):
    _, _, result = finished
    assert result.training.model(torch.zeros(2, 1, 32, 32)).shape == (2, 40)


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_figures_are_not_blank(finished, name):
    assert_drawn(finished[1] / name)


def test_finished_run_is_read_and_not_overwritten(finished):
    config, out, result = finished
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(FileExistsError, match="--resume"):
        layers(config, out)
    again = layers(config, out, resume=True)
    assert again == result
    assert again.training is None
    assert again.report.as_dict() == result.report.as_dict()
    assert again.ablation == result.ablation
    assert again.history == result.history
    assert str(again) == str(result)
    with pytest.raises(ValueError, match="another experiment: it differs in task, seed"):
        layers(LayersConfig(task="digit", seed=1, **SMALL), out, resume=True)
    with pytest.raises(ValueError, match="is of another kind of experiment"):
        learn(LearnConfig(), out, resume=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files


def test_interrupted_run_resumes(tmp_path, monkeypatch):
    config = LayersConfig(kind="conv+s_conv", **SMALL)
    whole = layers(config)

    def dies_after_one_epoch(record, model):
        raise KeyboardInterrupt

    def training(*arguments, **options):
        options["callbacks"] = [dies_after_one_epoch]
        return marglik.marglik_training(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, "marglik_training", training)
        with pytest.raises(KeyboardInterrupt):
            layers(config, tmp_path)
    assert not (tmp_path / "summary.json").exists()
    resumed = layers(config, tmp_path, resume=True)
    assert (resumed.accuracy, resumed.evidence) == (whole.accuracy, whole.evidence)
    assert resumed.report.as_dict() == whole.report.as_dict()


def test_map_keeps_priors_and_estimates_the_evidence_once():
    result = layers(LayersConfig(method="map", kind="conv", **SMALL))
    assert math.isfinite(result.evidence)
    assert all(record["evidence"] is None for record in result.history)
    assert set(result.training.prior_precisions.values()) == {1.0}
    assert {row.precision for row in result.report.rows} == {1.0}
    costs = [row.cost for row in result.ablation.rows]
    assert [row.cost for row in result.report.rows] == costs
    assert set(result.report.chosen.values()) <= {"CONV"}


@pytest.fixture
def asked(monkeypatch):
    """Return a function that returns what a configuration asks of ``marglik_training``."""
    seen = []

    def spy(model, loader, **options):
        seen.append((model, loader, options))
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "marglik_training", spy)

    def ask(**options):
        with pytest.raises(KeyboardInterrupt):
            layers(LayersConfig(**SMALL | options))
        return seen.pop()

    return ask


def test_priors_may_be_shared_and_slots_told_apart(asked):
    _, plain, first = asked()
    assert first["backend_kwargs"]["stochastic"] is True
    assert (first["prior_structure"], first["backend_kwargs"]["per_slot"]) == ("layerwise", False)
    model, loader, second = asked(
        prior_structure=[".*bias"], per_slot=True, n_epochs_burnin=9, lr=0.02
    )
    assert (second["prior_structure"], second["backend_kwargs"]["per_slot"]) == ((".*bias",), True)
    assert second["n_epochs_burnin"] == 1  # at most half of the epochs
    assert second["scheduler_kwargs"]["T_max"] == 2 * 2
    assert second["optimizer_kwargs"] == {"lr": 0.02}
    assert torch.equal(plain.dataset.tensors[0], loader.dataset.tensors[0])
    assert loader.dataset.tensors[0].shape == (60, 1, 32, 32)
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 10)


def test_weights_alone_see_mirrored_and_shifted_images(asked):
    torch.manual_seed(0)
    _, loader, options = asked(augment=True)
    images = loader.dataset.tensors[0]
    assert options["marglik_loader"].dataset is loader.dataset
    assert torch.equal(torch.cat([x for x, _ in options["marglik_loader"]]), images)
    one = torch.zeros(1, 32, 32)
    one[0, 10, 4] = 1
    x, _ = loader.collate_fn([(one, torch.tensor(0))] * 400)
    _, rows, columns = x[:, 0].nonzero().unbind(1)
    assert set(rows.tolist()) == set(range(6, 15))
    assert set(columns.tolist()) == {*range(9), *range(23, 32)}


def test_rotated_images_differ_and_labels_do_not(asked):
    upright, labels = asked(transform="original")[1].dataset.tensors
    rotated, same_labels = asked(transform="fully_rotated")[1].dataset.tensors
    assert torch.equal(labels, same_labels)
    assert (upright - rotated).abs().mean() > 0.05


def test_free_paths_start_where_they_are_told(asked):
    precisions, norms = {}, {}
    for start in ("closed", "off", "half-open", "open", "search"):
        model, _, options = asked(start=start)
        precisions[start] = options["prior_prec_init"]
        norms[start] = model.layer2.f_fc.theta_1.weight.norm().item()
        assert (options["search"] is not None) == (start == "search")
    assert norms["off"] == 0
    assert norms["open"] == norms["half-open"] > 50 * norms["closed"] > 0
    inner, outer = (rf"layer2\.f_fc\.theta_{i}\.weight" for i in (2, 1))
    assert precisions["closed"][outer] == precisions["off"][outer] == 1e3
    assert precisions["half-open"][inner] == precisions["closed"][inner] == 4 * 1024
    assert precisions["half-open"][outer] == precisions["open"][inner] == 1.0
    assert precisions["search"] == 1.0


@pytest.fixture
def small_search(monkeypatch):
    """Searches of a few steps, over two candidates."""
    search = marglik.Search(n_steps=1, keep=1, n_rounds=1, n_examples=20)
    monkeypatch.setattr(module, "SEARCH", search)
    first = PathSpace.first
    monkeypatch.setattr(PathSpace, "first", lambda self: first(self)[:2])
    monkeypatch.setattr(PathSpace, "neighbours", lambda self, candidate: [])


def test_search_is_told_kept_and_resumed(tmp_path, small_search):
    few = {"kind": "conv+s_conv", "n_train": 20, "batch_size": 20, "n_epochs": 1}
    config = LayersConfig(start="search", task="digit", **SMALL | few)
    result = layers(config, tmp_path)
    found = marglik.SearchResult.from_state_dict(result.search)
    assert f"starts at: {found.best}" in str(result)
    assert set(found.best.ranges) == {f"layer{i}" for i in range(1, 9)}
    assert {str(trial) for trial in found.trials} == {"off", "closed"}
    again = layers(config, tmp_path, resume=True)
    assert again == result
    assert str(again) == str(result)


# The command line.


def test_layers_prints_the_report(tmp_path, capfd, run_cli):
    words = "--kind s_conv --width 1 --train 40 --test 20 --epochs 1 --prior path"
    out = tmp_path / "run"
    run_cli(f"layers {words} --out", out)
    printed, err = capfd.readouterr()
    report, left_out = (out / "report.txt").read_text().split("\n\n")
    assert report in printed
    assert "all free paths" in left_out
    assert "layer8  s_conv (S-CONV)" in printed
    for word in ("test accuracy", "log evidence", "plain: images as they are", "layers.png"):
        assert word in printed
    for word in ("1/1", "evidence", "accuracy"):
        assert word in err
    saved = json.loads((out / "experiment.json").read_text())
    assert (saved["prior_structure"], saved["per_slot"], saved["n_epochs"]) == ("path", False, 1)
    run_cli(f"layers {words} --resume --quiet --out", out)
    again = capfd.readouterr()
    assert again.out == printed
    assert again.err == ""


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("--data nothing", "unknown source 'nothing'"),
        ("--data mnist --root nowhere", "--download"),
        ("--train 100000", "n_train must be between"),
        ("--epochs 0", "n_epochs must be positive"),
        ("--width -1", "width must be positive and finite, got -1"),
        ("--kind conv+conv", "which has a path twice"),
        ("--kind conv+dense", "'dense' in 'conv.dense'"),
        ("--kind conv --start search --width 1 --train 20", "'conv' has no free path"),
        ("--method map --start open", "start 'open' needs prior precisions of free paths"),
        ("--prior scalar --start search", "start 'search' needs prior precisions"),
        ("--scale 0 --start half-open", "scale must be positive"),
    ],
)
def test_layers_explains_bad_arguments_and_writes_nothing(tmp_path, run_cli, arguments, match):
    with pytest.raises(SystemExit, match=match):
        run_cli(f"layers {arguments} --quiet --out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
