"""Training by the evidence: the same as laplace's where there is nothing to learn, resumable, and robust."""

import itertools
import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import laplace
import numpy as np
import pytest
import torch
from laplace.curvature import CurvlinopsGGN
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance import datasets
from laplace_invariance.curvature import AugmentedEF, AugmentedGGN
from laplace_invariance.marglik import MAP, Augerino, Objective, checkpoints

FEW = {"n_epochs": 4, "n_hypersteps": 2, "optimizer_kwargs": {"lr": 1e-2}}


def points(n=30, classes=3):
    x = torch.randn(n, 2)
    return TensorDataset(
        x,
        (x[:, 0] > 0).long() + (x.norm(dim=1) > 1.3).long()
        if classes
        else x.norm(dim=1, keepdim=True),
    )


def loader_of(data, batch_size=7, **kwargs):
    return DataLoader(data, batch_size=batch_size, shuffle=True, **kwargs)


def network(outputs=3):
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs))


def invariant(outputs=3, **kwargs):
    augmentation = li.AffinePoints(init={"rotation": 0.2}, learn="rotation", **kwargs)
    return li.InvariantModel(network(outputs), augmentation, n_samples=3)


def without_times(history):
    return [{key: value for key, value in record.items() if key != "seconds"} for record in history]


def bits(state):
    return {name: value.clone() for name, value in state.items()}


def assert_same(one, other):
    """Bit-equal: weights, hyperparameters, priors, histories."""
    assert without_times(one.history) == without_times(other.history)
    assert (one.losses, one.margliks, one.best_epoch) == (
        other.losses,
        other.margliks,
        other.best_epoch,
    )
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
    assert torch.equal(one.prior_precision, other.prior_precision)
    assert one.la.log_marginal_likelihood().item() == other.la.log_marginal_likelihood().item()


# The same as laplace.


OPTIONS = {
    "defaults": {},
    "scalar": {
        "prior_structure": "scalar",
        "temperature": 0.5,
        "sigma_noise_init": 0.7,
        "fix_sigma_noise": True,
    },
    "diag": {
        "marglik_frequency": 2,
        "n_epochs_burnin": 3,
        "prior_prec_init": 3.0,
        "prior_structure": "diag",
    },
}


def known_to_laplace():
    """All combinations but one: laplace has no diagonal prior for Kronecker factors."""
    combinations = itertools.product(
        OPTIONS, ["kron", "diag", "full"], ["classification", "regression"]
    )
    return [names for names in combinations if names[:2] != ("diag", "kron")]


@pytest.mark.parametrize(("options", "structure", "likelihood"), known_to_laplace())
def test_equals_laplace_without_hyperparameters(options, structure, likelihood):
    outputs = 3 if likelihood == "classification" else 1
    # laplace drops the gradient of the noise for Kronecker factors, so there the noise is fixed in both
    options = OPTIONS[options] | ({"fix_sigma_noise": True} if structure == "kron" else {})
    data = points(classes=outputs if outputs > 1 else 0)
    settings = FEW | {"likelihood": likelihood, "hessian_structure": structure, **options}
    found = []
    for train in (laplace.marglik_training, li.marglik_training):
        torch.manual_seed(1)
        model = network(outputs)
        found.append(tuple(train(model, loader_of(data), backend=AugmentedGGN, **settings)))
    (_, _, margliks, losses), (la, _, our_margliks, our_losses) = found
    torch.testing.assert_close(our_losses, losses)
    torch.testing.assert_close(our_margliks, margliks)
    assert la.log_marginal_likelihood().isfinite()


def test_accepts_every_argument_of_laplace():
    import inspect

    theirs = inspect.signature(laplace.marglik_training).parameters
    ours = inspect.signature(li.marglik_training).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name in set(theirs) - {"backend"}:
        assert ours[name].default == theirs[name].default
    assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])


def test_works_with_a_backend_of_laplace():
    result = li.marglik_training(network(), loader_of(points()), backend=CurvlinopsGGN, **FEW)
    assert len(result.margliks) == 8


# What it learns.


def test_result_unpacks_to_four_and_carries_the_rest():
    result = li.marglik_training(
        invariant(), loader_of(points()), valid_loader=loader_of(points(11)), **FEW
    )
    la, model, margliks, losses = result
    assert (la, model, margliks, losses) == (result[0], result[1], result[2], result[3])
    assert len(result) == 4
    assert len(losses) == len(result.history) == 4
    assert len(margliks) == 8
    record = result.history[-1]
    terms = record["log_likelihood"] - 0.5 * (record["log_det_ratio"] + record["scatter"])
    assert record["evidence"] == pytest.approx(terms)
    assert 0 <= record["valid"]["accuracy"] <= 1
    assert set(record["hyperparameters"]) == set(result.hyperparameters) == {"augmentation.eta"}
    assert record["ranges"]["augmentation"]["rotation"] == abs(
        record["hyperparameters"]["augmentation.eta"][2]
    )
    assert len(record["prior_precision"]) == 4
    assert record["seconds"]["train"] > 0
    assert record["skipped"] == {"weights": 0, "priors": 0, "hyperparameters": 0}


def test_best_evidence_restores_weights_hyperparameters_and_priors():
    torch.manual_seed(3)
    kept = {}

    def keep(record, model):
        kept[record["epoch"]] = (
            record,
            {n: p.detach().clone() for n, p in model.named_parameters()},
        )

    # a huge step of eta after every estimate makes early epochs the best
    result = li.marglik_training(
        invariant(), loader_of(points()), callbacks=[keep], lr_aug=1.0, **FEW | {"n_epochs": 8}
    )
    best = max((r for r in result.history), key=lambda r: r["evidence"])
    assert result.best_epoch == best["epoch"]
    assert result.best_epoch < 8
    record, weights = kept[result.best_epoch]
    for name, value in result.model.named_parameters():
        assert torch.equal(value, weights[name])
    assert result.prior_precision.tolist() == record["prior_precision"]
    found = record["hyperparameters"][
        "augmentation.eta"
    ]  # those of its evidence, before their step
    assert found != kept[result.best_epoch + 1][0]["hyperparameters"]["augmentation.eta"]
    assert result.hyperparameters["augmentation.eta"].tolist() == found
    assert result.model.augmentation.eta.tolist() == found
    assert torch.equal(result.la.prior_precision, result.prior_precision)


def gradient_in(model, loader, batches):
    """The gradient that stock laplace delivers if hyperparameters require grad in some of the batches only."""
    from laplace_invariance.marglik.evidence import PartlyDifferentiable

    eta = model.augmentation.eta
    la = laplace.Laplace(model, "classification", "all", "kron", backend=AugmentedGGN)
    la.fit(PartlyDifferentiable(loader, [eta], batches))
    eta.requires_grad_()
    (-la.log_marginal_likelihood()).backward()
    found, eta.grad = eta.grad.clone(), None
    return found


def test_gradient_in_some_batches_is_unbiased():
    """With draws that repeat, the mean over all choices of one of three batches equals the gradient in all of them."""
    model, loader = invariant(draws="grid"), DataLoader(points(), batch_size=11)
    parts = [3 * gradient_in(model, loader, {i}) for i in range(3)]
    assert not torch.allclose(parts[0], parts[1])
    torch.testing.assert_close(sum(parts) / 3, gradient_in(model, loader, {0, 1, 2}))


@pytest.mark.parametrize("n_hyper_batches", [None, 1, 7])
def test_step_sees_the_gradient_of_the_evidence(monkeypatch, n_hyper_batches):
    """That of all batches, or of the chosen ones divided by their share."""
    seen = []
    monkeypatch.setattr(torch.optim.Adam, "step", _spy(torch.optim.Adam.step, seen))
    model, loader = invariant(draws="grid"), DataLoader(points(), batch_size=11)
    still = {"n_epochs": 1, "n_hypersteps": 0, "optimizer_kwargs": {"lr": 0.0}}
    li.marglik_training(
        model,
        loader,
        n_hyper_batches=n_hyper_batches,
        generator=torch.Generator().manual_seed(1),
        lr_aug=1e-9,
        **still,
    )
    (found,) = [g for g in seen if g.shape == (6,)]
    assert model.augmentation.eta.requires_grad
    if n_hyper_batches == 1:
        first = torch.randperm(3, generator=torch.Generator().manual_seed(1))[0].item()
        expected = 3 * gradient_in(model, loader, {first})
    else:
        expected = gradient_in(model, loader, {0, 1, 2})
    torch.testing.assert_close(found, expected)
    assert found[2] != 0


def _spy(step, seen):
    def spied(self, *args, **kwargs):
        parameters = self.param_groups[0]["params"]
        if len(parameters) == 1 and parameters[0].grad is not None:
            seen.append(parameters[0].grad.clone())
        return step(self, *args, **kwargs)

    return spied


def test_model_is_trained_in_train_mode():
    modes = []

    class Watch(nn.Module):
        def forward(self, x):
            modes.append(self.training)
            return x

    li.marglik_training(
        nn.Sequential(Watch(), network()),
        DataLoader(points(), batch_size=30),
        n_epochs=2,
        n_hypersteps=1,
    )
    first = modes.index(False)
    assert True in modes[first:]


def test_training_loss_never_moves_hyperparameters():
    model = invariant()
    result = li.marglik_training(model, loader_of(points()), objective=MAP(), **FEW)
    assert model.augmentation.eta[2].item() == 0.2
    assert torch.equal(result.prior_precision, torch.ones(4))
    assert result.history[-1]["evidence"] is None
    assert result.best_epoch == 4


def test_augerino_moves_them_by_the_loss_and_widens_them_by_its_reward():
    moved = {}
    for strength in (0.0, 10.0):
        torch.manual_seed(0)
        model = invariant()
        result = li.marglik_training(
            model,
            loader_of(points()),
            objective=Augerino(strength),
            lr_aug=0.01,
            lr_aug_min=0.01,
            **FEW,
        )
        moved[strength] = result.history[-1]["hyperparameters"]["augmentation.eta"][2]
        assert result.history[-1]["evidence"] is not None
        assert not torch.equal(result.prior_precision, torch.ones(4))
    assert moved[0.0] != 0.2
    model = li.InvariantModel(
        network(),
        li.AffinePoints(
            init={"rotation": 0.2, "x_scale": 0.3}, learn="rotation", constraint="softplus"
        ),
        3,
    )
    result = li.marglik_training(model, loader_of(points()), objective=Augerino(10.0), **FEW)
    found = result.history[-1]["ranges"]["augmentation"]
    assert found["rotation"] > 0.25
    assert found["x_scale"] == pytest.approx(0.3)  # which is not learnt
    with pytest.raises(ValueError, match="wrap the network in InvariantModel"):
        li.marglik_training(network(), loader_of(points()), objective=Augerino(), **FEW)
    assert moved[10.0] == pytest.approx(
        0.2 + 0.01 * 20, abs=0.02
    )  # 20 batches, each a full step of Adam
    with pytest.raises(ValueError, match="strength"):
        Augerino(-1.0)


def test_an_objective_of_ones_own():
    class Smoothed(Objective):
        estimates = True

        def training_loss(self, model, criterion, x, y):
            return nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)

    result = li.marglik_training(invariant(), loader_of(points()), objective=Smoothed(), **FEW)
    assert result.history[-1]["evidence"] is not None


def test_step_size_follows_half_a_cosine():
    from laplace_invariance.marglik.trainer import Schedule

    schedule = Schedule(11, 0, 1, 1, 1, lr_aug=0.1, lr_aug_min=0.02)
    assert schedule.rate(1) == pytest.approx(0.1)
    assert schedule.rate(11) == pytest.approx(0.02 + 0.08 * (1 + math.cos(math.pi * 10 / 11)) / 2)
    assert [schedule.rate(e) > schedule.rate(e + 1) for e in range(1, 11)] == [True] * 10


def test_rounds_of_priors_and_hyperparameters():
    after = []
    result = li.marglik_training(
        invariant(),
        loader_of(points()),
        n_epochs=1,
        n_hypersteps=2,
        n_hypersteps_prior=3,
        lr_aug=0.05,
        lr_aug_min=0.05,
        callbacks=[lambda record, model: after.append(model.augmentation.eta[2].item())],
    )
    assert len(result.margliks) == 6  # two rounds of three
    assert 0.06 < abs(after[0] - 0.2) <= 0.1 + 1e-9  # two steps of 0.05


def test_loaders_for_the_evidence():
    data = points()
    result = li.marglik_training(invariant(), loader_of(data), marglik_batch_size=30, **FEW)
    assert result.history[-1]["evidence"] is not None
    li.marglik_training(
        invariant(), loader_of(data), marglik_loader=DataLoader(data, batch_size=15), **FEW
    )
    with pytest.raises(ValueError, match="not both"):
        li.marglik_training(
            invariant(),
            loader_of(data),
            marglik_loader=loader_of(data),
            marglik_batch_size=3,
            **FEW,
        )
    with pytest.raises(ValueError, match="evidence is that of the training data"):
        li.marglik_training(
            invariant(), loader_of(data), marglik_loader=loader_of(points(9)), **FEW
        )


def test_validation_data_chooses_nothing():
    data = points()
    found = []
    for valid in (None, DataLoader(points(17), batch_size=5)):
        torch.manual_seed(2)
        found.append(li.marglik_training(invariant(), loader_of(data), valid_loader=valid, **FEW))
    torch.testing.assert_close(found[0].losses, found[1].losses)
    assert found[0].best_epoch == found[1].best_epoch


def test_regression_learns_noise_priors_and_range():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    data = datasets.rotation_regression(100, noise=0.3, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 1))
    augmentation = li.AffinePoints(learn="rotation", draws="sobol")
    model = li.InvariantModel(net, augmentation, 8)
    result = li.marglik_training(
        model,
        loader_of(data, 25),
        "regression",
        n_epochs=150,
        n_epochs_burnin=10,
        marglik_frequency=2,
        marglik_batch_size=100,
        optimizer_kwargs={"lr": 5e-2},
    )
    x, y = data.tensors
    with torch.no_grad():
        residual = (model(x) - y).square().mean().sqrt().item()
    assert result.sigma_noise.item() == pytest.approx(residual, rel=0.2)
    assert 0.25 < result.sigma_noise.item() < 0.45
    assert augmentation.magnitudes()["rotation"] > 2.7
    assert result.prior_precision.log().std() > 1


def test_learns_how_far_signals_are_shifted():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    max_shift = 0.5
    augmentation = li.Sequence(draws="sobol", padding="circular")
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 5))
    li.marglik_training(
        li.InvariantModel(net, augmentation, 8),
        loader_of(datasets.waves(400, max_shift, padding="circular"), 100),
        n_epochs=60,
        n_epochs_burnin=4,
        marglik_frequency=2,
        marglik_batch_size=400,
        optimizer_kwargs={"lr": 5e-3},
    )
    found = augmentation.magnitudes()
    assert found["shift"] == pytest.approx(max_shift, rel=0.15)
    assert found["stretch"] < 0.05


def test_learns_a_range_of_hues_and_nothing_else():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    split = datasets.load("digits", n_train=600)
    orange = torch.tensor([0.9, 0.45, 0.3]).view(3, 1, 1)
    x = datasets.hue_rotated(split.x_train * orange, math.pi)
    augmentation = li.Compose(li.AffineImage(draws="sobol"), li.Colour(draws="sobol"))
    net = nn.Sequential(li.layers.Standardise.of(x), *li.layers.mlp(x.shape[1:], 10, width=50))
    li.marglik_training(
        li.InvariantModel(net, augmentation, 8),
        loader_of(TensorDataset(x, split.y_train), 100),
        n_epochs=60,
        n_epochs_burnin=4,
        marglik_frequency=2,
        n_hypersteps=2,
        marglik_batch_size=300,
        backend_kwargs={"output_rank": 3},
        optimizer_kwargs={"lr": 4e-3},
    )
    found = augmentation.magnitudes()
    assert found.pop("hue") == pytest.approx(math.pi, rel=0.15)
    assert max(found.values()) < 0.1


# What goes wrong.


class Bad(nn.Module):
    """Not finite while ``when`` says so."""

    def __init__(self, when):
        super().__init__()
        self.when, self.calls = when, 0

    def forward(self, x):
        self.calls += 1
        return x * math.nan if self.when(self) else x


def test_bad_training_steps_are_skipped_counted_and_logged(caplog):
    bad = Bad(lambda self: self.training and self.calls % 4 == 0)
    with caplog.at_level(logging.WARNING):
        result = li.marglik_training(nn.Sequential(network(), bad), loader_of(points()), **FEW)
    assert result.skipped["weights"] > 0
    assert result.skipped["priors"] == 0
    assert "step of weights skipped: the objective is not finite" in caplog.text
    assert all(math.isfinite(loss) for loss in result.losses)
    assert all(p.isfinite().all() for p in result.model.parameters())


def test_a_bad_gradient_does_not_reach_the_weights():
    class Kink(nn.Module):
        calls = 0

        def forward(self, x):
            Kink.calls += 1
            # finite, but its derivative at zero is not
            return x + (x - x.detach()).abs().sqrt() if self.training and Kink.calls % 3 == 0 else x

    result = li.marglik_training(nn.Sequential(network(), Kink()), loader_of(points()), **FEW)
    assert result.skipped["weights"] > 0
    assert all(p.isfinite().all() for p in result.model.parameters())


def test_a_bad_batch_does_not_spoil_statistics():
    training_calls = iter(range(100))
    bad = Bad(lambda self: self.training and next(training_calls) == 3)
    model = nn.Sequential(bad, nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    result = li.marglik_training(model, loader_of(points()), **FEW)
    assert result.skipped["weights"] == 1
    assert model[2].running_mean.isfinite().all()


def test_one_bad_estimate_is_one_bad_step():
    epoch = [1]
    bad = Bad(lambda self: not self.training and epoch[0] == 2)
    result = li.marglik_training(
        nn.Sequential(network(), bad),
        loader_of(points()),
        hessian_structure="diag",
        n_epochs=3,
        callbacks=[lambda record, model: epoch.__setitem__(0, record["epoch"] + 1)],
    )
    assert result.skipped["priors"] == 1


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_bad_evidence_is_skipped(structure):
    epoch = [1]
    bad = Bad(lambda self: not self.training and epoch[0] in (3, 4))
    result = li.marglik_training(
        nn.Sequential(invariant(), bad),
        loader_of(points()),
        hessian_structure=structure,
        callbacks=[lambda record, model: epoch.__setitem__(0, record["epoch"] + 1)],
        **FEW | {"n_epochs": 6},
    )
    assert result.skipped["priors"] == 2
    assert [record["evidence"] is None for record in result.history] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    etas = [record["hyperparameters"]["0.augmentation.eta"][2] for record in result.history]
    assert etas[1] != etas[2] == etas[3] == etas[4] != etas[5]
    assert json.loads(json.dumps(result.history, allow_nan=False)) == result.history
    assert math.isfinite(result.la.log_marginal_likelihood().item())


def test_too_many_bad_steps_in_a_row_end_the_run_with_the_last_good_checkpoint(tmp_path):
    path = tmp_path / "run.pt"
    bad = Bad(lambda self: self.calls > 40)
    with pytest.raises(
        FloatingPointError, match=r"3 steps of \w+ in a row .* last good checkpoint, of epoch \d+"
    ) as error:
        li.marglik_training(
            nn.Sequential(network(), bad),
            loader_of(points()),
            checkpoint=path,
            max_bad_steps=3,
            **FEW | {"n_epochs": 40},
        )
    assert str(path) in str(error.value)
    state = checkpoints.read(path)["run"]
    assert 0 < state["epoch"] < 40
    assert all(torch.isfinite(value).all() for value in state["model"].values())


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"likelihood": "poisson"}, ValueError, "'classification' or 'regression'"),
        ({"n_epochs": 0}, ValueError, "n_epochs must be positive"),
        ({"lr_aug": math.inf}, ValueError, "lr_aug must be positive and finite"),
        ({"n_hyper_batches": 0}, ValueError, "n_hyper_batches"),
        (
            {"n_hyper_batches": 1.5},
            ValueError,
            "n_hyper_batches must be positive and finite and whole",
        ),
        ({"n_hypersteps": -1}, ValueError, "n_hypersteps must be finite and at least 0"),
        (
            {"n_hypersteps": 0, "n_hypersteps_prior": 3},
            ValueError,
            "number of rounds and must be positive",
        ),
        ({"lr_aug_min": math.nan}, ValueError, "lr_aug_min must be finite"),
        ({"optimizer_cls": torch.optim.LBFGS}, ValueError, "LBFGS"),
        ({"objective": Augerino}, TypeError, "objective must be an instance"),
        ({"callbacks": print}, TypeError, "callbacks must be a list"),
        (
            {"backend": CurvlinopsGGN},
            ValueError,
            r"no gradient with respect to augmentation\.eta; use backend=AugmentedGGN",
        ),
        (
            {
                "train_loader": DataLoader(
                    TensorDataset(torch.randn(9, 2), torch.zeros(9).long()), 3, sampler=[0, 1, 2]
                )
            },
            ValueError,
            "sampler yields 3 of 9",
        ),
        ({"resume": True}, ValueError, "resume=True needs to know the checkpoint"),
        (
            {"train_loader": DataLoader(TensorDataset(torch.zeros(0, 2), torch.zeros(0)))},
            ValueError,
            "train_loader is empty",
        ),
        ({"train_loader": [1, 2]}, TypeError, "train_loader must be a DataLoader"),
        (
            {"valid_loader": DataLoader(TensorDataset(torch.zeros(0, 2), torch.zeros(0)))},
            ValueError,
            "valid_loader is empty",
        ),
    ],
)
def test_bad_arguments_are_explained(change, error, match):
    arguments = {"model": invariant(), "train_loader": loader_of(points()), **FEW, **change}
    with pytest.raises(error, match=match):
        li.marglik_training(**arguments)


def test_warns_if_there_is_no_estimate():
    with pytest.warns(UserWarning, match="never estimated in 3 epochs"):
        result = li.marglik_training(network(), loader_of(points()), n_epochs=3, n_epochs_burnin=4)
    assert result.margliks == []
    assert (
        repr(result)
        == "Result(epochs=3, best_epoch=3, evidence=None, skipped={'weights': 0, 'priors': 0, 'hyperparameters': 0})"
    )


def test_what_cannot_work_fails_before_training():
    epochs = []
    callbacks = [lambda record, model: epochs.append(record["epoch"])]
    with pytest.raises(NotImplementedError, match=r"1\.weight"):
        li.marglik_training(
            nn.Sequential(network(), nn.PReLU()),
            loader_of(points()),
            n_epochs_burnin=3,
            callbacks=callbacks,
            **FEW,
        )
    with pytest.raises(ValueError, match="Prior precision for Kron"):
        li.marglik_training(
            network(),
            loader_of(points()),
            prior_structure="diag",
            n_epochs_burnin=3,
            callbacks=callbacks,
            **FEW,
        )
    assert epochs == []


def test_a_range_that_is_not_finite_is_refused():
    model = invariant()
    model.augmentation.eta.data[2] = math.nan
    with pytest.raises(ValueError, match=r"augmentation\.eta is not finite"):
        li.marglik_training(model, loader_of(points()), **FEW)


def test_weight_decay_is_the_priors():
    kwargs = {"lr": 0.01, "weight_decay": 0.1}
    with pytest.warns(UserWarning, match="weight decay"):
        li.marglik_training(network(), loader_of(points()), n_epochs=1, optimizer_kwargs=kwargs)
    assert kwargs["weight_decay"] == 0.1
    seen = []
    adam = type(
        "Spied",
        (torch.optim.AdamW,),
        {"step": lambda self, closure=None: seen.append(self.param_groups[0]["weight_decay"])},
    )
    adam.__init__ = lambda self, params, lr=1e-3, weight_decay=0.01: torch.optim.AdamW.__init__(
        self, params, lr=lr, weight_decay=weight_decay
    )
    li.marglik_training(network(), loader_of(points()), n_epochs=1, optimizer_cls=adam)
    assert set(seen) == {0.0}


def test_evidence_is_of_all_examples():
    """Of those, too, that drop_last leaves out of training."""
    torch.manual_seed(0)
    data, model = points(), network()
    still = {"n_epochs": 1, "n_hypersteps": 0, "optimizer_kwargs": {"lr": 0.0}}
    whole = li.marglik_training(model, DataLoader(data, 30), **still)
    part = li.marglik_training(model, DataLoader(data, 16, drop_last=True), **still)
    assert part.history[0]["evidence"] == pytest.approx(whole.history[0]["evidence"])


# Silence.


def test_prints_nothing_unless_asked(capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        li.marglik_training(invariant(), loader_of(points()), **FEW)
    assert capfd.readouterr() == ("", "")
    li.marglik_training(
        invariant(),
        loader_of(points()),
        progress_bar=True,
        valid_loader=loader_of(points(9)),
        **FEW,
    )
    out, err = capfd.readouterr()
    assert out == ""
    for word in ("4/4", "evidence", "accuracy", "rotation"):
        assert word in err


def test_history_can_be_read_while_it_runs(tmp_path):
    path = tmp_path / "history.jsonl"
    lengths = []
    result = li.marglik_training(
        invariant(),
        loader_of(points()),
        history=path,
        callbacks=[lambda record, model: lengths.append(len(path.read_text().splitlines()))],
        **FEW,
    )
    assert lengths == [1, 2, 3, 4]
    assert [json.loads(line) for line in path.read_text().splitlines()] == result.history


# Checkpoints.


class Stop(Exception):
    pass


def stopping_after(epoch):
    def stop(record, model):
        if record["epoch"] == epoch:
            raise Stop

    return stop


def run_of(tmp_path, name="run", data=None, **options):
    """A run with every kind of randomness: loader, draws, dropout, the choice of batches, numpy, Python, callbacks."""
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)

    class Noisy(torch.utils.data.Dataset):
        def __init__(self):
            self.data, self.rng = points(), np.random.default_rng(3)

        def __len__(self):
            return len(self.data)

        def __getitem__(self, i):
            x, y = self.data[i]
            return (
                x + 0.01 * np.random.randn() + 0.01 * random.random() + 0.01 * self.rng.normal(),
                y,
            )

    data = torch.utils.data.Subset(Noisy(), range(25))
    loader = DataLoader(data, 7, shuffle=True, generator=torch.Generator().manual_seed(3))
    net = nn.Sequential(
        nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3)
    )
    augmentation = li.AffinePoints(init={"rotation": 0.2}, learn=("rotation", "x_scale"))
    model = li.InvariantModel(net, augmentation, 3, generator=torch.Generator().manual_seed(4))
    settings = {
        "n_epochs": 6,
        "n_hypersteps": 2,
        "n_hyper_batches": 2,
        "scheduler_cls": torch.optim.lr_scheduler.CosineAnnealingLR,
        "scheduler_kwargs": {"T_max": 30},
        "generator": torch.Generator().manual_seed(5),
        "lr_aug_min": 0.01,
        "optimizer_kwargs": {"lr": np.float64(1e-2)},
        "callbacks": [],
    }
    options["callbacks"] = [lambda record, model: torch.rand(3), *options.get("callbacks", [])]
    return li.marglik_training(
        model,
        loader,
        checkpoint=tmp_path / f"{name}.pt",
        history=tmp_path / f"{name}.jsonl",
        **settings | options,
    )


@pytest.mark.parametrize("epoch", [1, 3, 6])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, epoch):
    whole = run_of(tmp_path, "whole")
    with pytest.raises(Stop):
        run_of(tmp_path, callbacks=[stopping_after(epoch)])
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write('{"epoch": 99}\n{"epo')  # what a killed process may leave
    resumed = run_of(tmp_path, resume=True)
    assert_same(whole, resumed)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert without_times(lines) == without_times(whole.history)
    assert not list(tmp_path.glob(".*"))


def test_resuming_without_a_checkpoint_starts(tmp_path):
    assert_same(run_of(tmp_path, "one", resume=True), run_of(tmp_path, "other"))


def test_resume_can_train_for_longer(tmp_path):
    run_of(tmp_path, n_epochs=3)
    assert len(run_of(tmp_path, resume=True, n_epochs=5).history) == 5
    with pytest.raises(ValueError, match="epoch 5, but n_epochs is 4"):
        run_of(tmp_path, resume=True, n_epochs=4)


def test_changed_settings_are_refused(tmp_path):
    run_of(tmp_path, n_epochs=1)
    with pytest.raises(ValueError, match=r"its temperature is 1\.0 there and 7\.0 here"):
        run_of(tmp_path, n_epochs=2, resume=True, temperature=7.0)
    with pytest.raises(ValueError, match="its objective"):
        run_of(tmp_path, n_epochs=2, resume=True, objective=Augerino(1.0))


def test_other_files_are_left_alone(tmp_path):
    notes = tmp_path / "run.jsonl"
    notes.write_text("my notes\n")
    with pytest.raises(FileExistsError, match=r"no checkpoint .*run\.pt to go on from"):
        run_of(tmp_path, resume=True)
    notes.unlink()
    run_of(tmp_path, n_epochs=1)
    notes.write_text("my notes\n")
    with pytest.raises(ValueError, match="not a history"):
        run_of(tmp_path, n_epochs=2, resume=True)
    assert notes.read_text() == "my notes\n"
    with pytest.raises(ValueError, match="cannot both be"):
        li.marglik_training(
            network(), loader_of(points()), checkpoint=tmp_path / "a", history=tmp_path / "a"
        )
    with pytest.raises(ValueError, match="persistent_workers"):
        li.marglik_training(
            network(),
            loader_of(points(), num_workers=1, persistent_workers=True),
            checkpoint=tmp_path / "b",
        )


def test_nothing_is_overwritten_without_resume(tmp_path):
    run_of(tmp_path, n_epochs=1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match=r"run\.pt exists; resume=True"):
        run_of(tmp_path, n_epochs=1)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_checkpoint_of_another_model_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    li.marglik_training(invariant(), loader_of(points()), checkpoint=path, **FEW)
    before = path.read_bytes()
    for model, match in [
        (invariant(outputs=4), r"net\.2\.weight is \[3, 5\] torch\.float64 there and \[4, 5\]"),
        (network(), "tensors of the model differ"),
    ]:
        weights = bits(model.state_dict())
        with pytest.raises(ValueError, match=match):
            li.marglik_training(model, loader_of(points()), checkpoint=path, resume=True, **FEW)
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="backend is 'AugmentedGGN' there and 'AugmentedEF' here"):
        li.marglik_training(
            invariant(),
            loader_of(points()),
            backend=AugmentedEF,
            checkpoint=path,
            resume=True,
            **FEW,
        )
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["truncated", "text", "empty", "other"])
def test_damaged_checkpoint_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "run.pt"
    run_of(tmp_path, n_epochs=1)
    whole = path.read_bytes()
    if content == "other":
        torch.save({"weights": torch.zeros(3)}, path)
    else:
        path.write_bytes(
            {"truncated": whole[: len(whole) // 2], "text": b"hello", "empty": b""}[content]
        )
    damaged = path.read_bytes()
    with pytest.raises(
        ValueError, match=r"run\.pt is (not a readable checkpoint|a torch file, but not)"
    ):
        run_of(tmp_path, resume=True)
    assert path.read_bytes() == damaged


def test_checkpoint_executes_no_code(tmp_path):
    run_of(tmp_path, n_epochs=2)
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    assert state["run"]["epoch"] == 2


def test_writing_is_atomic(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    checkpoints.write(path, {"a": 1})
    monkeypatch.setattr(torch, "save", lambda state, file: (file.write(b"half"), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        checkpoints.write(path, {"a": 2})
    monkeypatch.undo()
    assert checkpoints.read(path)["a"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]


KILLED = """
import sys, pathlib
sys.path.insert(0, {tests!r})
import torch
torch.set_default_dtype(torch.float64)
from test_training import run_of
result = run_of(pathlib.Path({directory!r}), n_epochs={epochs}, resume=True)
torch.save({{**result.model.state_dict(), "prior": result.prior_precision, "losses": result.losses,
            "margliks": result.margliks}}, {out!r})
"""


def test_killed_run_resumes_bit_equal(tmp_path):
    """SIGKILL at random moments, again and again until the run gets through."""
    epochs = 25

    def start(name):
        (tmp_path / name).mkdir(exist_ok=True)
        code = KILLED.format(
            tests=str(Path(__file__).parent),
            directory=str(tmp_path / name),
            out=str(tmp_path / f"{name}.out"),
            epochs=epochs,
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], env=environment)

    assert start("whole").wait() == 0
    moments = random.Random(0)
    kills = 0
    while True:
        process = start("killed")
        checkpoint = tmp_path / "killed" / "run.pt"
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        while (
            process.poll() is None
            and (checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0) == before
        ):
            time.sleep(0.005)  # until it has got somewhere
        if kills < 4:
            time.sleep(moments.uniform(0, 0.5))
            process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
        kills += 1
    assert kills >= 2
    whole, killed = (
        torch.load(tmp_path / f"{name}.out", weights_only=True) for name in ("whole", "killed")
    )
    for name, value in whole.items():
        assert (
            torch.equal(value, killed[name])
            if isinstance(value, torch.Tensor)
            else value == killed[name]
        ), name
    histories = [
        without_times(
            [json.loads(line) for line in (tmp_path / name / "run.jsonl").read_text().splitlines()]
        )
        for name in ("whole", "killed")
    ]
    assert histories[0] == histories[1]
    assert len(histories[0]) == epochs
