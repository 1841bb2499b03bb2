"""The allocator of the program: told once by the command line, never by the library."""

import ctypes
import platform
import subprocess
import sys

import pytest

from laplace_invariance import allocator, cli
from laplace_invariance.experiments import learn

SMALL = "--train 60 --test 20 --epochs 4 --samples 2 --search off --quiet"


class WithoutMallopt:
    def __init__(self, name):
        assert name is None


@pytest.fixture
def told(monkeypatch):
    """What the C library is told."""
    calls = []

    class Library(WithoutMallopt):
        def mallopt(self, *arguments):
            calls.append(arguments)
            return 1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(sys, "platform", "linux")
    return calls


def test_freed_memory_is_kept(told):
    assert allocator.keep_freed_memory()
    assert told == [(-1, 2**30), (-3, 2**25)]


def test_other_c_libraries_are_left_alone(told, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", WithoutMallopt)
    assert not allocator.keep_freed_memory()


def test_other_systems_are_left_alone(told, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not allocator.keep_freed_memory()
    assert told == []


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is another libc")
def test_glibc_takes_the_numbers():
    """In a process of its own, whose memory does not matter."""
    code = "from laplace_invariance.allocator import keep_freed_memory as f; print(f())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_the_program_keeps_freed_memory_and_the_library_does_not(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: calls.append("cli"))
    learn.learn(learn.LearnConfig(n_train=60, n_test=20, n_epochs=1, n_samples=2, search="off"))
    assert calls == []
    cli.main(f"learn {SMALL} --out {tmp_path / 'run'}".split())
    assert calls == ["cli"]


def test_training_never_returns_what_is_kept(monkeypatch):
    """Pages of the heap are returned under stock ``fit`` with hyperparameters only."""
    from laplace_invariance.curvature.trace import chunks

    monkeypatch.setattr(chunks, "trim", lambda: 1 / 0)
    small = {"n_train": 100, "n_test": 20, "n_epochs": 6, "n_samples": 2, "search": "off"}
    for estimator in ("running", "refit", "kernel"):
        learn.learn(learn.LearnConfig(estimator=estimator, **small))
    learn.learn(learn.LearnConfig(subset_of_weights="last_layer", **small))
