"""Files that are never half written or written by two processes: replacement, JSON and locks."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

__all__ = ["locked", "read_json", "replace", "to_finite", "write_json", "write_text"]

logger = logging.getLogger(__name__)

# Descriptors of locks. A fork, such as a worker of a loader, would hold them longer than this
# process lives, and closes them.
HELD: set[int] = set()


def replace(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Replace a file atomically: it has its old content or the new one, never a part.

    Args:
        path: The file, which need not exist; its directory must.
        fill: Called with a temporary file, open for writing bytes, which is forced to the disk and
            then moved to ``path``. If it raises, ``path`` is left as it was.

    Raises:
        OSError: If the file cannot be written, for instance because the disk is full.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except RuntimeError as error:
        # torch.save raises an error of its own if it cannot write, or is interrupted
        if isinstance(error.__context__, OSError | KeyboardInterrupt):
            raise error.__context__ from error
        raise
    finally:
        with suppress(OSError):  # where nothing can be written, there is nothing to remove
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text atomically, and create the directory if there is none.

    Args:
        path: The file.
        text: Its new content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, lambda file: file.write(text.encode()))


def to_finite(value: Any, replacement: Callable[[float], Any] = lambda number: None) -> Any:
    """Return a value of which all numbers can be written as JSON, which has no NaN and no infinity.

    Args:
        value: Dictionaries, lists, numbers and texts.
        replacement: What stands for a number that is not finite; by default None.
    """
    if isinstance(value, dict):
        return {key: to_finite(item, replacement) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_finite(item, replacement) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return replacement(value)
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically, and create the directory if there is none.

    Args:
        path: The file.
        value: Anything that :func:`json.dumps` takes. A number that is not finite is written as a
            text, ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.
    """
    words = to_finite(value, json.dumps)
    write_text(path, json.dumps(words, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read what :func:`write_json` wrote, with numbers that are not finite.

    Args:
        path: The file.

    Raises:
        ValueError: If the file is not JSON.
    """
    try:
        return _with_all_numbers(json.loads(path.read_text()))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged: {error}; remove it to continue; nothing was changed"
        ) from error


def _with_all_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_all_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_all_numbers(item) for item in value]
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return value


@contextmanager
def locked(path: Path, guarded: Path | None = None) -> Iterator[None]:
    """Hold a lock file while the context is open.

    The lock is the operating system's, so it ends with the process, however that ends, and not
    with those that it forked. The file only says who holds it, and is removed at the end. Where
    the file system has no locks, a warning is logged instead.

    Args:
        path: The lock file; its directory must exist.
        guarded: File that it guards, for messages; None is all of the directory.

    Raises:
        BlockingIOError: If the lock is held already, by this or another process.
    """
    descriptor = _open_locked(path, guarded)
    HELD.add(descriptor)
    try:
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        if descriptor in HELD:  # not so in a process that was forked
            HELD.discard(descriptor)
            with suppress(PermissionError):  # Windows does not remove open files
                path.unlink(missing_ok=True)
            os.close(descriptor)


def _release_in_fork() -> None:
    while HELD:
        os.close(HELD.pop())


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_release_in_fork)


def _open_locked(path: Path, guarded: Path | None) -> int:
    """Return the descriptor of a lock file on which the lock is held, and which is empty."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            _acquire(descriptor, path, guarded)
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the former holder removed it after it was opened here


def _acquire(descriptor: int, path: Path, guarded: Path | None) -> None:
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise BlockingIOError(
            f"{guarded or path.parent} is in use by another run, {_holder(descriptor)}, which "
            f"holds {path.name}; wait until it has ended, or choose another "
            f"{'name' if guarded else 'directory'}"
        ) from error
    except OSError as error:
        logger.warning("%s cannot be locked (%s); let one run at a time use it", path, error)


def _holder(descriptor: int) -> str:
    """Return who holds a lock, as it wrote into the file."""
    found = b""
    with suppress(OSError):  # Windows does not let others read what is locked
        found = os.read(descriptor, 1000)
    return found.decode(errors="replace") or "of a process that is not known"


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file is the one that has this path now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
