"""Networks trained and measured, from end to end, and the command line."""

import json
import math

import numpy as np
import pytest
import torch

from laplace_invariance import cli
from laplace_invariance.experiments import measure as measurement
from laplace_invariance.experiments.learn import Experiment, learn
from laplace_invariance.experiments.measure import (
    METHODS,
    MeasuredNetwork,
    MeasurementExperiment,
    measure,
)
from laplace_invariance.metrics import JacobianSpectrum

SMALL = {"n_train": 60, "n_test": 20, "n_epochs": 2}
FILES = {f"{method}.json" for method in METHODS} | {
    "experiment.json",
    "invariance.png",
    "report.txt",
    "spectra.png",
}


@pytest.fixture
def _single_precision(_double_precision):
    torch.set_default_dtype(torch.float32)


pytestmark = pytest.mark.usefixtures("_single_precision")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished experiment: what was asked, its directory, and what was measured."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    out = tmp_path_factory.mktemp("measure") / "new"
    experiment = MeasurementExperiment(**SMALL)
    state = torch.get_rng_state()
    said = []
    measured = measure(experiment, out=out, say=said.append)
    assert torch.equal(torch.get_rng_state(), state)
    assert said == [f"{method}: {words}" for method, words in METHODS.items()]
    torch.set_default_dtype(before)
    return experiment, out, measured


def test_directory_has_everything(finished):
    _, out, measured = finished
    assert {path.name for path in out.iterdir()} == FILES
    for method, network in measured.networks.items():
        assert MeasuredNetwork.read(out / f"{method}.json") == network
        assert set(network.invariance) == {"digits", "negatives"}
        assert network.epochs == [1, 2]
        assert len(network.spectra[0].singular_values) == 10
    assert (out / "report.txt").read_text() == f"{measured}\n"
    assert isinstance(measured.networks["plain"].spectra[0], JacobianSpectrum)


def test_networks_are_what_their_names_say(finished):
    networks = finished[2].networks
    for found in networks["tied"].invariance.values():
        assert abs(found.predictive) < 1e-6
        assert found.logit < 1e-6
        assert found.saliency > 1 - 1e-5
    for method in ("plain", "augmented", "regularised"):
        assert networks[method].invariance["digits"].logit > 1e-3
    assert set(networks["evidence"].ranges) == {
        "identity",
        "quarter_turn",
        "half_turn",
        "three_quarter_turn",
    }
    assert networks["plain"].ranges == {}
    assert networks["tied"].accuracy == networks["tied"].accuracy_turned


@pytest.mark.parametrize("name", ["invariance.png", "spectra.png"])
def test_figures_are_not_blank(finished, name):
    from matplotlib.image import imread

    pixels = imread(finished[1] / name)[::3, ::3, :3]
    assert min(pixels.shape[:2]) > 100
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 30
    assert (pixels < 0.9).any(-1).mean() > 0.01


def test_finished_experiment_is_read_and_not_overwritten(finished, monkeypatch):
    experiment, out, measured = finished
    with pytest.raises(FileExistsError, match="--resume"):
        measure(experiment, out=out)
    with pytest.raises(ValueError, match="another experiment: it differs in group, seed"):
        measure(MeasurementExperiment(group="rotations", seed=1, **SMALL), out=out, resume=True)
    with pytest.raises(ValueError, match="is of another kind of experiment"):
        learn(Experiment(), out, resume=True)
    monkeypatch.setattr(measurement, "_measure", None)  # nothing is left to train
    again = measure(experiment, out=out, resume=True)
    assert again == measured
    assert str(again) == str(measured)


def test_interrupted_experiment_goes_on(finished, tmp_path, monkeypatch):
    experiment, _, whole = finished
    train, trained = measurement._measure, []

    def dies(experiment, method, *others):
        if method == "regularised" and "regularised" not in trained:
            trained.append(method)
            raise KeyboardInterrupt
        trained.append(method)
        return train(experiment, method, *others)

    monkeypatch.setattr(measurement, "_measure", dies)
    methods = ("plain", "regularised")
    with pytest.raises(KeyboardInterrupt):
        measure(experiment, methods, tmp_path)
    resumed = measure(experiment, methods, tmp_path, resume=True)
    assert trained == ["plain", "regularised", "regularised"]
    for method in methods:
        found, expected = resumed.networks[method], whole.networks[method]
        assert (found.invariance, found.spectra) == (expected.invariance, expected.spectra)


def test_images_are_turned_for_those_who_learn_from_turned_ones():
    split, data = measurement._data(MeasurementExperiment(**SMALL))
    assert torch.equal(data["negatives"], 1 - data["digits"])
    group = measurement.GROUPS["quarter-turns"][0]()

    def epochs(method):
        loader = measurement._loaders(method, group, split)["train_loader"]
        return [
            {tuple(image.flatten().tolist()) for x, _ in loader for image in x} for _ in range(2)
        ]

    upright = {tuple(image.flatten().tolist()) for image in split.x_train}
    for method, (first, second) in ((method, epochs(method)) for method in METHODS):
        assert (first == second) == (method in ("plain", "tied", "evidence"))
        assert (first == upright) == (method in ("plain", "tied"))


def test_rotations_are_learnt_and_measured():
    measured = measure(
        MeasurementExperiment(group="rotations", n_samples=4, **SMALL), ["tied", "evidence"]
    )
    networks = measured.networks
    assert 1e-6 < networks["tied"].invariance["digits"].logit < 1  # sampled, so not exact
    assert "degrees" in networks["evidence"].ranges["rotation"]
    assert list(networks["evidence"].ranges) == ["rotation"]


def test_works_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(measurement.importlib.util, "find_spec", lambda _: None)
    measure(MeasurementExperiment(**SMALL | {"n_epochs": 1}), ["plain"], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "experiment.json",
        "plain.json",
        "report.txt",
    }


# The command line.


def write_images(path, size, seed=0):
    source = np.random.default_rng(seed)
    arrays = {}
    for part, n in (("train", 50), ("test", 20)):
        arrays[f"x_{part}"] = source.integers(0, 256, (n, size, size), dtype=np.uint8)
        arrays[f"y_{part}"] = source.integers(0, 3, n)
    np.savez(path, **arrays)
    return str(path)


def test_measure_prints_the_tables(tmp_path, capfd):
    files = [
        "--data",
        write_images(tmp_path / "some.npz", 9),
        "--shifted",
        write_images(tmp_path / "others.npz", 9, 1),
    ]
    arguments = [
        "measure",
        *files,
        "--method",
        "plain",
        "tied",
        "--epochs",
        "1",
        "--strength",
        "0.5",
    ]
    arguments += ["--out", str(tmp_path / "run")]
    cli.main(arguments)
    out, err = capfd.readouterr()
    for word in (
        "some, quarter-turns, seed 0",
        "others",
        "predictive",
        "saliency",
        "singular values",
        "spectra.png",
    ):
        assert word in out
    assert "plain: trained on images as they are" in err
    saved = json.loads((tmp_path / "run" / "experiment.json").read_text())
    assert (saved["strength"], saved["n_epochs"], saved["group"]) == (0.5, 1, "quarter-turns")
    cli.main([*arguments, "--resume", "--quiet"])
    again = capfd.readouterr()
    assert again.out == out
    assert again.err == ""


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"group": "p4"}, "unknown group 'p4'; choose from quarter-turns, rotations"),
        ({"n_epochs": 0}, "n_epochs must be positive, got 0"),
        ({"n_samples": 0}, "n_samples must be a positive integer, got 0"),
        ({"strength": math.nan}, "strength must be finite and not negative, got nan"),
    ],
)
def test_experiments_refuse(options, match):
    with pytest.raises(ValueError, match=match):
        MeasurementExperiment(**options)


@pytest.mark.parametrize("methods", [[], ["magic"]])
def test_unknown_methods_are_refused(methods):
    with pytest.raises(
        ValueError, match=r"methods must be some of plain, augmented.*got (none|\['magic'\])"
    ):
        measure(MeasurementExperiment(**SMALL), methods)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--data", "nothing"], "unknown source 'nothing'"),
        (["--shifted", "nothing"], "unknown source 'nothing'"),
        (
            ["--shifted", "SIZE"],
            r"images of other are \[1, 11, 11\], and those of digits \[1, 8, 8\]",
        ),
        (["--train", "100000"], "n_train must be between"),
        (["--strength", "-1"], "strength must be finite and not negative, got -1"),
    ],
)
def test_bad_arguments_are_explained_and_write_nothing(tmp_path, arguments, match):
    if "SIZE" in arguments:
        arguments = ["--shifted", write_images(tmp_path / "other.npz", 11)]
    with pytest.raises(SystemExit, match=match):
        cli.main(["measure", *arguments, "--quiet", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_networks_of_earlier_calls_stay_in_the_report(tmp_path):
    experiment = MeasurementExperiment(**SMALL | {"n_epochs": 1})
    measure(experiment, ["plain"], tmp_path)
    assert list(measure(experiment, ["tied"], tmp_path, resume=True).networks) == ["plain", "tied"]
    assert "plain" in (tmp_path / "report.txt").read_text()


def test_data_of_one_name_are_refused():
    with pytest.raises(ValueError, match="both called 'digits'"):
        measure(MeasurementExperiment(**SMALL | {"shifted": "digits"}), ["plain"])
