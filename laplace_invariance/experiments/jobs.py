"""Experiments side by side, each in a process of its own with one thread.

A process gets its task as the first line of its standard input, and answers with a line of JSON.
It ends when that input is closed, so that none is left behind however its parent ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import tqdm

from laplace_invariance.allocator import keep_freed_memory
from laplace_invariance.experiments import options
from laplace_invariance.experiments.checks import Config

__all__ = ["FailedRuns", "run_side_by_side", "verb_of"]

PACKAGE = Path(__file__).parents[1]
PAUSE = 0.1  # seconds from one look at the processes to the next
PATIENCE = 5.0  # seconds that a process has to end when it is asked to
MOST_SHOWN = 2000  # characters of what a process said that ended without an answer
# What an experiment refuses, or ends with, by a message that says all; others need a traceback.
EXPECTED = (ValueError, TypeError, OSError, ImportError, FloatingPointError, MemoryError)


class FailedRuns(RuntimeError):
    """Some of several runs failed, and the results of the others are kept.

    Args:
        messages: What went wrong, by name of the run.
        n_runs: Number of all runs.
    """

    def __init__(self, messages: Mapping[str, str], n_runs: int) -> None:
        found = "; ".join(f"{name}: {message}" for name, message in messages.items())
        super().__init__(
            f"{len(messages)} of {n_runs} runs failed, and the others are kept; the same command "
            f"with --resume (resume=True) runs what is missing; {found}"
        )
        self.messages = dict(messages)


class _Job:
    """A process that does one run.

    Args:
        name: Name of the run.
        task: Everything that the process has to know, for JSON.
    """

    def __init__(self, name: str, task: Mapping[str, Any]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=os.environ | _environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for the parent, which stops all
        )
        with suppress(BrokenPipeError):  # it has ended already, and its log says why
            self._input.write(json.dumps(task).encode() + b"\n")
            self._input.flush()

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.poll() is None

    def answer(self) -> dict[str, Any]:
        """Return the warnings of a run that has ended, and its error; None if it has none."""
        assert self._process.stdout is not None
        with suppress(ValueError):
            answer: dict[str, Any] = json.loads(self._process.stdout.read())
            return answer
        self._log.seek(0)
        said = " ".join(self._log.read().decode(errors="replace").split())[-MOST_SHOWN:]
        ended = f"its process ended with code {self._process.returncode}"
        return {"warnings": [], "error": f"{ended}: {said}" if said else ended}

    def stop(self) -> None:
        """End the process if it is running, and wait until it has ended."""
        if self.is_running:
            self._process.terminate()
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def run_side_by_side(
    runs: Mapping[str, Config],
    out: Path,
    n_jobs: int,
    *,
    resume: bool = False,
    progress_bar: bool = False,
    done: Callable[[str], object] = str,
) -> None:
    """Run experiments of several configurations, some at a time; results are in the directories.

    A run that fails does not end the others. If the call is interrupted, all processes end.

    Args:
        runs: Configurations by name.
        out: Directory in which every run has one of its name.
        n_jobs: Number of processes at a time.
        resume: Whether to continue what is there; finished runs are not run again.
        progress_bar: Whether to show progress.
        done: Called with the name of every run that has ended well, as soon as it has.

    Raises:
        FailedRuns: If runs failed, after all have ended.
    """
    missing = [name for name in runs if not (resume and (out / name / "summary.json").exists())]
    failed: dict[str, str] = {}
    bar = tqdm.tqdm(
        total=len(runs), initial=len(runs) - len(missing), disable=not progress_bar, unit="run"
    )
    with bar:
        for job in _ended(runs, missing, out, n_jobs, resume, bar):
            answer = job.answer()
            for message in answer["warnings"]:
                warnings.warn(f"{job.name}: {message}", stacklevel=2)
            line = f"{job.name}: done"
            if answer["error"] is not None:
                failed[job.name] = answer["error"]
                line = f"{job.name} failed: {answer['error']}"
            else:
                done(job.name)
            if progress_bar:
                bar.write(line, file=sys.stderr)
            bar.update()
    if failed:
        raise FailedRuns(failed, len(runs))


def _ended(
    runs: Mapping[str, Config],
    names: list[str],
    out: Path,
    n_jobs: int,
    resume: bool,
    bar: tqdm.tqdm,
) -> Iterator[_Job]:
    """Start jobs as others end, and yield each that has ended."""
    waiting = list(names)
    running: list[_Job] = []
    with ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < n_jobs:
                name = waiting.pop(0)
                job = _Job(name, _task(runs[name], out / name, resume))
                stack.callback(job.stop)
                running.append(job)
                bar.set_postfix_str(", ".join(job.name for job in running))
            time.sleep(PAUSE)
            for job in [job for job in running if not job.is_running]:
                running.remove(job)
                yield job


def verb_of(config: Config) -> str:
    """Return the name of the experiment that a configuration is of."""
    return type(config).__name__.removesuffix("Config").lower()


def _task(config: Config, out: Path, resume: bool) -> dict[str, Any]:
    import torch

    return {
        "verb": verb_of(config),
        "config": asdict(config),
        "out": str(out.absolute()),
        "resume": resume,
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }


def _environment() -> dict[str, str]:
    """Return variables of a process with one thread that finds this package as its parent does."""
    places = [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return threads | {"PYTHONPATH": os.pathsep.join(filter(None, places))}


# In a process of its own.


def main() -> None:
    """Do the run that the first line of standard input describes, and print the answer."""
    task = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer: dict[str, Any] = {"warnings": [], "error": None}
    with _recorded(answer["warnings"]):
        try:
            _run(task)
        except EXPECTED as error:
            answer["error"] = " ".join(str(error).split())
    print(json.dumps(answer), flush=True)
    sys.exit(answer["error"] is not None)


def _run(task: Mapping[str, Any]) -> None:
    import torch

    verb = task["verb"]
    run = getattr(import_module(f"laplace_invariance.experiments.{verb}"), verb)
    config = getattr(options, f"{verb.capitalize()}Config")(**task["config"])
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, task["dtype"]))
    run(config, task["out"], resume=task["resume"])


def _end_with_parent() -> None:
    """End the process as soon as its input is closed, as it is if the parent ends."""
    sys.stdin.buffer.read()
    os._exit(1)


@contextmanager
def _recorded(messages: list[str]) -> Iterator[None]:
    """Append warnings to a list, without those of torch about itself."""
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        finally:
            quiet = (FutureWarning, DeprecationWarning)
            found = [str(one.message) for one in caught if not issubclass(one.category, quiet)]
            messages.extend(dict.fromkeys(found))


if __name__ == "__main__":
    main()
