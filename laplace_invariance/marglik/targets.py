"""Targets from which something can be learnt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping

from torch import Tensor

from laplace_invariance.marglik.settings import DataSettings

__all__ = ["check_targets", "targets_of"]


def targets_of(data: DataSettings) -> Iterator[Tensor]:
    """Yield the targets of all batches, in the order of the data.

    Args:
        data: The data; nothing is moved to another device.
    """
    for batch in data.ordered_loader:
        if isinstance(batch, MutableMapping):
            yield batch[data.dict_key_y]
        else:
            yield batch[1]


def check_targets(batches: Iterable[Tensor]) -> None:
    """Raise ValueError if all targets are the same, which there is nothing to learn from.

    Args:
        batches: Targets; no more are looked at than it takes to find two that differ.
    """
    first: Tensor | None = None
    for targets in batches:
        if first is None:
            first = targets[:1]
        if (targets != first).any():
            return
    found = None if first is None else first.squeeze().tolist()
    raise ValueError(
        f"all targets are {found}, which any network predicts, whatever its augmentation; give "
        "data of two classes or more, or with targets that differ"
    )
