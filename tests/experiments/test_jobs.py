"""Runs side by side: equal to runs in turn, resumable, and without processes left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import torch

from laplace_invariance import cli
from laplace_invariance.experiments import compare as module
from laplace_invariance.experiments import jobs
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


@pytest.fixture
def forked(monkeypatch):
    """Whether processes of runs are forked where they may be, and need no import of torch."""
    if not processes.FORKS:
        return False

    def start(command, env, stderr, **_):
        return processes.Forked(jobs.main, env, stderr)

    stub = SimpleNamespace(
        Popen=start, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )
    monkeypatch.setattr(jobs, "subprocess", stub)
    return True


def without_time(summaries):
    return [{k: v for k, v in one.items() if k != "seconds"} for one in summaries]


@pytest.mark.usefixtures("_one_thread")
def test_results_are_those_of_runs_in_turn(tmp_path, capfd):
    """In a process of its own; what is finished already is not run again."""
    torch.set_default_dtype(torch.float64)  # which processes are not born with
    in_turn = compare(CompareConfig(**CELLS, **SMALL), tmp_path / "in_turn")
    compare(CompareConfig(**CELLS | {"methods": ("none",)}, **SMALL), tmp_path / "beside")
    histories = {path: path.stat().st_mtime_ns for path in tmp_path.glob("beside/*/history.jsonl")}
    beside = compare(
        CompareConfig(**CELLS, **SMALL, n_jobs=3),
        tmp_path / "beside",
        resume=True,
        progress_bar=True,
    )
    assert len(histories) == 1
    assert all(path.stat().st_mtime_ns == before for path, before in histories.items())
    assert without_time(beside.summary()) == without_time(in_turn.summary())
    tables = [(tmp_path / name / "comparison.md").read_text() for name in ("in_turn", "beside")]
    assert tables[0] == tables[1]
    shown = capfd.readouterr().err
    assert "digits-fully_rotated-evidence-1: done" in shown
    assert "2/2" in shown


@pytest.mark.usefixtures("_one_thread", "forked")
def test_nothing_is_kept_without_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = compare(CompareConfig(**CELLS, **SMALL, n_jobs=2))
    in_turn = compare(CompareConfig(**CELLS, **SMALL))
    assert without_time(found.summary()) == without_time(in_turn.summary())
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("forked")
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


NO_CHILDREN = pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="/proc has no children"
)
ENDLESS = "compare --data digits --epochs 100000 --method none fixed --search off --jobs 2 --out"


def running_children(pid, tmp_path):
    """Return the two processes of a process, when both have got somewhere."""
    children = until(lambda: len(found := children_of(pid)) == 2 and found)
    until(lambda: len(list(tmp_path.glob("out/*/history.jsonl"))) == 2)
    return children


def heard(words):
    """Run the program; whoever was started in the background ignores interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main(words)


@NO_CHILDREN
def test_no_process_is_left_behind_by_an_interrupt(tmp_path, forked):
    words, log = [*ENDLESS.split(), str(tmp_path / "out")], tmp_path / "log"
    parent = processes.start(heard, words, log=log)
    children = running_children(parent.pid, tmp_path)
    os.kill(parent.pid, signal.SIGINT)
    parent.join(60)
    until(lambda: not any(map(is_alive, children)), 60)
    assert parent.exitcode == 1
    assert "interrupted; the same command with --resume continues" in log.read_text()


@pytest.mark.slow
@NO_CHILDREN
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_behind(tmp_path, how):
    command = [sys.executable, "-m", "laplace_invariance", *ENDLESS.split(), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    # programs that were started in the background ignore interrupts
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, preexec_fn=heard
    ) as parent:
        children = running_children(parent.pid, tmp_path)
        parent.send_signal(how)
        said = parent.stderr.read().decode()
        parent.wait(60)
    until(lambda: not any(map(is_alive, children)), 60)
    assert parent.returncode != 0
    if how == signal.SIGINT:
        assert parent.returncode == 1
        assert "interrupted; the same command with --resume continues" in said
