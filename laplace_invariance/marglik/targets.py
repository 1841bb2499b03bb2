"""Targets from which something can be learnt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from laplace_invariance.marglik.settings import DataSettings

__all__ = ["check_labels", "check_targets", "known_targets", "targets_of"]


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


def check_labels(y: Tensor, n_outputs: int | None = None) -> None:
    """Raise ValueError if a label is negative, such as -100, which the cross-entropy passes over.

    The mean of the loss is then over other examples than those that the evidence counts.

    Args:
        y: Targets of a classification; classes are whole numbers.
        n_outputs: Number of classes that the network tells apart, if labels beyond it are to be
            refused, too.
    """
    if y.is_floating_point():
        return
    if n_outputs is not None and y.max() >= n_outputs:
        raise ValueError(
            f"the label {y.max().item()} is beyond the {n_outputs} outputs of the network: classes "
            f"count from 0 to {n_outputs - 1}"
        )
    if not (y < 0).any():
        return
    raise ValueError(
        f"the label {y.min().item()} is no class: classes count from 0, and the evidence is that "
        "of every example with its label; wrap the examples that have one in "
        "torch.utils.data.Subset"
    )


def known_targets(dataset: Any) -> Tensor | None:
    """Return the targets of all examples if they are at hand; None if data would be loaded.

    Args:
        dataset: The data set.
    """
    if isinstance(dataset, Subset):
        targets = known_targets(dataset.dataset)
        return None if targets is None else targets[list(dataset.indices)]
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[-1]
    return None
