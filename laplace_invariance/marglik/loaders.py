"""Loaders: how many examples they have, how they batch them, and whether they yield every one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from laplace_invariance.marglik.randomness import RandomStates

__all__ = [
    "batch_size_of",
    "batches_in_words",
    "check_every_example",
    "check_loader",
    "drops_last",
    "in_order",
    "is_in_order",
    "n_examples",
    "rebuilt",
]

# Samplers that yield every example once if they have the length of the data, and no replacement.
WHOLE = (SequentialSampler, RandomSampler, DistributedSampler)
WAY_OUT = (
    "give marglik_loader=, a DataLoader of the same data without a sampler, and estimator='refit', "
    "which looks at no others"
)


def n_examples(loader: DataLoader) -> int:
    dataset: Any = loader.dataset  # torch declares no length of data sets
    return len(dataset)


def check_loader(name: str, loader: DataLoader) -> int:
    """Raise unless there are batches and examples; return the number of examples."""
    try:
        n_data, n_batches = n_examples(loader), len(loader)
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"{name} must be a DataLoader with a length and a dataset with a length: {error}"
        ) from error
    if n_data == 0 or n_batches == 0:
        raise ValueError(f"{name} is empty: {n_data} examples in {n_batches} batches")
    return n_data


def batch_size_of(loader: DataLoader) -> int | None:
    """Return the number of examples in a batch, of a batch sampler if there is one."""
    if loader.batch_size is not None:
        return loader.batch_size
    return getattr(loader.batch_sampler, "batch_size", None)


def drops_last(loader: DataLoader) -> bool:
    """Return whether a loader or its batch sampler leaves out the last, smaller batch."""
    sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader, "drop_last", False) or getattr(sampler, "drop_last", False)


def in_order(loader: DataLoader, batch_size: int | None) -> DataLoader:
    """Return a loader of all examples of another, in the order of the data set."""
    return rebuilt(loader, loader.dataset, batch_size)


def rebuilt(
    loader: DataLoader, dataset: Dataset[Any], batch_size: int | None, **options: Any
) -> DataLoader:
    """Return a loader of other batches, which are loaded as those of a given one.

    Workers do not persist, as they would draw other numbers every time.

    Args:
        loader: The given one.
        dataset: Data set of the new one.
        batch_size: Number of examples in a batch of it.
        **options: Further arguments of ``DataLoader``, such as ``shuffle``.
    """
    return DataLoader(
        dataset,
        batch_size,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        **options,
    )


def batches_in_words(loader: DataLoader) -> str:
    """Return in words how a loader makes batches."""
    size = batch_size_of(loader) if isinstance(loader, DataLoader) else None
    sampler = type(getattr(loader, "sampler", None)).__name__
    return f"{len(loader)} of {size} by {sampler}"


def is_in_order(loader: DataLoader) -> bool:
    """Return whether a loader has the same batches in every epoch, in the order of the data."""
    batches = getattr(loader, "batch_sampler", None)
    has_plain_batches = batches is None or type(batches) is BatchSampler
    return has_plain_batches and type(getattr(loader, "sampler", None)) is SequentialSampler


def check_every_example(loader: Any, way_out: str = WAY_OUT) -> None:
    """Raise unless a loader yields every example once, as the evidence is that of all of them.

    Those that ``drop_last`` leaves out are passed over. The indices of samplers that are not
    torch's own are gone through once, without their data; all random states are put back.

    Args:
        loader: Loader; nothing is known of one without an index, which passes.
        way_out: What to do about it, for messages.

    Raises:
        ValueError: If examples are left out or repeated.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    n = n_examples(loader)
    batches: Any = loader.batch_sampler
    sampler: Any = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if getattr(sampler, "replacement", False):
        raise ValueError(
            f"{type(sampler).__name__} draws with replacement, but the evidence is that of every "
            f"example once; {way_out}"
        )
    if hasattr(sampler, "__len__") and len(sampler) != n:
        raise ValueError(
            f"the sampler yields {len(sampler)} of {n} examples, but the evidence is that of the "
            "whole data set; wrap the examples to train on in torch.utils.data.Subset"
        )
    has_plain_batches = batches is None or type(batches) is BatchSampler
    if has_plain_batches and type(sampler) in WHOLE:
        return
    random_states = RandomStates(nn.Identity(), [loader])
    before = random_states.state_dict()
    try:
        if has_plain_batches:
            _check_indices(sampler, n, sampler, way_out)
        elif not drops_last(loader):
            _check_indices((i for batch in batches for i in batch), n, batches, way_out)
    finally:
        random_states.load_state_dict(before)


def _check_indices(indices: Iterable[Any], n: int, owner: object, way_out: str) -> None:
    """Raise unless these are the indices of ``n`` examples, each once."""
    seen: set[object] = set()
    for index in _plain(indices, n):
        if index in seen:
            raise ValueError(
                f"{type(owner).__name__} yields example {index} more than once, but the evidence "
                f"is that of every example once; {way_out}"
            )
        seen.add(index)
    if len(seen) != n:
        raise ValueError(
            f"{type(owner).__name__} yields {len(seen)} of {n} examples, but the evidence is that "
            "of the whole data set; wrap the examples to train on in torch.utils.data.Subset, or "
            f"{way_out}"
        )


def _plain(indices: Iterable[Any], n: int) -> Iterator[object]:
    """Yield indices such that those of the same example are equal."""
    for index in indices:
        is_number = hasattr(index, "__index__")
        yield operator.index(index) % n if is_number else repr(index)
