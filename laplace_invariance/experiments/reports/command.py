"""The command that makes a run, from its configuration."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from laplace_invariance.experiments.checks import Config

__all__ = ["command"]


def command(verb: str, config: Config, out: Path) -> str:
    """Return the command that makes a run again, without options that have their defaults.

    Args:
        verb: Name of the command.
        config: Configuration of the run.
        out: Directory of the run.
    """
    defaults = type(config)()
    words = ["laplace-invariance", verb]
    for entry in fields(config):
        value = getattr(config, entry.name)
        if value != getattr(defaults, entry.name):
            option = entry.metadata.get("option", entry.name.removeprefix("n_"))
            words += [f"--{option.replace('_', '-')}", *_words(value)]
    words += ["--out", str(out)]
    return shlex.join(words)


def _words(value: Any) -> list[str]:
    """Return a value as it is written after its option."""
    if value is True:
        return []
    if isinstance(value, Mapping):
        return [f"{name}={one!r}" for name, one in value.items()]
    if isinstance(value, tuple):
        return [str(one) for one in value]
    return [str(value)]
