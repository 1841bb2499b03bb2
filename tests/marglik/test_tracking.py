"""Callbacks that write a history elsewhere."""

import math
import sys
from types import ModuleType

import pytest

from laplace_invariance.marglik import TensorBoard, WandB
from laplace_invariance.marglik.tracking import scalars

RECORD = {
    "epoch": 3,
    "loss": 0.5,
    "evidence": None,
    "ranges": {"augmentation": {"rotation": 1.0}},
    "hyperparameters": {"eta": [0.25, 0.75]},
    "prior_precision": [1.0, 2.0],
    "prior_precisions": {"0.weight": 2.0},
    "valid": {"loss": math.nan, "accuracy": 0.75},
    "skipped": {"weights": 2},
}
SCALARS = {
    "loss": 0.5,
    "ranges/augmentation/rotation": 1.0,
    "hyperparameters/eta/0": 0.25,
    "hyperparameters/eta/1": 0.75,
    "prior_precisions/0.weight": 2.0,
    "valid/accuracy": 0.75,
    "skipped/weights": 2.0,
}


class Writer:
    """Stands in for the writer of TensorBoard, and for a run of Weights & Biases."""

    def __init__(self, *arguments, **options):
        self.made = arguments, options
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments, **options: self.calls.append((name, arguments, options))


def stand_in(monkeypatch, name, **contents):
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def test_numbers_of_a_record_have_names():
    assert scalars(RECORD) == SCALARS


def test_tensorboard_gets_every_number_at_its_epoch(monkeypatch, tmp_path):
    stand_in(monkeypatch, "torch.utils.tensorboard", SummaryWriter=Writer)
    callback = TensorBoard(tmp_path)
    callback(RECORD, None)
    callback.close()
    writer = callback._writer
    assert writer.made == ((str(tmp_path),), {})
    *written, flushed, closed = writer.calls
    assert [arguments for _, arguments, _ in written] == [(n, v, 3) for n, v in SCALARS.items()]
    assert (flushed[0], closed[0]) == ("flush", "close")


def test_wandb_gets_every_number_at_its_epoch(monkeypatch):
    stand_in(monkeypatch, "wandb", init=Writer)
    callback = WandB(project="mine", mode="offline")
    callback(RECORD, None)
    callback.close()
    assert callback.run.made == ((), {"project": "mine", "mode": "offline"})
    assert callback.run.calls == [("log", (SCALARS,), {"step": 3}), ("finish", (), {})]


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [
        (lambda: TensorBoard("logs"), "torch.utils.tensorboard", "tensorboard"),
        (lambda: WandB(), "wandb", "wandb"),
    ],
)
def test_what_is_not_installed_is_named(monkeypatch, make, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'laplace-invariance\[{extra}\]'"):
        make()


def test_tensorboard_writes_what_it_reads(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = TensorBoard(tmp_path)
    for epoch in (1, 2):
        callback(RECORD | {"epoch": epoch, "loss": 1 / epoch}, None)
    callback.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == set(SCALARS)
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(1, 1.0), (2, 0.5)]
