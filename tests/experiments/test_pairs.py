"""``pairs``: autoencoders trained from end to end, and its command line."""

import json

import numpy as np
import pytest
import torch
from builders import assert_drawn
from tqdm import trange

from laplace_invariance.autoencoder import inverse_distance_loss
from laplace_invariance.datasets import HiddenShifts, fourier_code
from laplace_invariance.experiments import pairs as module
from laplace_invariance.experiments.choices import PAIRS_TASKS
from laplace_invariance.experiments.pairs import PairsConfig, pairs

SMALL = {"n_features": 4, "width": 6, "n_train": 70, "n_test": 30, "n_epochs": 2, "batch_size": 32}


@pytest.fixture(autouse=True)
def _single_precision(_double_precision):
    """Errors are compared closely here, so precision stays double."""


@pytest.fixture(scope="module")
def finished(run_once):
    """A finished experiment: its configuration, directory and result."""
    config = PairsConfig(task="two-part", networks=("rich-1", "selu-2"), **SMALL)
    return run_once(pairs, config, torch.float64)


def test_directory_has_everything(finished):
    _, out, result = finished
    assert {path.name for path in out.iterdir()} == {"experiment.json", "pairs.png", "summary.json"}
    assert json.loads((out / "summary.json").read_text())["networks"] == result.networks
    assert [len(found["history"]) for found in result.networks.values()] == [2, 2]
    orbit = result.networks["rich-1"]["orbit"]
    assert np.shape(orbit["invariant"]) == (4, 4)
    assert np.shape(orbit["variant"]) == (4, 8)
    for name, model in result.models.items():
        assert result.networks[name]["parameters"] == sum(p.numel() for p in model.parameters())


def test_figure_is_not_blank(finished):
    assert_drawn(finished[1] / "pairs.png")


def test_finished_networks_are_read_and_others_trained(finished, tmp_path, monkeypatch):
    config, out, result = finished
    with pytest.raises(FileExistsError, match="--resume"):
        pairs(config, out)
    again = pairs(config, out, resume=True)
    assert again == result
    assert not again.models
    assert str(again) == str(result)

    def dies(*arguments, desc, **options):
        if desc == "selu-2":
            raise KeyboardInterrupt
        return trange(*arguments, desc=desc, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, "trange", dies)
        with pytest.raises(KeyboardInterrupt):
            pairs(config, tmp_path)
    resumed = pairs(config, tmp_path, resume=True)
    assert list(resumed.models) == ["selu-2"]
    for name in config.networks:
        assert resumed.networks[name]["history"] == result.networks[name]["history"]


def test_errors_are_those_of_the_networks(finished):
    config, _, result = finished
    torch.manual_seed(0)
    symmetry = HiddenShifts(4, 2)
    symmetry.pairs(config.n_train)
    x, other, distance = symmetry.pairs(config.n_test)
    model = result.models["rich-1"]
    errors = result.errors("rich-1")
    with torch.no_grad():
        codes = model.encode(x).invariant, model.encode(other).invariant
        loss = inverse_distance_loss(*codes, distance)
        assert errors["loss"] == pytest.approx(loss.item())
        assert errors["reconstruction"] == pytest.approx((model(x)[0] - x).square().mean().item())
    assert 0 < errors["same"] < errors["different"]


def test_the_taught_code_has_three_parts():
    errors = pairs(PairsConfig(task="dft", networks=("rich-1",), **SMALL)).errors("rich-1")
    parts = errors["modulus"] + errors["sine"] + errors["cosine"]
    assert errors["code"] == pytest.approx(parts / 3)
    x = torch.randn(5, 4)
    modulus, sine, cosine = fourier_code(x).chunk(3, 1)
    coefficients = torch.complex(modulus * cosine, modulus * sine)
    torch.testing.assert_close(coefficients, torch.fft.fft(x + 0j))


def test_the_taught_code_may_be_moduli_and_phases():
    config = PairsConfig(code="phase", networks=("rich-1",), **SMALL)
    errors = pairs(config).errors("rich-1")
    assert list(errors) == ["modulus", "phase", "code", "reconstruction"]
    assert errors["code"] == pytest.approx((errors["modulus"] + errors["phase"]) / 2)
    x = torch.randn(5, 4)
    modulus, phase = fourier_code(x, "phase").chunk(2, 1)
    torch.testing.assert_close(torch.polar(modulus, phase), torch.fft.fft(x + 0j))
    with pytest.raises(ValueError, match="unknown code 'real'"):
        fourier_code(x, "real")


@pytest.mark.parametrize(
    ("part", "shown"),
    [("encoder", ["modulus", "sine", "cosine", "code"]), ("decoder", ["reconstruction"])],
)
def test_a_part_is_trained_alone(tmp_path, part, shown):
    config = PairsConfig(part=part, networks=("selu-1",), **SMALL)
    result = pairs(config, tmp_path)
    assert list(result.errors("selu-1")) == shown
    model = result.models["selu-1"]
    other = {"encoder": model.decoder, "decoder": model.encoder}[part]
    torch.manual_seed(0)
    symmetry = HiddenShifts(4)
    symmetry.pairs(config.n_train)
    symmetry.pairs(config.n_test)
    fresh = module._autoencoder(config, "selu-1")
    untrained = {"encoder": fresh.decoder, "decoder": fresh.encoder}[part]
    for found, expected in zip(other.parameters(), untrained.parameters(), strict=True):
        assert torch.equal(found, expected)
    x = symmetry.pairs(3)[0]
    code, reconstruction = module._taught(config, model, x)
    if part == "encoder":
        assert torch.equal(reconstruction, x)
        assert torch.equal(code, model.encoder(x))
    else:
        assert torch.equal(reconstruction, model.decoder(fourier_code(x)))
        assert result.networks["selu-1"]["orbit"] == {}
    n_trained = sum(p.numel() for p in getattr(model, part).parameters())
    assert result.networks["selu-1"]["parameters"] == n_trained
    assert_drawn(tmp_path / "pairs.png")


def test_parts_and_codes_are_taught_alone():
    with pytest.raises(ValueError, match="options of the task dft, which teaches a code; shift"):
        PairsConfig(task="shift", code="phase")


@pytest.mark.parametrize("task", [task for task in PAIRS_TASKS if task != "dft"])
def test_codes_become_invariant(task):
    sizes = {"n_features": 4, "width": 24, "n_train": 4000, "n_test": 500}
    config = PairsConfig(
        task=task, networks=("rich-1",), **sizes, n_epochs=8, batch_size=50, lr=1e-2
    )
    result = pairs(config)
    errors = result.errors("rich-1")
    assert errors["same"] < 0.05 * errors["different"]
    assert errors["reconstruction"] < 0.01
    orbit = result.networks["rich-1"]["orbit"]
    invariant, variant = (torch.tensor(orbit[part]) for part in ("invariant", "variant"))
    assert invariant.std(0).mean() < 0.5 * variant.std(0).mean()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"task": "two-part", "n_features": 7}, "7 features, 2 parts"),
        ({"width": 5}, "width must be even, got 5"),
    ],
    ids=["halves", "width"],
)
def test_what_cannot_be_built_is_refused_before_anything_is_written(tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        pairs(PairsConfig(**options), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_divergence_is_explained():
    config = PairsConfig(task="dft", networks=("selu-2",), **SMALL, lr=1e30)
    message = "selu-2 is not finite after epoch 1; a smaller lr"
    with pytest.raises(FloatingPointError, match=message):
        pairs(config)


@pytest.mark.parametrize(
    ("task", "network", "lr", "expected"),
    [
        ("dft", "rich-1", None, 3e-3),
        ("dft", "selu-2", None, 1e-2),
        ("shift", "selu-2", None, 3e-3),
        ("dft", "selu-2", 0.5, 0.5),
    ],
    ids=["rich", "selu-taught", "selu-pairs", "given"],
)
def test_step_size_suits_the_layers(monkeypatch, task, network, lr, expected):
    def adam(parameters, lr):
        assert lr == expected
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.optim, "Adam", adam)
    with pytest.raises(KeyboardInterrupt):
        pairs(PairsConfig(task=task, networks=(network,), lr=lr, **SMALL))


# The command line.


def test_pairs_prints_a_table(tmp_path, capfd, run_cli):
    words = "--task scaled-shift --networks rich-1 --features 4 --train 64 --test 9 --epochs 1"
    out = tmp_path / "run"
    run_cli(f"pairs {words} --out", out)
    printed, err = capfd.readouterr()
    columns = ["network", "parameters", "loss", "same", "different", "reconstruction", "seconds"]
    assert printed.split()[:7] == columns
    assert "rich-1" in printed
    assert "pairs.png, summary.json" in printed
    assert "1/1" in err
    run_cli(f"pairs {words} --resume --quiet --out", out)
    assert capfd.readouterr().out == printed


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("--networks conv-2", "unknown network 'conv-2'"),
        ("--epochs 0", "n_epochs must be positive"),
    ],
)
def test_pairs_explains_bad_arguments_and_writes_nothing(tmp_path, run_cli, arguments, match):
    with pytest.raises(SystemExit, match=match):
        run_cli(f"pairs {arguments} --out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
