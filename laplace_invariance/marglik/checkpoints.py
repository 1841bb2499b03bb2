"""Checkpoints: written atomically, loaded without executing code, and complete, so that a run goes on bit for bit.

A checkpoint is a dictionary of tensors, numbers, strings, lists and dictionaries of these. It is written to a temporary file
beside its place and moved there, so that whoever looks finds the old one or the new one, whenever the process dies.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from laplace_invariance.files import replace

__all__ = ["Journal", "RandomStates", "read", "write"]

FORMAT = 1


def write(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint, atomically."""
    replace(path, lambda file: torch.save({"format": FORMAT, **_plain(state)}, file))


def _plain(value: Any) -> Any:
    """Make numbers of numpy, which sweeps hand in as step sizes, numbers of Python, which can be loaded safely."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value.item() if isinstance(value, np.generic) else value


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint; a file that is none, or only a part of one, is refused and left alone."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # torch raises many kinds, from struct and zip to pickle
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{path} is not a readable checkpoint (damaged, truncated, or another kind of file): {reason}; nothing was "
            "changed; remove it or name another file to start anew"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(
            f"{path} is a torch file, but not a checkpoint of marglik_training in format {FORMAT}; nothing was changed"
        )
    return state


class RandomStates:
    """The state of every source of randomness that a run may draw from.

    Those of torch (all devices), numpy and Python; and the generators of the loaders and their samplers, of the model's modules,
    and others that are given.
    """

    def __init__(
        self,
        model: nn.Module,
        loaders: Iterable[DataLoader | None],
        others: Iterable[torch.Generator | None] = (),
    ) -> None:
        found: dict[int, torch.Generator | np.random.Generator] = {}
        for owner in [*model.modules(), *loaders, *others]:
            _collect(owner, found)
        self._generators = list(found.values())

    def state_dict(self) -> dict[str, Any]:
        """Return all states, as tensors and numbers."""
        _, keys, position, has_gauss, cached = np.random.get_state()
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": [
                torch.from_numpy(keys.astype(np.int64)),
                int(position),
                int(has_gauss),
                float(cached),
            ],
            "python": random.getstate(),
            "generators": [_state_of(generator) for generator in self._generators],
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse the state of other sources, before anything is changed."""
        if len(state["generators"]) != len(self._generators):
            raise ValueError(
                f"the checkpoint has the states of {len(state['generators'])} generators, but model, loaders and arguments "
                f"have {len(self._generators)}; build them as in the run that wrote it; nothing was changed"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put all states back."""
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available() and state["cuda"]:
            torch.cuda.set_rng_state_all(state["cuda"])
        keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state(
            ("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached)
        )
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        for generator, value in zip(self._generators, state["generators"], strict=True):
            if isinstance(generator, torch.Generator):
                generator.set_state(value)
            else:
                generator.bit_generator.state = json.loads(value)


PARTS = (
    "generator", "rng", "sampler", "batch_sampler", "dataset", "datasets", "transform", "transforms", "target_transform",
)  # fmt: skip


def _collect(owner: Any, found: dict[int, Any], depth: int = 6) -> None:
    """Find generators in what loaders, data sets and transforms are made of."""
    if isinstance(owner, (torch.Generator, np.random.Generator)):
        found[id(owner)] = owner
    elif isinstance(owner, (list, tuple)):
        for item in owner[:100]:
            _collect(item, found, depth - 1)
    elif depth and owner is not None and not isinstance(owner, (torch.Tensor, np.ndarray, str)):
        for name in PARTS:
            part = vars(owner).get(name) if hasattr(owner, "__dict__") else None
            if part is not None:
                _collect(part, found, depth - 1)


def _state_of(generator: torch.Generator | np.random.Generator) -> torch.Tensor | str:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return json.dumps(generator.bit_generator.state, default=lambda array: array.tolist())


class Resumable(Protocol):
    """What can be written to a checkpoint and read from it."""

    epoch: int
    history: list[dict[str, Any]]

    def state_dict(self) -> dict[str, Any]: ...

    def check_state_dict(self, state: dict[str, Any], path: Path) -> None: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Journal:
    """Checkpoint and history of a run on the disk; either may be None.

    Args:
        run: what is written, and read now if it is resumed.
        random_states: written and read with it.
        checkpoint: file of the checkpoint.
        history: file of the history, JSON lines.
        resume: go on from the checkpoint if it exists; without it neither file may exist.
    """

    def __init__(
        self,
        run: Resumable,
        random_states: RandomStates,
        checkpoint: str | Path | None,
        history: str | Path | None,
        resume: bool,
    ) -> None:
        self._run, self._random_states = run, random_states
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._history = None if history is None else Path(history)
        self._good_epoch: int | None = None
        if resume and self._checkpoint is None:
            raise ValueError("resume=True needs to know the checkpoint=")
        if self._checkpoint is not None and self._checkpoint == self._history:
            raise ValueError(f"checkpoint and history cannot both be {self._checkpoint}")
        going_on = resume and self._checkpoint.exists()
        for path in (self._checkpoint, self._history):
            if path is not None and path.exists() and not going_on:
                raise FileExistsError(
                    f"{path} exists, but there is no checkpoint {self._checkpoint} to go on from; remove it to start anew"
                    if resume
                    else f"{path} exists; resume=True goes on from it, another name starts anew"
                )
        if going_on:
            state = read(self._checkpoint)
            run.check_state_dict(state["run"], self._checkpoint)
            random_states.check_state_dict(state["random"])
            self._check_history()
            run.load_state_dict(state["run"])
            random_states.load_state_dict(state["random"])
            self._good_epoch = run.epoch
        for path in (self._checkpoint, self._history):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        if not going_on:
            self.save()
        if (
            self._history is not None
        ):  # without what an interrupted run had written after its last checkpoint
            lines = "".join(json.dumps(record) + "\n" for record in run.history)
            replace(self._history, lambda file: file.write(lines.encode()))

    def _check_history(self) -> None:
        """Refuse to write over a file that is no history."""
        if self._history is None or not self._history.exists() or not self._history.stat().st_size:
            return
        try:
            known = "epoch" in json.loads(self._history.read_text().splitlines()[0])
        except (ValueError, TypeError, UnicodeDecodeError):
            known = False
        if not known:
            raise ValueError(
                f"{self._history} is not a history of marglik_training; nothing was changed"
            )

    def append(self, record: dict[str, Any]) -> None:
        """Append a record to the history."""
        if self._history is not None:
            with self._history.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def last_good(self) -> str:
        """Say where the last good checkpoint is."""
        if self._good_epoch is None:
            return "no checkpoint was asked for"
        return f"the last good checkpoint, of epoch {self._good_epoch}, is {self._checkpoint}"

    def save(self) -> None:
        """Write a checkpoint."""
        if self._checkpoint is not None:
            write(
                self._checkpoint,
                {"run": self._run.state_dict(), "random": self._random_states.state_dict()},
            )
            self._good_epoch = self._run.epoch
