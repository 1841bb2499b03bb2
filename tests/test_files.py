"""Files: replaced whole or not at all, JSON, and locks between processes."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from laplace_invariance.files import locked, read_json, replace, write_json, write_text

HOLDER = """
import sys, time
from pathlib import Path
from laplace_invariance.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_failed_write_changes_nothing(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")

    def fails(file):
        file.write(b"ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace(path, fails)
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_errors_of_the_file_are_not_hidden_by_others(tmp_path):
    """As torch.save does."""

    def fails(file):
        try:
            raise OSError("disk full")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904

    with pytest.raises(OSError, match="disk full"):
        replace(tmp_path / "file", fails)


def test_numbers_that_are_not_finite_are_texts_in_json(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"a": [math.inf, -math.inf, 1.5, "inf"], "b": {"c": math.nan}})
    assert json.loads(path.read_text()) == {
        "a": ["Infinity", "-Infinity", 1.5, "inf"],
        "b": {"c": "NaN"},
    }
    read = read_json(path)
    assert read["a"] == [math.inf, -math.inf, 1.5, "inf"]
    assert math.isnan(read["b"]["c"])


def test_json_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "new" / "value.json"
    write_json(path, {"a": [1, None, 0.1], "b": "±"})
    assert read_json(path) == {"a": [1, None, 0.1], "b": "±"}
    path.write_text(path.read_text()[:-5])
    with pytest.raises(ValueError, match=r"value\.json is damaged: .*; remove it to continue"):
        read_json(path)


def test_a_lock_excludes_this_process_too_and_leaves_no_file(tmp_path):
    path = tmp_path / ".lock"
    with locked(path):
        with (
            pytest.raises(BlockingIOError, match=f"{tmp_path} is in use by another run"),
            locked(path),
        ):
            pass
        with pytest.raises(BlockingIOError), locked(path):  # a refusal releases nothing
            pass
    assert not path.exists()
    with locked(path):
        assert path.exists()


def test_a_lock_excludes_another_process_and_ends_with_it(tmp_path):
    path = tmp_path / ".lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            match = rf"is in use by another run, process {holder.pid} on {socket.gethostname()},"
            with pytest.raises(BlockingIOError, match=match), locked(path):
                pass
        finally:
            holder.kill()
    assert path.exists()  # left behind by the process that died
    with locked(path):
        pass
    assert not path.exists()


FORKING = """
import multiprocessing, pathlib, sys, time
from laplace_invariance.files import locked
with locked(pathlib.Path(sys.argv[1])):
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    worker.start()
    print(worker.pid, flush=True)
    time.sleep(30)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_lock_ends_with_its_process_though_a_fork_lives_on(tmp_path):
    path = tmp_path / ".lock"
    command = [sys.executable, "-c", FORKING, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        worker = int(holder.stdout.readline())
        try:
            with pytest.raises(BlockingIOError), locked(path):
                pass
            holder.kill()
            holder.wait()
            for attempt in range(100):  # the fork closes its copy as soon as it runs
                try:
                    with locked(path):
                        os.kill(worker, 0)  # it is alive
                    break
                except BlockingIOError:
                    assert attempt < 99
                    time.sleep(0.1)
        finally:
            holder.kill()
            os.kill(worker, signal.SIGKILL)
