"""Checkpoints: complete, so that runs resume bit for bit; atomic; and never written over others."""

import copy
import io
import json
import os
import random
import signal
import time

import numpy as np
import processes
import pytest
import torch
from builders import (
    invariant_network,
    labelled_points,
    noisy_run,
    plain_network,
    shuffled,
    training_settings,
    without_times,
)
from torch.testing import assert_close

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedEF
from laplace_invariance.marglik import Augerino, KernelBound, Refit, Running, checkpoints
from laplace_invariance.marglik.loop import Trainer
from laplace_invariance.marglik.randomness import RandomStates

FEW = {"n_epochs": 4, "n_hypersteps": 2, "optimizer_kwargs": {"lr": 1e-2}}


def read_history(path):
    return without_times([json.loads(line) for line in path.read_text().splitlines()])


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def assert_bit_equal(one, other):
    """Weights, hyperparameters, priors and histories are equal."""
    assert without_times(one.history) == without_times(other.history)
    assert one.losses == other.losses
    assert one.margliks == other.margliks
    assert one.best_epoch == other.best_epoch
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
    assert torch.equal(one.prior_precision, other.prior_precision)
    assert one.la.log_marginal_likelihood().item() == other.la.log_marginal_likelihood().item()


# Resuming.


class Stop(Exception):
    pass


def stopping_after(epoch):
    def stop(record, model):
        if record["epoch"] == epoch:
            raise Stop

    return stop


ESTIMATORS = {
    "refit": {},
    "running": {"estimator": Running(every=3), "marglik_frequency": 2},
    "tolerance": {"estimator": Running(every=2, decay=0.5, tolerance=0.3)},
    "kernel": {"estimator": KernelBound("output", every=2)},
    "last layer": {"estimator": "running", "subset_of_weights": "last_layer"},
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, estimator):
    """Stopped again and again: after the first epoch, in the middle, and after the last."""
    options = ESTIMATORS[estimator]
    whole = noisy_run(tmp_path, "whole", **options)
    for epoch in (1, 3, 6):
        with pytest.raises(Stop):
            noisy_run(tmp_path, callbacks=[stopping_after(epoch)], resume=True, **options)
        with (tmp_path / "run.jsonl").open("a") as file:
            file.write('{"epoch": 99}\n{"epo')  # what a killed process may leave
    resumed = noisy_run(tmp_path, resume=True, **options)
    assert_bit_equal(whole, resumed)
    assert read_history(tmp_path / "run.jsonl") == without_times(whole.history)
    assert not list(tmp_path.glob(".*"))


def test_resuming_without_a_checkpoint_starts(tmp_path):
    assert_bit_equal(noisy_run(tmp_path, "one", resume=True), noisy_run(tmp_path, "other"))


def test_resume_can_train_for_longer(tmp_path):
    noisy_run(tmp_path, n_epochs=3)
    assert len(noisy_run(tmp_path, resume=True, n_epochs=5).history) == 5
    with pytest.raises(ValueError, match="epoch 5, but n_epochs is 4"):
        noisy_run(tmp_path, resume=True, n_epochs=4)


def run_or_resume(directory, n_epochs, out):
    result = noisy_run(directory, n_epochs=n_epochs, resume=True)
    found = dict(result.model.state_dict())
    found["prior_precision"] = result.prior_precision
    found["losses"] = torch.tensor(result.losses)
    found["margliks"] = torch.tensor(result.margliks)
    torch.save(found, out)


def start_process(directory, name, n_epochs, method=processes.METHOD):
    """Start a run in a process of its own, which resumes if there is a checkpoint."""
    (directory / name).mkdir(exist_ok=True)
    arguments = (directory / name, n_epochs, directory / f"{name}.out")
    log = directory / f"{name}.log"
    return processes.start(run_or_resume, *arguments, log=log, method=method)


def written_at(path):
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.parametrize(
    "method", [processes.METHOD, pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_killed_run_resumes_bit_equal(tmp_path, method):
    """SIGKILL at random moments, again and again until the run gets through."""
    n_epochs = 10
    process = start_process(tmp_path, "whole", n_epochs, method)
    process.join()
    assert process.exitcode == 0, (tmp_path / "whole.log").read_text()
    moments = random.Random(0)
    checkpoint = tmp_path / "killed" / "run.pt"
    kills = 0
    while True:
        before = written_at(checkpoint)
        process = start_process(tmp_path, "killed", n_epochs, method)
        while process.is_alive() and written_at(checkpoint) == before:
            time.sleep(0.005)  # until it has got somewhere
        if kills < 2:
            time.sleep(moments.uniform(0, 0.1))
            process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL, (tmp_path / "killed.log").read_text()
        kills += 1
    assert kills >= 2
    names = ("whole", "killed")
    whole, killed = (torch.load(tmp_path / f"{name}.out", weights_only=True) for name in names)
    for name, value in whole.items():
        assert torch.equal(value, killed[name]), name
    histories = [read_history(tmp_path / name / "run.jsonl") for name in names]
    assert histories[0] == histories[1]
    assert len(histories[0]) == n_epochs


# What is not resumed.


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"temperature": 7.0}, r"its temperature is 1\.0 there and 7\.0 here"),
        ({"objective": Augerino(1.0)}, "its objective"),
        ({"optimizer_cls": torch.optim.SGD}, "its optimizer is 'Adam' there and 'SGD' here"),
        (
            {"estimator": Refit(2)},
            "states of 4 generators, but model, loaders and arguments have 3",
        ),
        ({"fix_sigma_noise": True}, "its fix_sigma_noise is False there and True here"),
        ({"scheduler_kwargs": {"T_max": 31}}, "its scheduler_kwargs"),
        ({"marglik_batch_size": 5}, "its batches of the evidence is '4 of 7 by RandomSampler'"),
    ],
    ids=["temperature", "objective", "optimizer", "generator", "noise", "scheduler", "batches"],
)
def test_changed_settings_are_refused(tmp_path, change, match):
    noisy_run(tmp_path, n_epochs=1)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=match):
        noisy_run(tmp_path, n_epochs=2, resume=True, **change)
    assert contents(tmp_path) == before


def test_a_history_without_its_checkpoint_is_left_alone(tmp_path):
    notes = tmp_path / "run.jsonl"
    notes.write_text("my notes\n")
    with pytest.raises(FileExistsError, match=r"no checkpoint .*run\.pt to resume from"):
        noisy_run(tmp_path, resume=True)
    assert contents(tmp_path) == {"run.jsonl": b"my notes\n"}


def test_a_file_that_is_no_history_is_left_alone(tmp_path):
    noisy_run(tmp_path, n_epochs=1)
    notes = tmp_path / "run.jsonl"
    notes.write_text("my notes\n")
    with pytest.raises(ValueError, match="not a history"):
        noisy_run(tmp_path, n_epochs=2, resume=True)
    assert notes.read_text() == "my notes\n"


def test_nothing_is_overwritten_without_resume(tmp_path):
    noisy_run(tmp_path, n_epochs=1)
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match=r"run\.pt exists; resume=True"):
        noisy_run(tmp_path, n_epochs=1)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("model", "change", "match"),
    [
        (
            lambda: invariant_network(outputs=4),
            {},
            r"net\.2\.weight is \[3, 5\] torch\.float64 there and \[4, 5\]",
        ),
        (plain_network, {}, "tensors of the model differ"),
        (
            invariant_network,
            {"backend": AugmentedEF},
            "backend is 'AugmentedGGN' there and 'AugmentedEF' here",
        ),
    ],
    ids=["another size", "another model", "another backend"],
)
def test_checkpoint_of_another_run_is_refused(tmp_path, model, change, match):
    arguments = FEW | {"checkpoint": tmp_path / "run.pt"}
    li.marglik_training(invariant_network(), shuffled(labelled_points()), **arguments)
    before = contents(tmp_path)
    model = model()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=match):
        li.marglik_training(model, shuffled(labelled_points()), resume=True, **arguments | change)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])
    assert contents(tmp_path) == before


@pytest.mark.parametrize("content", ["truncated", "text", "empty", "other"])
def test_damaged_checkpoint_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "run.pt"
    noisy_run(tmp_path, n_epochs=1)
    whole = path.read_bytes()
    if content == "other":
        torch.save({"weights": torch.zeros(3)}, path)
    else:
        damage = {"truncated": whole[: len(whole) // 2], "text": b"hello", "empty": b""}
        path.write_bytes(damage[content])
    damaged = path.read_bytes()
    match = r"run\.pt is (not a readable checkpoint|a torch file, but not)"
    with pytest.raises(ValueError, match=match):
        noisy_run(tmp_path, resume=True)
    assert path.read_bytes() == damaged


def regression_run(path, **changes):
    """Return a function that makes a short run of a model, which it is given, or resumes it."""
    data = labelled_points(classes=0)
    arguments = FEW | {"likelihood": "regression", "checkpoint": path} | changes

    def run(model, **changes):
        torch.manual_seed(5)
        loader = shuffled(data, generator=torch.Generator().manual_seed(3))
        return li.marglik_training(model, loader, **arguments | changes)

    return run


@pytest.mark.parametrize("change", ["noise", "frozen weights", "kind of generator"])
def test_a_refusal_leaves_the_model_untouched(tmp_path, change):
    run = regression_run(tmp_path / "run.pt", n_epochs=1)
    generators = [torch.Generator(), np.random.default_rng(3)]
    models = [plain_network(1) for _ in generators]
    for model, generator in zip(models, generators, strict=True):
        model.generator = generator if change == "kind of generator" else None
    run(models[0])
    if change == "frozen weights":
        models[1][0].requires_grad_(False)
    before = copy.deepcopy(models[1].state_dict())
    with pytest.raises(ValueError, match="nothing was changed"):
        run(models[1], n_epochs=2, resume=True, fix_sigma_noise=change == "noise")
    assert_close(models[1].state_dict(), before, rtol=0, atol=0)


def numbers_in(container):
    """Yield where all numbers and tensors are that can be changed, as containers and keys."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, item in items:
        if isinstance(item, dict | list):
            yield from numbers_in(item)
        elif isinstance(item, float) or (isinstance(item, torch.Tensor) and item.numel()):
            yield container, key


def flip(content, place):
    damaged = bytearray(content)
    damaged[place] ^= 1 << place % 8
    return bytes(damaged)


def with_another_number(content, source):
    """Return the bytes of a checkpoint of which one number is another."""
    state = torch.load(io.BytesIO(content), weights_only=True)
    container, key = source.choice(list(numbers_in(state)))
    if isinstance(container[key], float):
        container[key] += 1.0
    else:
        entries = container[key].view(-1)
        entry = source.randrange(len(entries))
        entries[entry] = entries[entry] == 0
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@pytest.mark.parametrize("damage", ["bit of the file", "number"])
def test_a_damaged_checkpoint_is_refused_or_makes_no_difference(tmp_path, damage):
    path = tmp_path / "run.pt"
    run = regression_run(path, n_epochs=2)
    run(plain_network(1), n_epochs=1)
    content = path.read_bytes()
    whole = run(plain_network(1), resume=True)
    source = random.Random(0)
    n_refused = 0
    for _ in range(30):
        if damage == "number":
            path.write_bytes(with_another_number(content, source))
        else:
            path.write_bytes(flip(content, source.randrange(len(content))))
        model = plain_network(1)
        before = copy.deepcopy(model.state_dict())
        try:
            resumed = run(model, resume=True)
        except ValueError as error:
            refusal = str(error)
        else:
            assert_bit_equal(whole, resumed)
            continue
        n_refused += 1
        assert "nothing was changed" in refusal
        assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert n_refused == 30 if damage == "number" else n_refused > 5


# Several processes.


def test_a_checkpoint_in_use_is_refused(tmp_path):
    attempts = []

    def attempt(record, model):
        for resume in (True, False):
            with pytest.raises(BlockingIOError) as refusal:
                noisy_run(tmp_path, resume=resume)
            attempts.append(str(refusal.value))

    noisy_run(tmp_path, n_epochs=1, callbacks=[attempt])
    assert len(attempts) == 2
    for message in attempts:
        assert f"run.pt is in use by another run, process {os.getpid()} on" in message
    assert sorted(contents(tmp_path)) == ["run.jsonl", "run.pt"]
    noisy_run(tmp_path, n_epochs=2, resume=True)


def test_a_history_in_use_is_refused(tmp_path):
    """Also if there is no checkpoint, and if another run has one."""
    attempts = []

    def attempt(record, model):
        for checkpoint in (None, tmp_path / "other.pt"):
            with pytest.raises(BlockingIOError) as refusal:
                noisy_run(tmp_path, checkpoint=checkpoint)
            attempts.append(str(refusal.value))

    noisy_run(tmp_path, n_epochs=1, checkpoint=None, callbacks=[attempt])
    assert len(attempts) == 2
    for message in attempts:
        assert f"run.jsonl is in use by another run, process {os.getpid()} on" in message
    assert list(contents(tmp_path)) == ["run.jsonl"]
    assert len(read_history(tmp_path / "run.jsonl")) == 1


def test_a_process_that_uses_a_checkpoint_is_named_and_its_death_frees_it(tmp_path):
    checkpoint = tmp_path / "held" / "run.pt"
    process = start_process(tmp_path, "held", 10_000)
    try:
        while process.is_alive() and not checkpoint.exists():
            time.sleep(0.01)
        with pytest.raises(BlockingIOError, match=f"process {process.pid} on"):
            noisy_run(checkpoint.parent, n_epochs=10_000, resume=True)
    finally:
        process.kill()
        process.join()
    stop = stopping_after(checkpoints.read(checkpoint)["run"]["epoch"] + 1)
    with pytest.raises(Stop):
        noisy_run(checkpoint.parent, n_epochs=10_000, resume=True, callbacks=[stop])


# How they are written.


def test_a_journal_does_nothing_before_it_is_opened(tmp_path):
    files = {"checkpoint": tmp_path / "a" / "run.pt", "history": tmp_path / "b" / "run.jsonl"}
    trainer = Trainer(plain_network(), training_settings(shuffled(labelled_points()), **files))
    random_states = RandomStates(trainer.model, [])
    journal = checkpoints.Journal(trainer, random_states, trainer.settings.output)
    assert not list(tmp_path.iterdir())
    assert journal.last_good() == "no checkpoint was asked for"
    journal.open()
    assert checkpoints.read(files["checkpoint"])["run"]["epoch"] == 0
    assert files["history"].read_text() == ""
    assert "of epoch 0, is" in journal.last_good()
    journal.close()
    assert [path.name for path in files["checkpoint"].parent.iterdir()] == ["run.pt"]


def test_writing_takes_a_small_share_of_the_time(tmp_path, monkeypatch):
    """Where it takes longer than allowed, runs resume from an earlier epoch, to the same end."""
    monkeypatch.setattr(checkpoints, "FREE", 0.0)
    monkeypatch.setattr(checkpoints, "MOST_SHARE", 1e-9)
    whole = noisy_run(tmp_path, "whole")
    assert checkpoints.read(tmp_path / "whole.pt")["run"]["epoch"] == len(whole.history)
    with pytest.raises(Stop):
        noisy_run(tmp_path, callbacks=[stopping_after(4)])
    assert checkpoints.read(tmp_path / "run.pt")["run"]["epoch"] == 0
    assert [record["epoch"] for record in read_history(tmp_path / "run.jsonl")] == [1, 2, 3, 4]
    assert_bit_equal(whole, noisy_run(tmp_path, resume=True))


def test_checkpoint_executes_no_code(tmp_path):
    noisy_run(tmp_path, n_epochs=2)
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
