"""The data that are given to suggest: every example once, shuffled anew for every repeat."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, IterableDataset

from laplace_invariance.marglik.loaders import (
    batch_size_of,
    check_every_example,
    check_loader,
    drops_last,
    rebuilt,
)

__all__ = ["shuffled"]

WHY = "since its examples are shuffled anew for every repeat"
WAY_OUT = "give a DataLoader of the same data without a sampler"


def shuffled(loader: DataLoader) -> DataLoader:
    """Return a loader of the same examples in random order, by a generator that can be seeded.

    Args:
        loader: Loader; the order of its examples does not matter.

    Raises:
        TypeError: If its examples cannot be put into another order.
        ValueError: If it is empty, or its sampler leaves out or repeats examples.
    """
    batch_size = batch_size_of(loader) if isinstance(loader, DataLoader) else None
    if batch_size is None:
        raise TypeError(
            f"loader must be a torch DataLoader with a batch size, {WHY}, got "
            f"{type(loader).__name__}"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"loader must have a data set with an index, {WHY}, but {type(loader.dataset).__name__}"
            " is an IterableDataset"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise TypeError(
            f"{type(loader).__name__} has an __iter__ of its own, which is not that of the "
            "shuffled loader; change batches by collate_fn= or in the data set"
        )
    n_data = check_loader("loader", loader)
    check_every_example(loader, WAY_OUT)
    n_left_out = n_data - len(loader) * batch_size
    if drops_last(loader) and n_left_out >= batch_size:
        raise ValueError(
            f"the loader leaves out {n_left_out} of {n_data} examples, more than those of a last "
            "batch; wrap the examples to train on in torch.utils.data.Subset"
        )
    return rebuilt(
        loader,
        loader.dataset,
        batch_size,
        shuffle=True,
        drop_last=drops_last(loader),
        generator=torch.Generator(),
    )
