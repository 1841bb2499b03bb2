"""Ranges as a search found them, held, beside learnt ones: which goes on, and from where."""

import copy
import json

import pytest
import torch
from builders import invariant_network, labelled_points, shuffled, without_times

import laplace_invariance as li
from laplace_invariance.marglik import Running, Search
from laplace_invariance.marglik.loop import Trainer
from laplace_invariance.marglik.search import comparison

LONG = {
    "n_epochs": 10,
    "optimizer_kwargs": {"lr": 1e-2},
    "n_epochs_burnin": 1,
    "estimator": Running(every=1, settle=0.2),
}
SMALL = Search(n_steps=3, keep=2, n_rounds=1, held=0.5)  # compares at epochs 3 and 5


@pytest.fixture
def start():
    """Return a model and data, and the state of the generator that all runs start with."""
    torch.manual_seed(0)
    return invariant_network(), labelled_points(), torch.get_rng_state()


def run(start, **changes):
    model, data, state = copy.deepcopy(start[0]), start[1], start[2]
    torch.set_rng_state(state)
    return li.marglik_training(model, shuffled(data), **LONG | {"search": SMALL} | changes)


def prefer(monkeypatch, learnt):
    """Let learnt ranges be better, or held ones, in the second comparison."""
    found = iter([-1.0, -1.02, -1.0, -0.9 if learnt else -1.1] * 9)
    monkeypatch.setattr(comparison, "_evidence", lambda *_: next(found))


def test_learnt_ranges_go_on_as_if_nothing_had_been_held(start, monkeypatch):
    alone = run(start, search=Search(n_steps=3, keep=2, n_rounds=1, held=0))
    prefer(monkeypatch, learnt=True)
    compared = run(start)
    assert alone.search.comparison is None
    assert compared.search.comparison.keeps_learning
    assert without_times(compared.history) == without_times(alone.history)
    assert compared.evidence == alone.evidence


def test_held_ranges_stay_as_they_were_found(start, monkeypatch):
    prefer(monkeypatch, learnt=False)
    seen = []
    compared = run(start, callbacks=[lambda record, model: seen.append(record["epoch"])])
    found = compared.search.best.ranges
    assert found
    for record in compared.history:
        ranges = record["ranges"]["augmentation"]
        assert {name: width for name, width in ranges.items() if width} == pytest.approx(found)
    assert [record["epoch"] for record in compared.history] == list(range(1, 11))
    assert seen == list(range(1, 11))
    assert "ranges stay as found" in str(compared.search)


def test_held_ranges_are_trained_as_if_they_were_fixed(start, monkeypatch):
    prefer(monkeypatch, learnt=False)
    held = run(start)
    model = copy.deepcopy(start[0])
    model.augmentation.open_(held.search.best.ranges)
    model.augmentation = model.augmentation.frozen()
    fixed = run((model, *start[1:]), search=None)
    assert held.evidence == pytest.approx(fixed.evidence, rel=1e-9)
    for name, weight in held.model.named_parameters():
        torch.testing.assert_close(weight, dict(fixed.model.named_parameters())[name])


def test_what_is_compared_is_the_evidence_of_either(start):
    """Without any monkeypatching the two are trained, come to rest, and differ."""
    found = run(start).search.comparison
    assert found.epoch in (3, 5)
    assert found.held != found.learnt
    assert found.keeps_learning == (found.learnt > found.held - comparison.CLEARLY)


@pytest.mark.parametrize(("learnt", "moments"), [(True, (2, 9, 12)), (False, (4, 7, 12))])
def test_an_interrupted_comparison_goes_on(start, tmp_path, monkeypatch, learnt, moments):
    """Killed while ranges are held (2, 7) or learnt (4, 9), and after it was decided (12)."""
    prefer(monkeypatch, learnt)
    whole = run(start)
    original = Trainer._run_epoch

    class Killed(Exception):
        pass

    for killed_after in moments:
        done = []

        def counted(self, random_states, done=done, killed_after=killed_after):
            if len(done) == killed_after:
                done.append(None)
                raise Killed
            done.append(self.epoch)
            return original(self, random_states)

        monkeypatch.setattr(Trainer, "_run_epoch", counted)
        directory = tmp_path / str(killed_after)
        directory.mkdir()
        files = {"checkpoint": directory / "run.pt", "history": directory / "history.jsonl"}
        prefer(monkeypatch, learnt)
        with pytest.raises(Killed):
            run(start, resume=True, **files)
        torch.manual_seed(5)
        resumed = li.marglik_training(
            copy.deepcopy(start[0]), shuffled(start[1]), search=SMALL, resume=True, **files, **LONG
        )
        assert len(done) == 1 + 5 + 10  # no epoch was trained twice but the killed one
        assert resumed.search == whole.search
        assert resumed.evidence == whole.evidence
        assert without_times(resumed.history) == without_times(whole.history)
        lines = files["history"].read_text().splitlines()
        assert [json.loads(line)["epoch"] for line in lines] == list(range(1, 11))


@pytest.mark.parametrize(("held", "learnt"), [(-1.0, -1.1), (-1.0, -0.999)])
def test_what_is_clear_is_decided_at_once(start, monkeypatch, held, learnt):
    """Learnt ranges that lead at all will lead by more; held ones must be ahead by a lot."""
    found = iter([held, learnt])
    monkeypatch.setattr(comparison, "_evidence", lambda *_: next(found))
    decided = comparison.Comparison(3, held, learnt, learnt > held)
    assert run(start).search.comparison == decided


def test_short_runs_are_not_compared(start):
    assert run(start, n_epochs=3).search.comparison is None


def test_a_run_that_is_made_longer_is_not_compared(start, tmp_path):
    files = {"checkpoint": tmp_path / "run.pt", "resume": True}
    run(start, n_epochs=3, **files)
    model, data, _ = start
    longer = li.marglik_training(
        copy.deepcopy(model), shuffled(data), **LONG | {"search": SMALL} | files
    )
    assert len(longer.history) == 10
    assert longer.search.comparison is None


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_shares_are_checked(share):
    with pytest.raises(ValueError, match=r"held must be (finite and )?at least 0"):
        Search(held=share)
