"""Checkpoints and histories on the disk, complete enough that a run resumes bit for bit.

A checkpoint is a dictionary of tensors, numbers, strings, lists and dictionaries of these: it is
loaded without executing code. It is written atomically, so that whoever looks finds the old one or
the new one, whenever the process dies. It has a checksum of its content, as a disk or a copy may
damage numbers in a way that torch does not notice.
"""

from __future__ import annotations

import copy
import enum
import hashlib
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from laplace_invariance.files import locked, replace, to_finite
from laplace_invariance.marglik.randomness import RandomStates
from laplace_invariance.marglik.ranks import ALONE, Ranks
from laplace_invariance.marglik.settings import OutputSettings, Record

__all__ = ["Journal", "Resumable", "read", "write"]

FORMAT = 3
MOST_SHARE = 0.02  # of the time of a run that goes into checkpoints after epochs,
FREE = 1.0  # once they have taken so many seconds


def write(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint, atomically.

    Args:
        path: File that is written or replaced.
        state: Tensors, numbers and strings in lists and dictionaries.
    """
    plain = _plain(state)
    content = {"format": FORMAT, "checksum": _checksum(plain), **plain}
    replace(path, lambda file: torch.save(content, file))


def _plain(value: Any) -> Any:
    """Make numbers of numpy and names of enumerations plain, as only these can be loaded safely."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, np.generic):  # which sweeps hand in as step sizes
        return value.item()
    if isinstance(value, enum.Enum):  # which laplace has for its options
        return value.value
    return value


def _checksum(value: Any) -> str:
    """Return a digest of all keys, numbers, strings and tensors in a state, on any device."""
    digest = hashlib.sha256()
    _digest(value, digest.update)
    return digest.hexdigest()


def _digest(value: Any, update: Callable[[Any], None]) -> None:
    if isinstance(value, torch.Tensor):
        update(f"{value.dtype} {list(value.shape)};".encode())
        update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        update(f"dictionary of {len(value)};".encode())
        for key, item in value.items():
            _digest(key, update)
            _digest(item, update)
    elif isinstance(value, list | tuple):
        update(f"sequence of {len(value)};".encode())
        for item in value:
            _digest(item, update)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        update(f"{value!r};".encode())
    else:  # whose text may differ from process to process, as that of a set does
        update(f"{type(value).__name__};".encode())


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint.

    Args:
        path: File that :func:`write` wrote.

    Raises:
        FileNotFoundError: If there is no such file.
        IsADirectoryError: If it is a directory.
        PermissionError: If it may not be read.
        ValueError: If it is no checkpoint, a part of one, or not as it was written; the file stays
            as it is.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except Exception as error:  # torch raises many kinds, from struct and zip to pickle
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{path} is not a readable checkpoint (damaged, truncated, or another kind of file): "
            f"{reason}; nothing was changed; remove it or name another file to start from scratch"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(
            f"{path} is a torch file, but not a checkpoint of marglik_training in format {FORMAT}; "
            "nothing was changed"
        )
    content = {key: item for key, item in state.items() if key not in ("format", "checksum")}
    if state.get("checksum") != _checksum(content):
        raise ValueError(
            f"{path} is damaged: its content is not that of its checksum; nothing was changed; "
            "put back a copy, or remove it or name another file to start from scratch"
        )
    return content


class Resumable(Protocol):
    """A run that can be written to a checkpoint and resumed from it.

    Its state has the signature, which must agree between the run that writes it and the one that
    resumes it, and the epoch.
    """

    epoch: int
    history: list[Record]

    @property
    def n_epochs(self) -> int: ...

    def signature(self) -> dict[str, Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Journal:
    """Checkpoint and history of a run on the disk, either of which may be left out.

    Nothing is read or written before :meth:`open`, and from then on until :meth:`close` no other
    run can use these files. As a context, it opens and closes itself.

    Args:
        run: Run that is written, and that gets its state when it is resumed.
        random_states: Random states that are written and read with it.
        output: Names of the files, and whether to resume.
        ranks: Processes of the run, of which the first reads and writes.
    """

    def __init__(
        self,
        run: Resumable,
        random_states: RandomStates,
        output: OutputSettings,
        ranks: Ranks = ALONE,
    ) -> None:
        self._run = run
        self._ranks = ranks
        self._random_states = random_states
        self._checkpoint = None if output.checkpoint is None else Path(output.checkpoint)
        self._history = None if output.history is None else Path(output.history)
        self._may_resume = output.resume
        self._good_epoch: int | None = None
        self._opened = time.monotonic()
        self._seconds = 0.0  # that writing has taken
        self._stack = ExitStack()

    def __enter__(self) -> Journal:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other runs use the files."""
        self._stack.close()

    def open(self) -> None:
        """Resume from the checkpoint if that is wanted and there is one; otherwise start.

        Raises:
            BlockingIOError: If another run uses one of the files.
            FileExistsError: If a run that does not resume would overwrite a file.
            ValueError: If the files are not those of the same run; nothing was changed then.
        """
        try:
            self._lock()
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def _files(self) -> list[Path]:
        return [path for path in (self._checkpoint, self._history) if path is not None]

    def _lock(self) -> None:
        """Lock the files, which the first rank does for all."""
        with self._ranks.agreeing():
            for path in self._files if self._ranks.is_first else []:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = path.with_name(f".{path.name}.lock")
                self._stack.enter_context(locked(lock, path))

    def _open(self) -> None:
        exists = self._checkpoint is not None and self._checkpoint.exists()
        if self._ranks.first(self._may_resume and exists):
            self._resume()
        else:
            self._start()
        self._write_history()  # an interrupted run may have appended records after its checkpoint

    def _write_history(self) -> None:
        """Write all records, in place of what the file has."""
        with self._ranks.agreeing():
            if self._history is not None and self._ranks.is_first:
                lines = "".join(_line(record) for record in self._run.history)
                replace(self._history, lambda file: file.write(lines.encode()))

    def _start(self) -> None:
        with self._ranks.agreeing():
            if self._ranks.is_first:
                self._check_files()
        self.save()

    def _check_files(self) -> None:
        """Raise if a file would be overwritten."""
        for path in self._files:
            if not path.exists():
                continue
            if self._may_resume:
                raise FileExistsError(
                    f"{path} exists, but there is no checkpoint {self._checkpoint} to resume from; "
                    "remove it to start from scratch"
                )
            raise FileExistsError(
                f"{path} exists; resume=True resumes from it, another name starts from scratch"
            )

    def _resume(self) -> None:
        """Take over the checkpoint, which the first rank reads for all."""
        state = None
        with self._ranks.agreeing():
            if self._ranks.is_first:
                assert self._checkpoint is not None
                state = read(self._checkpoint)
        state = self._ranks.first(state)
        with self._ranks.agreeing():
            self._check(state)
            self._load(state)
        self._good_epoch = self._run.epoch

    def _check(self, state: dict[str, Any]) -> None:
        """Raise unless a state is that of this run, and the history is one."""
        checkpoint = self._checkpoint
        assert checkpoint is not None
        present = self._state()
        for part in present:
            missing = [key for key in present[part] if key not in state.get(part, {})]
            if missing:
                raise ValueError(
                    f"{checkpoint} lacks {', '.join(missing)}; nothing was changed; put back a "
                    "copy, or remove it or name another file to start from scratch"
                )
        run = state["run"]
        _check_signature(checkpoint, run["signature"], self._run.signature())
        if run["epoch"] > self._run.n_epochs:
            raise ValueError(
                f"{checkpoint} is at epoch {run['epoch']}, but n_epochs is {self._run.n_epochs}; "
                "nothing was changed"
            )
        self._random_states.check_state_dict(state["random"])
        if self._history is not None and self._ranks.is_first:
            _check_history(self._history)

    def _load(self, state: dict[str, Any]) -> None:
        """Put a state into the run, or leave the run as it is."""
        before = copy.deepcopy(self._state())
        try:
            self._run.load_state_dict(state["run"])
            self._random_states.load_state_dict(state["random"])
        except Exception as error:  # such as a part that has another shape
            self._run.load_state_dict(before["run"])
            self._random_states.load_state_dict(before["random"])
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{self._checkpoint} does not fit this run ({reason}); nothing was changed; put "
                "back a copy, or remove it or name another file to start from scratch"
            ) from error

    def append(self, record: Record) -> None:
        """Append a record to the history, as a line of JSON."""
        with self._ranks.agreeing():
            if self._history is not None and self._ranks.is_first:
                with self._history.open("a") as file:
                    file.write(_line(record))

    def rewrite(self) -> None:
        """Write a checkpoint and the whole history of a run that was set back, or replaced."""
        self.save()
        self._write_history()

    def save(self) -> None:
        """Write a checkpoint."""
        if self._checkpoint is None:
            return
        started = time.monotonic()
        with self._ranks.agreeing():
            if self._ranks.is_first:
                write(self._checkpoint, self._state())
        self._seconds += time.monotonic() - started
        self._good_epoch = self._run.epoch

    def save_if_cheap(self) -> None:
        """Write a checkpoint, unless too much of the time went into writing them."""
        allowed = max(FREE, MOST_SHARE * (time.monotonic() - self._opened))
        if self._ranks.first(self._seconds < allowed):
            self.save()

    def _state(self) -> dict[str, Any]:
        return {"run": self._run.state_dict(), "random": self._random_states.state_dict()}

    def last_good(self) -> str:
        """Return a text that says where the last good checkpoint is."""
        if self._good_epoch is None:
            return "no checkpoint was asked for"
        return f"the last good checkpoint, of epoch {self._good_epoch}, is {self._checkpoint}"


def _line(record: Record) -> str:
    """Return a record as a line of JSON, with null for numbers that are not finite."""
    return json.dumps(to_finite(record), allow_nan=False) + "\n"


def _check_signature(path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise unless the run that wrote a checkpoint was made like this one."""
    for key, value in ours.items():
        if theirs.get(key) != value:
            difference = _difference(theirs.get(key), value)
            raise ValueError(
                f"{path} was written by another run: its {key} {difference}; nothing was changed"
            )


def _difference(theirs: Any, ours: Any) -> str:
    """Return a text that says how two values differ; of dictionaries, the first item that does."""
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        return f"is {theirs!r} there and {ours!r} here"
    name = next(name for name in [*ours, *theirs] if ours.get(name) != theirs.get(name))
    there, here = theirs.get(name, "missing"), ours.get(name, "missing")
    return f"differ: {name} is {there} there and {here} here"


def _check_history(path: Path) -> None:
    """Raise unless a file is a history, or empty, or not there, so that no other is overwritten."""
    if not path.exists() or not path.stat().st_size:
        return
    try:
        known = "epoch" in json.loads(path.read_text().splitlines()[0])
    except (ValueError, TypeError):  # such as UnicodeDecodeError
        known = False
    if not known:
        raise ValueError(f"{path} is not a history of marglik_training; nothing was changed")
