"""Invariant codes from pairs: the layer, the loss, data with a hidden symmetry, and experiments."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from laplace_invariance import cli
from laplace_invariance.autoencoder import (
    InvariantAutoencoder,
    RichLayer,
    inverse_distance_loss,
    network,
)
from laplace_invariance.curvature import check_model
from laplace_invariance.datasets import HiddenShifts, fourier_code
from laplace_invariance.experiments import pairs
from laplace_invariance.experiments.pairs import TASKS, PairExperiment, learn_pairs

PAIR_TASKS = [task for task in TASKS if task != "dft"]
SMALL = {"n_features": 4, "width": 6, "n_train": 70, "n_test": 30, "n_epochs": 2, "batch_size": 32}


# The layer.


def test_rich_layer_is_its_formula():
    layer = RichLayer(3, n_pairs=5)
    x = torch.randn(7, 3)
    y = layer(x)
    assert y.shape == (7, layer.out_features) == (7, 3 + 4 * 5)
    weight, bias = layer.linear.weight.detach(), layer.linear.bias.detach()
    for n in range(7):
        for j in range(5):
            even, odd = (weight[2 * j + k] @ x[n] + bias[2 * j + k] for k in (0, 1))
            norm = math.sqrt(even**2 + odd**2 + layer.eps)
            expected = torch.tensor([norm, even / norm, odd / norm, even * odd / norm**2])
            torch.testing.assert_close(y[n, 3 + j :: 5], expected)
    assert torch.equal(y[:, :3], x)


def test_by_default_the_output_is_three_times_the_input():
    assert RichLayer(10).out_features == RichLayer(10)(torch.randn(2, 10)).shape[1] == 30


def test_gradients_equal_finite_differences():
    layer = RichLayer(3, n_pairs=2)
    assert torch.autograd.gradcheck(layer, torch.randn(4, 3, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-3])
def test_values_and_gradients_are_finite_where_norms_vanish(dtype, scale):
    layer = RichLayer(4, n_pairs=3).to(dtype)
    torch.nn.init.zeros_(layer.linear.bias)
    x = (scale * torch.randn(5, 4, dtype=dtype)).requires_grad_()
    y = layer(x)
    assert torch.isfinite(y).all()
    assert y[:, 7:].abs().max() <= 1  # what is normalised
    gradients = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
    bound = 3 / math.sqrt(layer.eps)
    assert all(torch.isfinite(g).all() for g in gradients)
    assert gradients[2].abs().max() <= len(x) * bound


def test_one_rich_layer_has_the_fourier_transform():
    d = 6
    net = network("rich", d, 3 * d, depth=1, width=2 * d)
    angles = 2 * math.pi * torch.outer(torch.arange(d), torch.arange(d)) / d
    layer, last = net
    with torch.no_grad():
        layer.linear.weight.copy_(torch.stack([angles.cos(), -angles.sin()], 1).flatten(0, 1))
        for module in (layer.linear, last):
            module.bias.zero_()
        last.weight.zero_()
        # columns: input, norm, normalised even, normalised odd, their product; to be: modulus, sine, cosine
        for target, source in enumerate((1, 3, 2)):
            last.weight[target * d : (target + 1) * d, source * d : (source + 1) * d] = torch.eye(d)
    x = 2 * torch.rand(50, d) - 1
    clear = (torch.fft.fft(x).abs() > 0.1).repeat(1, 3)  # elsewhere phases depend on eps
    torch.testing.assert_close(
        net(x)[clear], fourier_code(x)[clear], rtol=0, atol=layer.eps / 0.1**2
    )


def test_networks_have_their_widths_and_curvature():
    rich, selu = (network(layer, 5, 7, depth=2, width=6) for layer in ("rich", "selu"))
    assert [type(module).__name__ for module in rich] == ["RichLayer", "RichLayer", "Linear"]
    assert [module.out_features for module in rich] == [5 + 12, 5 + 24, 7]
    assert [type(module).__name__ for module in selu] == [
        "Linear",
        "SELU",
        "Linear",
        "SELU",
        "Linear",
    ]
    x = torch.randn(3, 5)
    assert rich(x).shape == selu(x).shape == (3, 7)
    assert " no" not in str(check_model(rich))


def test_selu_networks_start_with_unit_variance():
    net = network("selu", 100, 1, depth=6, width=300)
    assert net[:-1](torch.randn(500, 100)).var().item() == pytest.approx(1, abs=0.15)


# The autoencoder and its loss.


def test_codes_are_split_and_decoded_together():
    model = InvariantAutoencoder(torch.nn.Linear(3, 7), torch.nn.Linear(7, 3), n_invariant=2)
    x = torch.randn(5, 3)
    reconstruction, codes = model(x)
    assert (codes.invariant.shape, codes.variant.shape) == ((5, 2), (5, 5))
    torch.testing.assert_close(torch.cat(codes, 1), model.encoder(x))
    torch.testing.assert_close(reconstruction, model.decoder(model.encoder(x)))
    torch.testing.assert_close(model.encode(x).variant, codes.variant)


def test_loss_is_its_formula():
    code, other, distance = torch.randn(5, 3), torch.randn(5, 3), torch.rand(5)
    terms = [
        (1 / (0.5 + 2 * d**2) - 1 / (0.5 + 2 * math.dist(z, w) ** 2)) ** 2
        for z, w, d in zip(code.tolist(), other.tolist(), distance.tolist(), strict=True)
    ]
    assert inverse_distance_loss(code, other, distance, 0.5, 2.0).item() == pytest.approx(
        sum(terms) / 5
    )
    kept = (code - other).norm(dim=1)
    assert inverse_distance_loss(code, other, kept).item() == pytest.approx(0, abs=1e-20)


def test_loss_has_a_gradient_where_codes_are_equal():
    code, distance = torch.randn(4, 3, requires_grad=True), torch.rand(4)
    other = code.detach().clone()
    inverse_distance_loss(code, other, torch.zeros(4)).backward()
    assert torch.equal(code.grad, torch.zeros(4, 3))
    assert torch.autograd.gradcheck(
        lambda z: inverse_distance_loss(z, other.roll(1, 0), distance), code
    )


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: RichLayer(3), "give n_pairs for in_features=3"),
        (lambda: RichLayer(4, 0), "must be positive, got 4, 0 and"),
        (lambda: RichLayer(4, eps=0.0), "must be positive, got 4, 2 and 0.0"),
        (lambda: network("relu", 2, 2, 1, 4), "unknown layer 'relu'; choose from rich, selu"),
        (lambda: network("rich", 2, 2, 1, 5), "width must be even, got 5"),
        (lambda: network("selu", 2, 2, -1, 5), "no negative depth, got .*depth=-1"),
        (
            lambda: InvariantAutoencoder(torch.nn.Identity(), torch.nn.Identity(), 0),
            "n_invariant must be positive",
        ),
        (
            lambda: InvariantAutoencoder(torch.nn.Identity(), torch.nn.Identity(), 3)(
                torch.zeros(2, 3)
            ),
            r"k above n_invariant=3.*\[2, 3\]",
        ),
        (
            lambda: inverse_distance_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 1)),
            r"and \[2, 1\]",
        ),
        (
            lambda: inverse_distance_loss(
                torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), 0.0
            ),
            "got 0.0 and 0.3",
        ),
    ],
)
def test_networks_and_loss_refuse(call, match):
    with pytest.raises(ValueError, match=match):
        call()


# Data.


def test_shift_is_that_of_the_paper():
    x = torch.tensor([[1.0, 2, 3, 4, 5]])
    assert HiddenShifts(5).shifted(x, torch.tensor([[2]])).tolist() == [[4, 5, 1, 2, 3]]


def test_parts_are_shifted_each_for_itself():
    x = torch.tensor([[1.0, 2, 3, 4, 5, 6]])
    assert HiddenShifts(6, 2).shifted(x, torch.tensor([[1, 2]])).tolist() == [[3, 1, 2, 5, 6, 4]]


def test_entries_move_along_the_cycle():
    order = torch.tensor([2, 0, 3, 1])
    x = torch.tensor([[10.0, 11, 12, 13]])
    moved = HiddenShifts(4, order=order).shifted(x, torch.tensor([[1]]))
    for here, there in zip(order.tolist(), order.roll(-1).tolist(), strict=True):
        assert moved[0, there] == x[0, here]


@pytest.mark.parametrize("task", TASKS)
def test_invariants_stay_and_tell_vectors_apart(task):
    symmetry = HiddenShifts.of(task, 6, torch.Generator().manual_seed(1))
    x = torch.randn(40, 6)
    moved = symmetry.moved(x)
    assert (moved - x).abs().amax(1).count_nonzero() > 20
    torch.testing.assert_close(symmetry.invariants(moved), symmetry.invariants(x))
    assert F.pdist(symmetry.invariants(x)).min() > 1e-3


def test_order_of_the_permutation_matters():
    symmetry = HiddenShifts.of("permutation", 6, torch.Generator().manual_seed(1))
    x = torch.randn(40, 6)
    assert (
        symmetry.invariants(HiddenShifts(6).moved(x)) - symmetry.invariants(x)
    ).abs().mean() > 0.1


@pytest.mark.parametrize("order", [None, torch.tensor([4, 2, 0, 1, 5, 3])])
def test_two_vectors_of_one_part_are_not_the_same(order):
    symmetry = HiddenShifts(6, 2, order)
    x, other, distance = symmetry.pairs(2000)
    halves = (symmetry.invariants(x) - symmetry.invariants(other)).unflatten(1, (2, 3)).norm(
        dim=2
    ) < 1e-9
    shares = [(halves.sum(1) == k).double().mean().item() for k in (0, 1, 2)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.05)
    assert torch.equal(distance < 1e-9, halves.all(1))
    assert x.abs().max() <= 1
    assert x.std().item() == pytest.approx(3**-0.5, abs=0.02)


def test_factors_are_between_a_half_and_two():
    x = torch.ones(3000, 4)
    factors = HiddenShifts.of("scaled-shift", 4).moved(x)[:, 0]
    assert factors.log2().min().item() == pytest.approx(-1, abs=0.01)
    assert factors.log2().max().item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("task", "n"), [("shift", 6), ("two-part", 9), ("permutation", 6), ("scaled-shift", 6)]
)
def test_orbit_is_all_of_it(task, n):
    symmetry = HiddenShifts.of(task, 6, torch.Generator().manual_seed(1))
    x = torch.randn(6)
    orbit = symmetry.orbit(x)
    assert orbit.shape == (n, 6)
    assert len(orbit.round(decimals=9).unique(dim=0)) == n
    invariants = symmetry.invariants(orbit)
    torch.testing.assert_close(invariants, symmetry.invariants(x[None]).expand_as(invariants))


def test_draws_repeat_with_a_generator():
    state = torch.get_rng_state()
    drawn = [HiddenShifts(6, 3).pairs(5, torch.Generator().manual_seed(2)) for _ in range(2)]
    torch.testing.assert_close(drawn[0], drawn[1], rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: HiddenShifts(7, 2), "7 features, 2 parts"),
        (lambda: HiddenShifts(3, 3), "of two entries at least: 3 features, 3 parts"),
        (lambda: HiddenShifts(4, max_factor=0.5), "at least 1, got 0.5"),
        (
            lambda: HiddenShifts(3, order=torch.tensor([0, 1, 1])),
            r"permutation of 3 entries, got \[0, 1, 1\]",
        ),
        (
            lambda: HiddenShifts.of("turn", 4),
            "unknown task 'turn'; choose from dft, shift, two-part",
        ),
        (lambda: HiddenShifts(4).moved(torch.zeros(2, 5)), r"\[n, 4\], got shape \[2, 5\]"),
        (lambda: HiddenShifts(4).invariants(torch.zeros(2, 4).long()), "of torch.int64"),
    ],
)
def test_data_refuse(call, match):
    with pytest.raises(ValueError, match=match):
        call()


# Experiments.


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished experiment: what was asked, its directory, and its outcome; no draws are used up."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    out = tmp_path_factory.mktemp("pairs") / "new"
    state = torch.get_rng_state()
    experiment = PairExperiment("two-part", ("rich-1", "selu-2"), **SMALL)
    outcome = learn_pairs(experiment, out)
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_default_dtype(before)
    return experiment, out, outcome


def test_directory_has_everything(finished):
    _, out, outcome = finished
    assert {path.name for path in out.iterdir()} == {"experiment.json", "pairs.png", "result.json"}
    assert json.loads((out / "result.json").read_text()) == outcome.networks
    assert [len(found["history"]) for found in outcome.networks.values()] == [2, 2]
    orbit = outcome.networks["rich-1"]["orbit"]
    assert np.shape(orbit["invariant"]) == (4, 4)
    assert np.shape(orbit["variant"]) == (4, 8)
    for name, model in outcome.models.items():
        assert outcome.networks[name]["parameters"] == sum(p.numel() for p in model.parameters())


def test_figure_is_not_blank(finished):
    from matplotlib.image import imread

    pixels = imread(finished[1] / "pairs.png")[::3, ::3, :3]
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 30


def test_finished_networks_are_read_and_others_trained(finished, tmp_path, monkeypatch):
    experiment, out, outcome = finished
    with pytest.raises(FileExistsError, match="--resume"):
        learn_pairs(experiment, out)
    again = learn_pairs(experiment, out, resume=True)
    assert again == outcome
    assert not again.models
    assert str(again) == str(outcome)
    train = pairs._train

    def dies(experiment, name, *more):
        if name == "selu-2":
            raise KeyboardInterrupt
        return train(experiment, name, *more)

    monkeypatch.setattr(pairs, "_train", dies)
    with pytest.raises(KeyboardInterrupt):
        learn_pairs(experiment, tmp_path)
    monkeypatch.undo()
    resumed = learn_pairs(experiment, tmp_path, resume=True)
    assert list(resumed.models) == ["selu-2"]
    for name in experiment.networks:
        assert resumed.networks[name]["history"] == outcome.networks[name]["history"]


def test_errors_are_those_of_the_networks(finished):
    experiment, _, outcome = finished
    torch.manual_seed(0)
    symmetry = HiddenShifts(4, 2)
    symmetry.pairs(experiment.n_train)
    x, other, distance = symmetry.pairs(experiment.n_test)
    model = outcome.models["rich-1"]
    errors = outcome.errors("rich-1")
    with torch.no_grad():
        loss = inverse_distance_loss(
            model.encode(x).invariant, model.encode(other).invariant, distance
        )
        assert errors["loss"] == pytest.approx(loss.item())
        assert errors["reconstruction"] == pytest.approx((model(x)[0] - x).square().mean().item())
    assert 0 < errors["same"] < errors["different"]


def test_the_taught_code_has_three_parts():
    outcome = learn_pairs(PairExperiment("dft", ("rich-1",), **SMALL))
    errors = outcome.errors("rich-1")
    assert errors["code"] == pytest.approx(
        (errors["modulus"] + errors["sine"] + errors["cosine"]) / 3
    )
    x = torch.randn(5, 4)
    modulus, sine, cosine = fourier_code(x).chunk(3, 1)
    torch.testing.assert_close(
        torch.complex(modulus * cosine, modulus * sine), torch.fft.fft(x + 0j)
    )


@pytest.mark.parametrize("task", PAIR_TASKS)
def test_codes_become_invariant(task):
    experiment = PairExperiment(
        task,
        ("rich-1",),
        n_features=4,
        width=24,
        n_train=4000,
        n_test=500,
        n_epochs=8,
        batch_size=50,
        lr=1e-2,
    )
    outcome = learn_pairs(experiment)
    errors = outcome.errors("rich-1")
    assert errors["same"] < 0.05 * errors["different"]
    assert errors["reconstruction"] < 0.01
    orbit = {
        part: torch.tensor(values) for part, values in outcome.networks["rich-1"]["orbit"].items()
    }
    assert orbit["invariant"].std(0).mean() < 0.5 * orbit["variant"].std(0).mean()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"task": "turn"}, "unknown task 'turn'"),
        (
            {"networks": ("relu-2",)},
            "unknown network 'relu-2'; write layer-depth, such as rich-2, of rich, selu",
        ),
        ({"networks": ("rich",)}, "unknown network 'rich'"),
        ({"networks": ()}, "at least one"),
        ({"networks": ("rich-1", "rich-1")}, "different ones"),
        ({"n_train": 0}, "n_train must be positive and finite, got 0"),
        ({"lr": math.nan}, "lr must be positive and finite, got nan"),
        ({"task": "two-part", "n_features": 7}, "7 features, 2 parts"),
        ({"width": 5}, "width must be even, got 5"),
    ],
)
def test_experiments_refuse(options, match):
    with pytest.raises(ValueError, match=match):
        PairExperiment(**options)


def test_divergence_is_told():
    with pytest.raises(
        FloatingPointError, match="selu-2 is not finite after epoch 1; a smaller lr"
    ):
        learn_pairs(PairExperiment("dft", ("selu-2",), **SMALL, lr=1e200))


# The command line.


def test_pairs_prints_a_table(tmp_path, capfd):
    arguments = [
        "--task",
        "scaled-shift",
        "--networks",
        "rich-1",
        "--features",
        "4",
        "--train",
        "64",
        "--test",
        "9",
    ]
    arguments += ["--epochs", "1", "--out", str(tmp_path / "run")]
    cli.main(["pairs", *arguments])
    out, err = capfd.readouterr()
    assert out.split()[:7] == [
        "network",
        "parameters",
        "loss",
        "same",
        "different",
        "reconstruction",
        "seconds",
    ]
    assert "rich-1" in out
    assert "pairs.png, result.json" in out
    assert "1/1" in err
    cli.main(["pairs", *arguments, "--resume", "--quiet"])
    assert capfd.readouterr().out == out


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--networks", "conv-2"], "unknown network 'conv-2'"),
        (["--epochs", "0"], "n_epochs must be positive"),
    ],
)
def test_bad_arguments_are_explained_and_write_nothing(tmp_path, arguments, match):
    with pytest.raises(SystemExit, match=match):
        cli.main(["pairs", *arguments, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
