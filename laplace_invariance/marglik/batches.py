"""The batches of a loader, without the time that stacking single rows takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

__all__ = ["batches_of"]


def batches_of(loader: Any) -> Iterator[Any]:
    """Iterate over a loader, or whatever yields batches.

    A ``DataLoader`` of a ``TensorDataset`` takes tensors apart row by row and stacks the rows.
    Indexing them once per batch gives the same, and as it draws the same random numbers, in the
    same order. A batch of a hundred small images then takes a tenth of the time.

    Args:
        loader: Loader.
    """
    if not _stacks_rows(loader):
        yield from loader
        return
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # a seed for workers
    for index in loader.batch_sampler:
        yield list(loader.dataset[index])


def _stacks_rows(loader: Any) -> bool:
    """Return whether batches are rows of tensors, stacked in this process."""
    return (
        type(loader) is DataLoader
        and type(loader.dataset) is TensorDataset
        and loader.batch_sampler is not None
        and loader.collate_fn is default_collate
        and loader.num_workers == 0
        and not loader.pin_memory
    )
