"""``learn``: what it learns, writes, resumes and refuses."""

import dataclasses
import json
import math
from typing import get_args

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from laplace_invariance import AffineImage, plots
from laplace_invariance.experiments import learn as module
from laplace_invariance.experiments.choices import LEARN_METHODS, EstimatorName
from laplace_invariance.experiments.learn import LEARN_NETWORKS, LearnConfig, learn, learnt_model
from laplace_invariance.marglik import Search, log_evidence, training

SMALL = {"n_train": 100, "n_test": 50, "n_epochs": 4, "n_samples": 2, "search": "off"}
WORDS = "--train 100 --test 50 --epochs 4 --samples 2 --search off"
FIGURES = {"evidence.png", "ranges.png", "samples.png", "flow.png"}
FILES = FIGURES | {
    "checkpoint.pt",
    "experiment.json",
    "history.jsonl",
    "model.pt",
    "report.html",
    "summary.json",
}


@pytest.mark.parametrize("method", LEARN_METHODS)
def test_every_method_runs_and_leaves_the_generator_alone(method):
    state = torch.get_rng_state()
    result = learn(LearnConfig(method=method, **SMALL))
    assert torch.equal(torch.get_rng_state(), state)
    assert 0 <= result.accuracy <= 1
    assert math.isfinite(result.evidence)
    assert bool(result.magnitudes) == (method not in ("none", "trivial-augment"))
    if method == "fixed":
        assert result.magnitudes["rotation"] == pytest.approx(math.pi)
        assert result.magnitudes["shear"] == 0
    assert "test accuracy" in str(result)


@pytest.mark.parametrize("net", [net for net in LEARN_NETWORKS if net != "wide-resnet"])
def test_every_network_runs(net):
    config = LearnConfig(net=net, size=12, **SMALL | {"n_epochs": 1})
    assert math.isfinite(learn(config).evidence)


def test_losses_are_averaged_by_one_sample_per_pass_and_none_in_predictions():
    config = LearnConfig(average="losses", method="fixed", **SMALL)
    images = torch.rand(3, 1, 8, 8)
    model = module.build_model(config, "mlp", 10, images)
    assert model.n_samples == 1
    with torch.no_grad():
        torch.testing.assert_close(model(images), model.net(images))
    assert not torch.allclose(model(images), model.net(images))
    assert module._estimator(config).oversampling == 1
    assert module._search(LearnConfig(average="losses")).oversampling == 1
    assert module._search(LearnConfig()) is True
    assert module._search(config) is False
    assert math.isfinite(learn(config).evidence)


def test_the_wide_network_is_four_times_as_wide():
    narrow, wide = (
        LEARN_NETWORKS[name]((1, 8, 8), 10).classifier.in_features
        for name in ("resnet", "wide-resnet")
    )
    assert wide == 4 * narrow


def test_augerino_as_published_keeps_its_weight_decay(monkeypatch):
    seen = {}

    def spy(model, loader, **options):
        seen.update(options, model=model)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "marglik_training", spy)
    with pytest.raises(KeyboardInterrupt):
        learn(LearnConfig(method="augerino-published", **SMALL))
    n_train = len(seen["marglik_loader"].dataset)
    assert seen["prior_prec_init"] == pytest.approx(1e-4 * n_train)
    assert (seen["objective"].strength, seen["objective"].estimates) == (0.01, False)
    assert seen["model"].augmentation.half_widths().abs().max() == 0
    assert seen["search"] is False


def test_methods_share_images_and_initial_weights(monkeypatch):
    seen = []

    def spy(model, loader, **kwargs):
        net = getattr(model, "net", model)
        weights = [parameter.detach().clone() for parameter in net.parameters()]
        images = [kwargs[f"{kind}_loader"].dataset.tensors[0] for kind in ("marglik", "valid")]
        seen.append([*images, *weights])
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "marglik_training", spy)
    for method in LEARN_METHODS:
        with pytest.raises(KeyboardInterrupt):
            learn(LearnConfig(method=method, **SMALL))
    for tensors in seen[1:]:
        for found, expected in zip(tensors, seen[0], strict=True):
            assert torch.equal(found, expected)


@pytest.fixture
def asked(monkeypatch, run_cli):
    """Return a function that returns what a command asks of ``marglik_training``."""
    seen = []

    def spy(model, loader, **options):
        seen.append(options)
        raise KeyboardInterrupt

    def ask(words, out):
        verb, _, rest = words.partition(" ")
        with monkeypatch.context() as patch:
            patch.setattr(module, "marglik_training", spy)
            with pytest.raises(SystemExit, match="interrupted"):
                run_cli(f"{verb} {WORDS} {rest} --quiet --out", out)
        return seen.pop()

    return ask


@pytest.mark.parametrize("verb", ["learn", "compare --method evidence --transform original"])
def test_estimator_and_subset_of_weights_reach_training(asked, tmp_path, verb):
    options = asked(f"{verb} --estimator refit --subset-of-weights last-layer", tmp_path / "a")
    assert (options["estimator"], options["subset_of_weights"]) == ("refit", "last_layer")
    options = asked(verb, tmp_path / "b")
    assert (options["estimator"], options["subset_of_weights"]) == ("running", "all")
    assert options["backend_kwargs"] == {"stochastic": True}
    assert options["search"] is False
    assert asked(f"{verb} --search on", tmp_path / "c")["search"] is True


def test_only_ranges_that_evidence_learns_are_searched(asked, tmp_path):
    for method in LEARN_METHODS:
        words = f"compare --transform original --method {method} --search on"
        options = asked(words, tmp_path / method)
        assert options["search"] is (method == "evidence")
        # which sees minibatches of training, must not see augmented ones
        assert options["estimator"] == ("refit" if method == "trivial-augment" else "running")


def test_a_search_is_reported_drawn_and_read_again(tmp_path, monkeypatch):
    quick = Search(n_steps=4, keep=1, n_rounds=1)
    monkeypatch.setattr(training, "_chosen_search", lambda search: quick)
    config = LearnConfig(**SMALL | {"search": "on", "n_epochs": 2})
    result = learn(config, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES | {"search.png"}
    best = result.training.search.best
    assert result.search["best"]["ranges"] == best.ranges
    n_candidates = len(result.search["trials"])
    assert f"search          {n_candidates} candidates, starts with " in str(result)
    again = learn(config, tmp_path, resume=True)
    assert again.summary() == result.summary()
    assert str(again) == str(result)


@pytest.mark.parametrize("estimator", get_args(EstimatorName))
def test_every_estimator_ends_with_the_exact_evidence(estimator):
    result = learn(LearnConfig(estimator=estimator, **SMALL | {"n_epochs": 6}))
    training = result.training
    assert result.evidence == training.evidence / 100
    assert (result.evidence_error, result.n_samples) == (0.0, 2)
    assert training.la.backend.stochastic is False
    assert training.la.log_marginal_likelihood().item() == pytest.approx(training.evidence)
    estimates = [record["evidence"] for record in training.history]
    assert training.evidence not in estimates
    compared = f"; with 32, to compare: {result.evidence_compared:.3f}\n"
    assert f"per training image, 2 samples{compared}" in str(result)


def test_evidences_are_compared_with_32_samples():
    """A few random directions come close to what all of them give."""
    config = LearnConfig(method="fixed", **SMALL)
    result = learn(config)
    model, data = learnt_model(result, None)
    exact = log_evidence(model, DataLoader(data, 50), n_samples=32) / len(data)
    assert result.evidence_compared == pytest.approx(exact, abs=0.02)
    assert abs(result.evidence - exact) > 0.05  # with two samples


def test_evidence_of_the_last_layer_is_called_so():
    result = learn(LearnConfig(subset_of_weights="last_layer", **SMALL))
    assert "per training image, of the last layer, 2 samples; with 32" in str(result)
    assert len(result.training.la.mean) == sum(
        parameter.numel() for parameter in result.training.model.net[-1].parameters()
    )


def test_evidence_is_shown_with_its_error():
    result = learn(LearnConfig(method="none", **SMALL | {"n_epochs": 1}))
    assert result.n_samples == 1
    assert "per training image\n" in str(result)
    assert result.comparable == result.evidence
    estimated = dataclasses.replace(result, evidence=-1.5, evidence_error=0.004)
    assert "log evidence    -1.500 ± 0.004 per training image\n" in str(estimated)
    assert estimated.summary()["evidence_error"] == 0.004


def test_training_images_are_augmented_and_those_of_the_evidence_are_not(monkeypatch):
    def spy(model, loader, **kwargs):
        upright = kwargs["marglik_loader"].dataset.tensors[0]
        images = torch.cat([x for x, _ in loader])
        assert images.shape == upright.shape
        assert images.dtype == upright.dtype
        assert 0 <= images.min() < images.max() <= 1
        rows = {tuple(image.flatten().tolist()) for image in upright}
        assert sum(tuple(image.flatten().tolist()) in rows for image in images) < len(images) / 2
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "marglik_training", spy)
    with pytest.raises(KeyboardInterrupt):
        learn(LearnConfig(method="trivial-augment", **SMALL))


def test_directory_has_everything_and_is_not_overwritten(tmp_path):
    config, out = LearnConfig(**SMALL), tmp_path / "new"
    result = learn(config, out)
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(files) == FILES
    assert all(files[name].startswith(b"\x89PNG") for name in FIGURES)
    summary = json.loads(files["summary.json"])
    assert summary["ranges"]["rotation"].endswith("degrees")
    assert summary["magnitudes"] == result.magnitudes
    assert (summary["evidence"], summary["evidence_error"]) == (result.evidence, 0.0)
    assert summary["n_samples"] == 2
    assert len(files["history.jsonl"].splitlines()) == 4
    with pytest.raises(FileExistsError, match="--resume"):
        learn(config, out)
    again = learn(config, out, resume=True)
    assert again == result
    assert again.training is None
    with pytest.raises(ValueError, match="another experiment: it differs in seed"):
        learn(LearnConfig(**SMALL, seed=1), out, resume=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files


@pytest.fixture
def unfinished(tmp_path, monkeypatch):
    """The directory of a run that died after training, before its summary was written."""
    with monkeypatch.context() as patch:
        patch.setattr(plots, "flow", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            learn(LearnConfig(**SMALL), tmp_path)
    return tmp_path


def test_interrupted_run_resumes(unfinished):
    whole = learn(LearnConfig(**SMALL))
    with pytest.raises(ValueError, match="another experiment: it differs in transform, seed"):
        learn(LearnConfig(transform="translated", seed=5, **SMALL), unfinished, resume=True)
    resumed = learn(LearnConfig(root="elsewhere", **SMALL), unfinished, resume=True)
    for name in ("accuracy", "evidence", "magnitudes"):
        assert getattr(resumed, name) == getattr(whole, name)
    assert {path.name for path in unfinished.iterdir()} == FILES


def test_truncated_checkpoint_is_refused(unfinished, run_cli):
    path = unfinished / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(SystemExit, match="not a readable checkpoint"):
        run_cli(f"learn {WORDS} --quiet --resume --out", unfinished)
    assert len(path.read_bytes()) == 1000


def test_scale_correlation_is_that_of_samples():
    augmentation = AffineImage(init={"x_scale": 0.3, "y_scale": 0.2}, correlated=True)
    augmentation.mixing.data[4, 3] = 0.4
    coefficients = augmentation.coefficients(augmentation.sample(20000, 1)).flatten(0, 1)
    expected = np.corrcoef(coefficients[:, [3, 4]].detach().numpy().T)[0, 1]
    found = module._scale_correlation(LearnConfig(correlated=True), augmentation)
    assert found == pytest.approx(expected, abs=0.02)


# The command line.


def test_learn_prints_words(tmp_path, capfd, run_cli):
    arguments = f"learn {WORDS} --transform fully-rotated", "--out", tmp_path / "run"
    run_cli(*arguments)
    out, err = capfd.readouterr()
    for word in ("rotation        ±", "true ±180.0 degrees", "test accuracy", "history.jsonl"):
        assert word in out
    for word in ("4/4", "evidence", "accuracy", "rotation"):
        assert word in err
    run_cli(*arguments, "--resume", "--quiet")
    again = capfd.readouterr()
    assert again.out == out
    assert again.err == ""


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("--data nothing", "unknown source 'nothing'"),
        ("--data missing.npz", "there is no file missing.npz"),
        ("--data mnist --root nowhere", "--download"),
        ("--train 100000", "n_train must be between"),
        ("--epochs 0", "n_epochs must be positive"),
        ("--samples 0", "n_samples must be positive"),
        ("--method augerino --strength -1", "strength must be finite and not negative"),
        ("--method fixed --fixed twist=1", "no generator 'twist'"),
        (
            "--estimator kernel --subset-of-weights last-layer",
            "the kernel bound is that of all weights; choose another estimator",
        ),
    ],
)
def test_learn_explains_bad_arguments_and_writes_nothing(tmp_path, run_cli, arguments, match):
    with pytest.raises(SystemExit, match=match):
        run_cli(f"learn {arguments} --quiet --out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_data_without_labels_are_refused(tmp_path, run_cli):
    images = np.zeros((9, 8, 8), np.uint8)
    np.savez(tmp_path / "images.npz", x_train=images, x_test=images)
    with pytest.raises(SystemExit, match="lacks y_train, y_test"):
        run_cli("learn --quiet --data", tmp_path / "images.npz", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
