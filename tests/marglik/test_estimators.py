"""Estimates of the evidence, and the steps on priors and hyperparameters that are taken by them."""

import json
import math

import laplace
import pytest
import torch
from builders import (
    Bad,
    invariant_network,
    labelled_points,
    plain_network,
    shuffled,
    training_settings,
)
from torch import nn
from torch.utils.data import DataLoader

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.marglik import MAP, Augerino, Refit
from laplace_invariance.marglik.loop import Trainer

FEW = {"n_epochs": 4, "n_hypersteps": 2, "optimizer_kwargs": {"lr": 1e-2}}


def trainer_of(model, **changes):
    loader = DataLoader(labelled_points(), batch_size=11)
    return Trainer(model, training_settings(loader, **FEW | changes))


def everything(trainer):
    tensors = {**trainer.model.state_dict(), **trainer.priors.values()}
    return {name: value.clone() for name, value in tensors.items()}


def changed(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


# What steps.


def test_rehearsal_changes_nothing():
    trainer = trainer_of(invariant_network())
    before, random_state = everything(trainer), torch.get_rng_state()
    trainer.estimator.rehearse()
    assert not changed(before, everything(trainer))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert trainer.estimator.margliks == []


@pytest.mark.parametrize(
    ("objective", "stepped"),
    [
        (li.marglik.Evidence(), {"augmentation.eta", "log_precision"}),
        (Augerino(), {"log_precision"}),
    ],
    ids=["Evidence", "Augerino"],
)
def test_an_estimate_steps_priors_and_what_is_learnt_by_evidence(objective, stepped):
    trainer = trainer_of(invariant_network(), objective=objective)
    before = everything(trainer)
    record = trainer.estimator.estimate(epoch=1)
    assert changed(before, everything(trainer)) == stepped
    assert len(trainer.estimator.margliks) == 2
    assert trainer.estimator.best["evidence"] == record["evidence"]
    assert record["hyperparameters"]["augmentation.eta"] == before["augmentation.eta"].tolist()
    assert trainer.model.augmentation.eta.requires_grad
    assert trainer.model.augmentation.eta.grad is None


def test_a_refit_returns_to_where_the_evidence_was_best():
    trainer = trainer_of(invariant_network())
    record = trainer.estimator.estimate(epoch=3)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(1.0)
    final = trainer.estimator.finish(epoch=4)
    assert final.epoch == 3
    assert final.la.log_marginal_likelihood().item() == final.evidence
    assert final.evidence == pytest.approx(record["evidence"], rel=0.05)
    assert final.error == 0


def test_without_an_estimate_the_present_is_the_best():
    trainer = trainer_of(invariant_network(), objective=MAP())
    before = everything(trainer)
    assert trainer.estimator.finish(epoch=4).epoch == 4
    assert not changed(before, everything(trainer))


def test_rounds_of_priors_and_hyperparameters():
    trainer = trainer_of(invariant_network(), n_hypersteps_prior=3, lr_aug=0.05)
    trainer.estimator.estimate(epoch=1)
    assert len(trainer.estimator.margliks) == 6  # two rounds of three
    stepped = abs(trainer.model.augmentation.eta[2].item() - 0.2)
    assert 0.06 < stepped <= 0.1 + 1e-9  # two steps of 0.05


def test_steps_on_priors_do_not_pass_through_the_data():
    calls = []
    for n_hypersteps in (1, 5):
        counter = Bad(lambda self: False)
        trainer = trainer_of(nn.Sequential(invariant_network(), counter), n_hypersteps=n_hypersteps)
        trainer.estimator.estimate(epoch=1)
        calls.append(counter.calls)
    assert calls[0] == calls[1] > 0


# Gradients.


class DifferentiableIn(DataLoader):
    """A loader that lets a tensor require grad in some of its batches only."""

    def __init__(self, loader, tensor, batches):
        super().__init__(loader.dataset, loader.batch_size)
        self.chosen = tensor, batches

    def __iter__(self):
        tensor, batches = self.chosen
        for index, batch in enumerate(super().__iter__()):
            tensor.requires_grad_(index in batches)
            yield batch


def gradient_in(model, loader, batches):
    """The gradient of stock laplace if hyperparameters require grad in some batches only."""
    eta = model.augmentation.eta
    la = laplace.Laplace(model, "classification", "all", "kron", backend=AugmentedGGN)
    la.fit(DifferentiableIn(loader, eta, batches))
    eta.requires_grad_()
    (-la.log_marginal_likelihood()).backward()
    found, eta.grad = eta.grad.clone(), None
    return found


def test_gradient_in_some_batches_is_unbiased():
    """With draws that repeat, the mean over all choices of one batch is the gradient in all."""
    model, loader = invariant_network(draws="grid"), DataLoader(labelled_points(), batch_size=11)
    parts = [3 * gradient_in(model, loader, {i}) for i in range(3)]
    assert not torch.allclose(parts[0], parts[1])
    torch.testing.assert_close(sum(parts) / 3, gradient_in(model, loader, {0, 1, 2}))


@pytest.mark.parametrize("n_hyper_batches", [None, 1, 7], ids=["all", "one", "more than all"])
def test_step_sees_the_gradient_of_the_evidence(monkeypatch, n_hyper_batches):
    """The gradient is that in all batches, or that in the chosen ones divided by their share."""
    seen = []
    monkeypatch.setattr(torch.optim.Adam, "step", spied(torch.optim.Adam.step, seen))
    model, loader = invariant_network(draws="grid"), DataLoader(labelled_points(), batch_size=11)
    still = {"n_epochs": 1, "n_hypersteps": 0, "optimizer_kwargs": {"lr": 0.0}, "lr_aug": 1e-9}
    generator = torch.Generator().manual_seed(1)
    li.marglik_training(model, loader, estimator=Refit(n_hyper_batches, generator), **still)
    (found,) = [gradient for gradient in seen if gradient.shape == (6,)]
    assert model.augmentation.eta.requires_grad
    if n_hyper_batches == 1:
        first = torch.randperm(3, generator=torch.Generator().manual_seed(1))[0].item()
        expected = 3 * gradient_in(model, loader, {first})
    else:
        expected = gradient_in(model, loader, {0, 1, 2})
    torch.testing.assert_close(found, expected)
    assert found[2] != 0


def spied(step, seen):
    """Adam's step, which first keeps the gradient if there is one tensor only."""

    def spy(self, *args, **kwargs):
        parameters = self.param_groups[0]["params"]
        if len(parameters) == 1 and parameters[0].grad is not None:
            seen.append(parameters[0].grad.clone())
        return step(self, *args, **kwargs)

    return spy


# Evidence that is not finite.


def test_one_bad_estimate_is_one_bad_step():
    epoch = [1]
    bad = Bad(lambda self: not self.training and epoch[0] == 2)
    result = li.marglik_training(
        nn.Sequential(plain_network(), bad),
        shuffled(labelled_points()),
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
        nn.Sequential(invariant_network(), bad),
        shuffled(labelled_points()),
        hessian_structure=structure,
        estimator="refit",
        callbacks=[lambda record, model: epoch.__setitem__(0, record["epoch"] + 1)],
        **FEW | {"n_epochs": 6},
    )
    assert result.skipped["priors"] == 2
    missing = [record["evidence"] is None for record in result.history]
    assert missing == [False, False, True, True, False, False]
    etas = [record["hyperparameters"]["0.augmentation.eta"][2] for record in result.history]
    assert etas[1] != etas[2] == etas[3] == etas[4] != etas[5]
    assert json.loads(json.dumps(result.history, allow_nan=False)) == result.history
    assert math.isfinite(result.la.log_marginal_likelihood().item())
