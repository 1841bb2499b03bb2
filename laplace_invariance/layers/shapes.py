"""Shapes of settings and of tensors that several layers use."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from torch import Tensor

__all__ = ["check_features", "every_entry", "pair"]


def pair(name: str, value: int | str | Sequence[int], least: int = 1) -> tuple[int, int]:
    """Return height and width of the setting ``name``; raise unless both are at least ``least``."""
    sizes: tuple[Any, ...] = (value, value) if isinstance(value, int) else tuple(value)
    integers = all(isinstance(size, Integral) for size in sizes)
    if len(sizes) != 2 or not integers or min(sizes) < least:
        raise ValueError(
            f"{name} must be height and width, one or two integers of at least {least}, "
            f"got {value!r}"
        )
    height, width = sizes
    return height, width


def every_entry(x: Tensor) -> Tensor:
    """Bring ``[rows, ...]`` to ``[rows, shared, 1]``, where all entries share one number."""
    return x.reshape(len(x), -1, 1)


def check_features(who: str, x: Tensor, order: int, channels: int | None = None) -> None:
    """Raise, in the name of ``who``, unless ``x`` is ``[n, channels, order, height, width]``."""
    if x.ndim != 5 or x.shape[2] != order or channels not in (None, x.shape[1]):
        expected = "channels" if channels is None else channels
        raise ValueError(
            f"{who} needs features on the group, [n, {expected}, {order}, height, width], "
            f"got shape {list(x.shape)}"
        )
