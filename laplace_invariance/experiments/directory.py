"""The directory of a run: whose it is, what is finished there, and everything written to it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laplace_invariance import plots
from laplace_invariance.experiments.checks import Config
from laplace_invariance.files import locked, read_json, write_json, write_text
from laplace_invariance.marglik.ranks import present_ranks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["RunDirectory"]

logger = logging.getLogger(__name__)

CONFIGURATION = "experiment.json"
LOCK = ".lock"


class RunDirectory:
    """The directory of a run: whose it is, what is finished there, and everything written to it.

    With ``out=None`` every method does nothing, so that an experiment reads the same whether its
    results are kept or not. A run uses it as a context::

        with RunDirectory(out, config, resume) as directory:
            if directory.finished() is None:
                ...                                          # whatever may refuse the configuration
                directory.begin()                            # from here on, files are written
                directory.save("summary.json", ...)

    Args:
        out: The directory; None keeps nothing.
        config: Configuration of the run, which is kept in ``experiment.json``; None if the
            directory belongs to no run in particular.
        resume: Whether to continue a run that the directory has already.

    Attributes:
        writes: Whether this process writes; of several that share a run, only the first does.

    Raises:
        FileExistsError: If the directory has a run, and ``resume`` is False.
        ValueError: If the directory has the run of another configuration.
    """

    def __init__(
        self, out: str | Path | None, config: Config | None = None, resume: bool = False
    ) -> None:
        self.out = None if out is None else Path(out)
        self.config = config
        self.resume = resume
        self._stack = ExitStack()
        self._locked = False
        self._is_new = False
        self._ranks = present_ranks()
        self.writes = self._ranks.is_first
        with self._ranks.agreeing():
            if self.writes:
                self._check()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._is_new:
            self._withdraw()
        self._stack.close()

    def lock(self) -> None:
        """Create the directory, and lock it until the context ends.

        Raises:
            BlockingIOError: If another run uses the directory.
            FileExistsError: If another run has begun and ended here in the meantime.
        """
        if self.out is None or self._locked:
            return
        with self._ranks.agreeing():
            if self.writes:
                self._lock(self.out)
        self._locked = True

    def _lock(self, out: Path) -> None:
        missing = [path for path in (out, *out.parents) if not path.exists()]
        for path in reversed(missing):  # the innermost is removed first
            self._stack.callback(_remove_if_empty, path)
        if out.exists() and not out.is_dir():
            raise NotADirectoryError(f"{out} is a file; choose a directory for the results")
        out.mkdir(parents=True, exist_ok=True)
        self._stack.enter_context(locked(out / LOCK))
        self._check(locked_here=True)

    def begin(self) -> None:
        """Lock the directory, as :meth:`lock` does, and write the configuration.

        Nothing is written before, and a new configuration is removed if the context ends in an
        error before anything else was written, so that an impossible one leaves no trace.
        """
        self.lock()
        path = self.path(CONFIGURATION)
        if self.config is None or path is None:
            return
        if self.writes and not path.exists():
            self._is_new = True
        head = {"experiment": type(self.config).__name__, "format": self.config.format}
        self.save(CONFIGURATION, head | asdict(self.config))

    def _withdraw(self) -> None:
        """Remove the configuration if there is nothing else."""
        assert self.out is not None
        found = {path.name for path in self.out.iterdir()}
        if found <= {CONFIGURATION, LOCK}:
            (self.out / CONFIGURATION).unlink(missing_ok=True)

    def finished(self) -> Any | None:
        """Return what ``summary.json`` has; None if there is none."""
        path = self.path("summary.json")
        if path is None or not path.exists():
            return None
        return read_json(path)

    def path(self, name: str) -> Path | None:
        """Return the path of a file in the directory; None if nothing is kept.

        Args:
            name: Name of the file.
        """
        if self.out is None:
            return None
        return self.out / name

    def save(self, name: str, value: Any) -> None:
        """Write a text, or anything else as JSON, atomically.

        Args:
            name: Name of the file.
            value: A text without its final newline, or what JSON can express.
        """
        if self.out is None or not self.writes:
            return
        if isinstance(value, str):
            write_text(self.out / name, f"{value}\n")
        else:
            write_json(self.out / name, value)

    def figure(
        self, name: str, size: tuple[float, float], draw: Callable[[Figure], object]
    ) -> Path | None:
        """Draw a figure and save it; without matplotlib, log a warning instead, once.

        Args:
            name: Name of the file.
            size: Width and height in inches.
            draw: Called with the empty figure.

        Returns:
            Path of the figure; None if there is none.
        """
        if self.out is None or not self.writes or not _can_draw():
            return None
        figure = plots.figure(size)
        draw(figure)
        figure.savefig(self.out / name, dpi=120)
        return self.out / name

    def _check(self, locked_here: bool = False) -> None:
        """Raise if the directory has a run that must not be continued with this configuration."""
        path = self.path(CONFIGURATION)
        if self.config is None or path is None or not path.exists():
            return
        if not self.resume:
            if not locked_here:
                _check_use(path.parent / LOCK)
            raise FileExistsError(
                f"{path} exists; pass --resume (resume=True) to continue that run, or choose "
                "another directory"
            )
        saved = read_json(path)
        kind = type(self.config).__name__
        version = saved.pop("format", 1)
        if saved.pop("experiment", kind) != kind:
            raise ValueError(f"{path} is of another kind of experiment; nothing was changed")
        if version != self.config.format:
            raise _other_format(path, version, self.config.format)
        try:
            found = _identity(type(self.config)(**saved))
        except TypeError as error:  # fields that this kind of configuration does not have
            raise ValueError(
                f"{path} is of another kind of experiment; nothing was changed"
            ) from error
        wanted = _identity(self.config)
        different = [name for name in wanted if found[name] != wanted[name]]
        if different:
            raise ValueError(
                f"{path} is of another experiment: it differs in {', '.join(different)}; nothing "
                "was changed"
            )


def _check_use(lock: Path) -> None:
    """Raise if another process uses a directory now, which cannot be resumed then."""
    if lock.exists():
        with locked(lock):
            pass


def _other_format(path: Path, found: int, wanted: int) -> ValueError:
    return ValueError(
        f"{path} has format {found} and this version writes format {wanted}: it was computed, or "
        "is kept, in another way, so that it can be neither read nor continued; choose another "
        "directory; nothing was changed"
    )


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):  # it is not empty, or gone
        directory.rmdir()


def _identity(config: Config) -> dict[str, Any]:
    """Return the fields that tell one experiment from another."""
    return {
        entry.name: getattr(config, entry.name)
        for entry in fields(config)
        if entry.metadata.get("identity", True)
    }


@functools.cache  # so that it warns once
def _can_draw() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        logger.warning(
            "figures are left out, since there is no matplotlib: "
            "pip install 'laplace-invariance[plots]'"
        )
        return False
    return True
