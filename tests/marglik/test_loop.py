"""The epoch loop: what it steps, skips, reports and shows."""

import json
import logging
import math

import pytest
import torch
import tqdm
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
from laplace_invariance.layers.sparse import SparseLinear2d
from laplace_invariance.marglik import MAP, Running, checkpoints
from laplace_invariance.marglik.loop import Trainer
from laplace_invariance.marglik.randomness import RandomStates
from laplace_invariance.marglik.records import record_of
from laplace_invariance.marglik.tracking import scalars

FEW = {"n_epochs": 4, "n_hypersteps": 2, "optimizer_kwargs": {"lr": 1e-2}}


def trainer_of(model, **arguments):
    return Trainer(model, training_settings(DataLoader(labelled_points(), 10), **arguments))


def train(trainer):
    random_states = RandomStates(trainer.model, [])
    journal = checkpoints.Journal(trainer, random_states, trainer.settings.output)
    journal.open()
    trainer.train(journal, random_states)


# Training.


def test_model_is_trained_in_train_mode():
    modes = []

    class Watch(nn.Module):
        def forward(self, x):
            modes.append(self.training)
            return x

    model = nn.Sequential(Watch(), plain_network())
    li.marglik_training(model, DataLoader(labelled_points(), 30), n_epochs=2, n_hypersteps=1)
    first_estimate = modes.index(False)
    assert True in modes[first_estimate:]


def test_scheduler_steps_with_every_batch():
    rates = []

    def keep_rate(record, model):
        rates.append(trainer.state_dict()["optimizer"]["param_groups"][0]["lr"])

    trainer = trainer_of(
        plain_network(),
        optimizer_kwargs={"lr": 1.0},
        scheduler_cls=torch.optim.lr_scheduler.ExponentialLR,
        scheduler_kwargs={"gamma": 0.5},
        n_epochs=2,
        callbacks=[keep_rate],
    )
    train(trainer)
    assert rates == [0.5**3, 0.5**6]


def test_steps_hyperparameters_whose_domain_is_restored_in_place():
    layer = SparseLinear2d(1, 2, 4, learn_omega="hyperparameter", scale=0.01)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(32, 3))
    data = torch.utils.data.TensorDataset(torch.randn(10, 1, 4, 4), torch.arange(10) % 3)
    result = li.marglik_training(model, DataLoader(data, 5), **FEW, estimator="refit")
    omegas = [record["hyperparameters"]["0.basis_in.omega"] for record in result.history]
    assert omegas[0] != omegas[-1]
    assert all(omega > [0.0] for omega in omegas)


def test_a_range_that_is_not_finite_is_refused():
    model = invariant_network()
    model.augmentation.eta.data[2] = math.nan
    with pytest.raises(ValueError, match=r"augmentation\.eta is not finite"):
        li.marglik_training(model, shuffled(labelled_points()), **FEW)


def test_state_of_a_trainer_is_that_of_another():
    trained, other = (trainer_of(invariant_network(), **FEW) for _ in range(2))
    train(trained)
    trained.guard.skip("priors", "a test")
    other.load_state_dict(trained.state_dict())
    assert other.epoch == 4
    assert other.history == trained.history
    for name, value in trained.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name])
    assert other.signature() == trained.signature()
    assert other.guard.state_dict() == trained.guard.state_dict()
    assert torch.equal(other.priors.precision, trained.priors.precision)


# Steps that are not finite.


def test_bad_training_steps_are_skipped_counted_and_logged(caplog):
    bad = Bad(lambda self: self.training and self.calls % 4 == 0)
    model = nn.Sequential(plain_network(), bad)
    with caplog.at_level(logging.WARNING):
        result = li.marglik_training(model, shuffled(labelled_points()), **FEW)
    assert result.skipped["weights"] > 0
    assert result.skipped["priors"] == 0
    assert "step of weights skipped: the objective is not finite" in caplog.text
    assert all(math.isfinite(loss) for loss in result.losses)
    assert all(p.isfinite().all() for p in result.model.parameters())


@pytest.mark.parametrize("lr", [math.inf, 1e300])
def test_a_run_that_diverged_ends_in_a_clear_error(lr):
    """Weights are not finite, or so large that the evidence is not."""
    arguments = {"n_epochs": 1, "optimizer_kwargs": {"lr": lr}}
    match = "training ended where the evidence is not finite: .*; take smaller steps"
    with pytest.raises(FloatingPointError, match=match):
        li.marglik_training(invariant_network(), shuffled(labelled_points()), **arguments)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_training_without_gradients_is_refused(mode):
    model = invariant_network()
    with getattr(torch, mode)(), pytest.raises(RuntimeError, match=rf"torch\.{mode}\(\) around"):
        li.marglik_training(model, shuffled(labelled_points()), n_epochs=1)


def test_numbers_that_are_not_finite_are_null_in_the_history(tmp_path):
    path = tmp_path / "run.jsonl"
    trainer = trainer_of(plain_network(), n_epochs=1, history=path)
    trainer.priors.log_precision.data.fill_(800.0)  # whose exponential overflows
    trainer.losses.append(math.nan)
    record = record_of(trainer, {}, None, {"train": 0.0, "estimate": 0.0})
    assert (record["loss"], set(record["prior_precisions"].values())) == (None, {None})
    assert set(record["prior_precision"]) == {None}
    journal = checkpoints.Journal(trainer, RandomStates(trainer.model, []), trainer.settings.output)
    with journal:
        journal.append(record | {"mine": [math.inf]})  # which a callback may have put there

    def refuse(text):
        raise AssertionError(f"{text} is no JSON")

    read = json.loads(path.read_text(), parse_constant=refuse)
    assert read == record | {"mine": [None]}
    assert "loss" not in scalars(read)


def test_a_bad_gradient_does_not_reach_the_weights():
    class Kink(nn.Module):
        calls = 0

        def forward(self, x):
            Kink.calls += 1
            if not self.training or Kink.calls % 3:
                return x
            return x + (x - x.detach()).abs().sqrt()  # finite, but its derivative at zero is not

    model = nn.Sequential(plain_network(), Kink())
    result = li.marglik_training(model, shuffled(labelled_points()), **FEW)
    assert result.skipped["weights"] > 0
    assert all(p.isfinite().all() for p in result.model.parameters())


def test_a_bad_batch_does_not_spoil_statistics():
    training_calls = iter(range(100))
    bad = Bad(lambda self: self.training and next(training_calls) == 3)
    model = nn.Sequential(bad, nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    result = li.marglik_training(model, shuffled(labelled_points()), **FEW)
    assert result.skipped["weights"] == 1
    assert model[2].running_mean.isfinite().all()


def test_too_many_bad_steps_in_a_row_end_the_run_with_the_last_good_checkpoint(tmp_path):
    path = tmp_path / "run.pt"
    bad = Bad(lambda self: self.calls > 40)
    model = nn.Sequential(plain_network(), bad)
    arguments = FEW | {"n_epochs": 40, "max_bad_steps": 3, "checkpoint": path}
    match = r"3 steps of \w+ in a row .* last good checkpoint, of epoch \d+"
    with pytest.raises(FloatingPointError, match=match) as error:
        li.marglik_training(model, shuffled(labelled_points()), **arguments)
    assert str(path) in str(error.value)
    state = checkpoints.read(path)["run"]
    assert 0 < state["epoch"] < 40
    assert all(torch.isfinite(value).all() for value in state["model"].values())


# Reports.


@pytest.mark.parametrize("classes", [3, 0], ids=["classification", "regression"])
def test_validation_is_that_of_the_model_on_other_data(classes):
    data, other = labelled_points(30, classes), labelled_points(17, classes)
    model = plain_network(classes or 1)
    found = {}

    def evaluate(record, model):
        x, y = other.tensors
        with torch.no_grad():
            outputs = model.eval()(x)
        if classes:
            found["loss"] = nn.functional.cross_entropy(outputs, y).item()
            found["accuracy"] = (outputs.argmax(1) == y).double().mean().item()
        else:
            found["loss"] = nn.functional.mse_loss(outputs, y).item()
        assert record["valid"] == pytest.approx(found)

    likelihood = "classification" if classes else "regression"
    loader = DataLoader(other, batch_size=5)
    li.marglik_training(
        model, shuffled(data), likelihood, valid_loader=loader, callbacks=[evaluate], **FEW
    )
    assert found


def test_validation_chooses_nothing():
    data = labelled_points()
    found = []
    for valid in (None, DataLoader(labelled_points(17), batch_size=5)):
        torch.manual_seed(2)
        model = invariant_network()
        found.append(li.marglik_training(model, shuffled(data), valid_loader=valid, **FEW))
    assert found[0].losses == found[1].losses
    assert found[0].best_epoch == found[1].best_epoch


def test_validates_when_the_evidence_is_due_and_at_the_end():
    result = li.marglik_training(
        plain_network(),
        shuffled(labelled_points()),
        valid_loader=shuffled(labelled_points(9)),
        marglik_frequency=2,
        **FEW | {"n_epochs": 5},
    )
    assert [record["valid"] is not None for record in result.history] == [0, 1, 0, 1, 1]
    assert [record["evidence"] is not None for record in result.history] == [0, 1, 0, 1, 0]


def test_progress_bar_shows_what_is_known(capfd):
    li.marglik_training(
        invariant_network(),
        shuffled(labelled_points()),
        progress_bar=True,
        valid_loader=shuffled(labelled_points(9)),
        **FEW,
    )
    out, err = capfd.readouterr()
    assert out == ""
    for word in ("4/4", "loss", "evidence", "accuracy", "rotation"):
        assert word in err


def test_progress_bar_says_what_is_going_on(monkeypatch):
    said = []
    monkeypatch.setattr(tqdm.tqdm, "set_description", lambda bar, words: said.append(words))
    run = {"n_epochs": 5, "n_epochs_burnin": 3, "progress_bar": True}
    li.marglik_training(
        invariant_network(), shuffled(labelled_points()), estimator=Running(settle=0.2), **run
    )
    assert said[:5] == ["burn-in", "burn-in", "learning", "learning", "only weights"]
    said.clear()
    li.marglik_training(plain_network(), shuffled(labelled_points()), objective=MAP(), **run)
    assert said[:5] == ["training"] * 5  # then laplace has a bar of its own


def test_history_can_be_read_while_it_runs(tmp_path):
    path = tmp_path / "history.jsonl"
    lengths = []
    result = li.marglik_training(
        invariant_network(),
        shuffled(labelled_points()),
        history=path,
        callbacks=[lambda record, model: lengths.append(len(path.read_text().splitlines()))],
        **FEW,
    )
    assert lengths == [1, 2, 3, 4]
    assert [json.loads(line) for line in path.read_text().splitlines()] == result.history
