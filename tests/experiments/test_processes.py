"""``torchrun`` with the program: one run, shared out, and what becomes of it if a process dies."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from torch.testing import assert_close

import laplace_invariance as li

WORDS = "learn --data digits --train 100 --test 50 --net mlp --samples 2 --quiet"


def command(out, *more, processes=2):
    words = ["-m", "laplace_invariance", *WORDS.split(), "--out", str(out), *more]
    if processes == 1:
        return [sys.executable, *words]
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", *words]


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@pytest.mark.slow
def test_torchrun_learns_what_one_process_does(tmp_path):
    summaries = []
    for processes in (1, 2):
        out = tmp_path / str(processes)
        words = command(out, "--epochs", "3", "--search", "off", processes=processes)
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("log evidence") == 1
        summaries.append(json.loads((out / "summary.json").read_text()))
        assert (out / "report.html").exists()
        assert len((out / "history.jsonl").read_text().splitlines()) == 3
    one, two = summaries
    assert_close(two["evidence"], one["evidence"], rtol=1e-3, atol=1e-3)
    assert_close(two["magnitudes"], one["magnitudes"], rtol=0.05, atol=0.01)
    assert li.load_run(tmp_path / "2").model is not None


@pytest.mark.slow
def test_a_process_that_dies_ends_the_run_which_resumes(tmp_path):
    out = tmp_path / "run"
    words = command(out, "--epochs", "400", "--search", "off")
    run = subprocess.Popen(words, env=environment(), stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    history = out / "history.jsonl"
    while time.monotonic() < until and not (history.exists() and history.stat().st_size):
        time.sleep(0.1)
    workers = subprocess.run(
        ["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    assert run.wait(60) != 0
    n_done = len(history.read_text().splitlines())
    assert 0 < n_done < 400
    words = [*command(out, "--epochs", "400", "--search", "off"), "--resume"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(history.read_text().splitlines()) == 400
