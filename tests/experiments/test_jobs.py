"""Runs side by side: equal to runs in turn, resumable, and without processes left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from laplace_invariance.experiments import compare as module
from laplace_invariance.experiments.compare import CompareConfig, compare
from laplace_invariance.experiments.jobs import FailedRuns, run_side_by_side
from laplace_invariance.experiments.learn import LearnConfig

SMALL = {"n_train": 70, "n_test": 30, "n_epochs": 3, "n_samples": 2, "search": "off"}
CELLS = {"transforms": ("fully_rotated",), "methods": ("evidence", "none"), "seeds": (1,)}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def _one_thread():
    """As processes of runs have it; the order of sums depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def without_time(summaries):
    return [{k: v for k, v in one.items() if k != "seconds"} for one in summaries]


@pytest.mark.usefixtures("_one_thread")
def test_results_are_those_of_runs_in_turn(tmp_path, capfd):
    torch.set_default_dtype(torch.float64)  # which processes are not born with
    config = CompareConfig(**CELLS, **SMALL)
    in_turn = compare(config, tmp_path / "in_turn")
    beside = compare(
        CompareConfig(**CELLS, **SMALL, n_jobs=3), tmp_path / "beside", progress_bar=True
    )
    assert without_time(beside.summary()) == without_time(in_turn.summary())
    tables = [(tmp_path / name / "comparison.md").read_text() for name in ("in_turn", "beside")]
    assert tables[0] == tables[1]
    shown = capfd.readouterr().err
    assert "digits-fully_rotated-none-1: done" in shown
    assert "2/2" in shown


def test_finished_runs_are_not_run_again(tmp_path):
    compare(CompareConfig(**CELLS | {"methods": ("none",)}, **SMALL), tmp_path)
    histories = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/history.jsonl")}
    found = compare(CompareConfig(**CELLS, **SMALL, n_jobs=2), tmp_path, resume=True)
    assert found.methods == ["evidence", "none"]
    assert len(histories) == 1
    assert all(path.stat().st_mtime_ns == before for path, before in histories.items())


def test_nothing_is_kept_without_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = compare(CompareConfig(**CELLS, **SMALL, n_jobs=2))
    assert len(found.summary()) == 2
    assert not list(tmp_path.iterdir())


def test_a_run_that_fails_does_not_end_the_others(tmp_path):
    good, bad = LearnConfig(method="none", **SMALL), LearnConfig(data="nothing", **SMALL)
    with pytest.raises(FailedRuns, match=r"1 of 2 runs failed.*bad: unknown source 'nothing'"):
        run_side_by_side({"bad": bad, "good": good}, tmp_path, 2)
    assert json.loads((tmp_path / "good" / "summary.json").read_text())["accuracy"] > 0
    assert not (tmp_path / "bad").exists()


def test_a_process_that_dies_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/nowhere")  # so that Python itself does not start
    with pytest.raises(FailedRuns, match=r"its process ended with code 1: .+"):
        run_side_by_side({"run": LearnConfig(**SMALL)}, tmp_path, 2)


def test_failed_runs_end_the_program_with_their_message(tmp_path, run_cli, monkeypatch):
    def fail(runs, *_, **__):
        raise FailedRuns({list(runs)[1]: "disk full"}, len(runs))

    monkeypatch.setattr(module, "run_side_by_side", fail)
    with pytest.raises(SystemExit, match=r"1 of 2 runs failed.*-fixed-0: disk full") as error:
        run_cli("compare --train 70 --test 30 --method none fixed --jobs 2 --quiet --out", tmp_path)
    assert isinstance(error.value.code, str)  # which is code 1


def test_impossible_comparison_writes_nothing(tmp_path, run_cli):
    with pytest.raises(SystemExit, match="unknown source 'nothing'") as error:
        run_cli("compare --data nothing --jobs 2 --quiet --out", tmp_path / "out")
    assert error.value.code == 2
    assert not (tmp_path / "out").exists()


def test_the_number_of_jobs_is_positive():
    with pytest.raises(ValueError, match="n_jobs must be positive"):
        CompareConfig(n_jobs=0)


# Processes that end.


def children_of(pid):
    """Return the processes that a process has started."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def is_alive(pid):
    """Return whether a process is running."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def until(condition, seconds=240):
    """Return what a condition gives as soon as it holds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it never came true")


@pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="/proc has no children"
)
@pytest.mark.parametrize(
    "how",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_no_process_is_left_behind(tmp_path, how):
    words = "compare --data digits --epochs 100000 --method none fixed --search off --jobs 2 --out"
    command = [sys.executable, "-m", "laplace_invariance", *words.split(), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    # programs that were started in the background ignore interrupts
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, preexec_fn=heard
    ) as parent:
        children = until(lambda: len(found := children_of(parent.pid)) == 2 and found)
        until(lambda: len(list(tmp_path.glob("out/*/history.jsonl"))) == 2)
        parent.send_signal(how)
        said = parent.stderr.read().decode()
        parent.wait(60)
    until(lambda: not any(map(is_alive, children)), 60)
    assert parent.returncode != 0
    if how == signal.SIGINT:
        assert parent.returncode == 1
        assert "interrupted; the same command with --resume continues" in said
