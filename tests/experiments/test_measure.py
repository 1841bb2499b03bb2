"""``measure``: networks trained and measured from end to end, and its command line."""

import json

import pytest
import torch
from builders import assert_drawn, write_images

from laplace_invariance import marglik
from laplace_invariance.experiments import measure as module
from laplace_invariance.experiments.choices import MEASURE_METHODS
from laplace_invariance.experiments.learn import LearnConfig, learn
from laplace_invariance.experiments.measure import MeasureConfig, measure
from laplace_invariance.metrics import JacobianSpectrum

SMALL = {"n_train": 60, "n_test": 20, "n_epochs": 2}
FIGURES = {"invariance.png", "spectra.png"}
FILES = {"experiment.json", "report.txt", "summary.json"}


@pytest.fixture(scope="module")
def finished(run_once):
    """A finished experiment: its configuration, directory and result."""
    return run_once(measure, MeasureConfig(**SMALL))


def test_directory_has_everything(finished):
    config, out, result = finished
    assert {path.name for path in out.iterdir()} == FILES | FIGURES
    summary = json.loads((out / "summary.json").read_text())
    assert summary["experiment"]["group"] == config.group
    assert list(summary["networks"]) == list(MEASURE_METHODS)
    for method, network in result.networks.items():
        assert summary["networks"][method]["accuracy"] == network.accuracy
        assert set(network.invariance) == {"digits", "negatives"}
        assert network.epochs == [1, 2]
        assert isinstance(network.spectra[0], JacobianSpectrum)
        assert len(network.spectra[0].singular_values) == 10
    assert (out / "report.txt").read_text() == f"{result}\n"


def test_networks_are_what_their_names_say(finished):
    networks = finished[2].networks
    for found in networks["tied"].invariance.values():
        assert abs(found.predictive) < 1e-6
        assert found.logit < 1e-6
        assert found.saliency > 1 - 1e-5
    for method in ("plain", "augmented", "regularised"):
        assert networks[method].invariance["digits"].logit > 1e-3
    turns = {"identity", "quarter_turn", "half_turn", "three_quarter_turn"}
    assert set(networks["evidence"].ranges) == turns
    assert networks["plain"].ranges == {}
    assert networks["tied"].accuracy == networks["tied"].accuracy_transformed


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_figures_are_not_blank(finished, name):
    assert_drawn(finished[1] / name)


def test_finished_networks_are_read_and_not_trained_again(finished, monkeypatch):
    config, out, result = finished
    with pytest.raises(FileExistsError, match="--resume"):
        measure(config, out)
    with pytest.raises(ValueError, match="another experiment: it differs in group, seed"):
        measure(MeasureConfig(group="rotations", seed=1, **SMALL), out, resume=True)
    with pytest.raises(ValueError, match="is of another kind of experiment"):
        learn(LearnConfig(), out, resume=True)
    monkeypatch.setattr(module, "marglik_training", None)  # nothing is left to train
    again = measure(config, out, resume=True)
    assert again == result
    assert str(again) == str(result)


def test_interrupted_experiment_resumes(finished, tmp_path, monkeypatch):
    whole = finished[2]
    config = MeasureConfig(methods=("plain", "regularised"), **SMALL)
    calls = []

    def dies_in_the_second_call(*arguments, **options):
        calls.append(options["objective"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return marglik.marglik_training(*arguments, **options)

    monkeypatch.setattr(module, "marglik_training", dies_in_the_second_call)
    with pytest.raises(KeyboardInterrupt):
        measure(config, tmp_path)
    resumed = measure(config, tmp_path, resume=True)
    assert len(calls) == 3  # the first network was read
    for method in config.methods:
        found, expected = resumed.networks[method], whole.networks[method]
        assert (found.invariance, found.spectra) == (expected.invariance, expected.spectra)


def test_networks_of_earlier_calls_stay_in_the_report(tmp_path):
    short = SMALL | {"n_epochs": 1}
    measure(MeasureConfig(methods=("tied",), **short), tmp_path)
    result = measure(MeasureConfig(methods=("plain",), **short), tmp_path, resume=True)
    assert list(result.networks) == ["plain", "tied"]
    assert "tied" in (tmp_path / "report.txt").read_text()


def image_set(images):
    return {tuple(image.flatten().tolist()) for image in images}


def test_images_are_transformed_for_methods_that_learn_from_transformed_ones(monkeypatch):
    epochs = {}

    def spy(model, loader, **options):
        epochs[method] = [image_set(torch.cat([x for x, _ in loader])) for _ in range(2)]
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "marglik_training", spy)
    for method in MEASURE_METHODS:
        with pytest.raises(KeyboardInterrupt):
            measure(MeasureConfig(methods=(method,), **SMALL))
    upright = epochs["plain"][0]
    for method, (first, second) in epochs.items():
        assert (first == second) == (method in ("plain", "tied", "evidence"))
        assert (first == upright) == (method in ("plain", "tied"))


def test_rotations_are_learnt_and_measured():
    config = MeasureConfig(group="rotations", methods=("tied", "evidence"), n_samples=4, **SMALL)
    networks = measure(config).networks
    assert 1e-6 < networks["tied"].invariance["digits"].logit < 1  # sampled, so not exact
    assert "degrees" in networks["evidence"].ranges["rotation"]
    assert list(networks["evidence"].ranges) == ["rotation"]


def test_data_of_one_name_are_refused():
    with pytest.raises(ValueError, match="both called 'digits'"):
        measure(MeasureConfig(shifted="digits", **SMALL))


# The command line.


def test_measure_prints_the_tables(tmp_path, capfd, run_cli):
    some = write_images(tmp_path / "some.npz", 9)
    others = write_images(tmp_path / "others.npz", 9, 1)
    words = f"measure --data {some} --shifted {others} --method plain tied --epochs 1"
    arguments = f"{words} --strength 0.5", "--out", tmp_path / "run"
    run_cli(*arguments)
    out, err = capfd.readouterr()
    assert "some, quarter-turns, seed 0" in out
    for word in ("others", "predictive", "saliency", "singular values", "\n\nfiles", "spectra.png"):
        assert word in out
    assert "plain: trained on images as they are" in err
    saved = json.loads((tmp_path / "run" / "experiment.json").read_text())
    assert (saved["strength"], saved["n_epochs"], saved["group"]) == (0.5, 1, "quarter-turns")
    run_cli(*arguments, "--resume", "--quiet")
    again = capfd.readouterr()
    assert again.out == out
    assert again.err == ""


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("--data nothing", "unknown source 'nothing'"),
        ("--shifted nothing", "unknown source 'nothing'"),
        ("--shifted SIZE", r"images of other are \[1, 11, 11\], and those of digits \[1, 8, 8\]"),
        ("--train 100000", "n_train must be between"),
        ("--strength -1", "strength must be finite and not negative, got -1"),
    ],
)
def test_measure_explains_bad_arguments_and_writes_nothing(tmp_path, run_cli, arguments, match):
    arguments = arguments.replace("SIZE", write_images(tmp_path / "other.npz", 11))
    with pytest.raises(SystemExit, match=match):
        run_cli(f"measure {arguments} --quiet --out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
