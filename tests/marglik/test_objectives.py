"""Objectives by which hyperparameters are learnt, other than the evidence."""

import pytest
import torch
from builders import invariant_network, labelled_points, plain_network, shuffled
from torch import nn

import laplace_invariance as li
from laplace_invariance.marglik import MAP, Augerino, Evidence, Objective, Regularised

FEW = {"n_epochs": 4, "n_hypersteps": 2, "optimizer_kwargs": {"lr": 1e-2}}


def train(model, objective, **arguments):
    loader = shuffled(labelled_points())
    return li.marglik_training(model, loader, objective=objective, **FEW, **arguments)


def test_map_learns_nothing_but_weights():
    model = invariant_network()
    result = train(model, MAP())
    assert model.augmentation.eta[2].item() == 0.2
    assert torch.equal(result.prior_precision, torch.ones(4))
    assert result.history[-1]["evidence"] is None
    assert result.best_epoch == 4


@pytest.mark.parametrize("strength", [0.0, 10.0], ids=["by the loss", "by the reward"])
def test_augerino_steps_ranges_in_training_and_priors_by_evidence(strength):
    result = train(invariant_network(), Augerino(strength), lr_aug=0.01, lr_aug_min=0.01)
    rotation = result.history[-1]["hyperparameters"]["augmentation.eta"][2]
    assert result.history[-1]["evidence"] is not None
    assert not torch.equal(result.prior_precision, torch.ones(4))
    if strength:  # 20 batches, each a full step of Adam
        assert rotation == pytest.approx(0.2 + 0.01 * 20, abs=0.02)
    else:
        assert rotation != 0.2


def test_augerino_rewards_only_what_is_learnt():
    augmentation = li.AffinePoints(
        init={"rotation": 0.2, "x_scale": 0.3}, learn="rotation", constraint="softplus"
    )
    result = train(li.InvariantModel(plain_network(), augmentation, 3), Augerino(10.0))
    found = result.history[-1]["ranges"]["augmentation"]
    assert found["rotation"] > 0.25
    assert found["x_scale"] == pytest.approx(0.3)


def test_augerino_needs_an_augmentation():
    with pytest.raises(ValueError, match="wrap the network in InvariantModel"):
        train(plain_network(), Augerino())


def test_an_objective_of_ones_own():
    class Smoothed(Objective):
        estimates = True

        def training_loss(self, model, criterion, x, y):
            return nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)

    result = train(invariant_network(), Smoothed())
    assert result.history[-2]["evidence"] is not None


def test_a_penalty_is_added_to_the_loss_of_an_objective():
    model = plain_network()
    x, y = labelled_points().tensors
    criterion = nn.CrossEntropyLoss()
    for objective in (None, MAP(), Evidence()):
        regularised = Regularised(lambda model, x: x.square().sum(), 0.5, objective)
        found = regularised.training_loss(model, criterion, x, y)
        torch.testing.assert_close(found, criterion(model(x), y) + 0.5 * x.square().sum())
        assert regularised.estimates == (not isinstance(objective, MAP))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Augerino(-1.0), ValueError, "strength must be finite and not negative"),
        (lambda: Augerino(float("nan")), ValueError, "strength must be finite"),
        (lambda: Regularised("error"), TypeError, "penalty must be callable"),
        (lambda: Regularised(max, float("inf")), ValueError, "strength must be finite"),
        (lambda: Regularised(max, 1.0, MAP), TypeError, "objective must be an instance"),
    ],
    ids=[
        "negative strength",
        "strength that is no number",
        "no function",
        "infinite strength",
        "class as objective",
    ],
)
def test_bad_objectives_are_explained(make, error, match):
    with pytest.raises(error, match=match):
        make()
