"""Several processes that train one model together: what each has of a batch, and their sums.

Every rank runs the whole program, with the same weights, priors and random states, on its rows of
every batch. What is summed over rows (gradients of the loss, curvature, gradients of
hyperparameters) is summed over ranks as well, and everything else follows from these sums alike on
all of them. So the result is that of one process, to round-off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from laplace_invariance.curvature import eigen
from laplace_invariance.curvature.trace.chunks import part_of
from laplace_invariance.draws import Share
from laplace_invariance.marglik.batches import batches_of

__all__ = ["ALONE", "Ranks", "present_ranks", "unwrapped", "whole_loader"]


class Ranks:
    """The processes that train a model together; one alone unless told otherwise.

    Args:
        rank: Number of this process, from 0.
        size: Number of processes.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def batches(self, loader: Any, key_y: str) -> Iterator[tuple[Any, Share]]:
        """Yield this rank's rows of every batch, and which they are.

        Args:
            loader: Batches that are the same on all ranks. Of a ``DataLoader`` with an index, only
                the rows of this rank are loaded.
            key_y: Key of the targets, if batches are mappings.
        """
        if self.size == 1 or not _has_index(loader):
            for data in batches_of(loader):
                is_mapping = isinstance(data, MutableMapping)
                y = data[key_y] if is_mapping else data[-1]
                share = Share(self.rank, self.size, len(y))
                if self.size > 1 and is_mapping:
                    data = part_of(data, share.rows, key_y)
                elif self.size > 1:
                    data = [part[share.rows] for part in data]
                yield data, share
            return
        own = _OwnRows(loader.batch_sampler, self)
        for data in _with_batches(loader, own):
            yield data, own.shares.popleft()

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of tensors over ranks."""
        if self.size == 1 or not tensors:
            return list(tensors)
        return self._together(tensors, dist.all_reduce)

    def equal(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors the values that they have on the first rank."""
        found = [tensor.detach() for tensor in tensors]
        if self.size > 1 and found:
            copies = self._together(found, partial(dist.broadcast, src=0))
            for tensor, copy in zip(found, copies, strict=True):
                tensor.copy_(copy)

    def first(self, value: Any) -> Any:
        """Return the value that the first rank has."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def check_equal(self, value: Any, message: str) -> None:
        """Raise ValueError if a value is not the same on all ranks."""
        if any(other != value for other in self.gather(value)):
            raise ValueError(message)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order, with tensors on the CPU."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, tree_map_only(Tensor, Tensor.cpu, value))
        return found

    @contextmanager
    def agreeing(self, *kinds: type[Exception]) -> Iterator[None]:
        """Raise on all ranks what one of them raises inside the context, where none may wait.

        Otherwise the others would wait for the one that raised.

        Args:
            kinds: Kinds of exceptions, by default those of files and of arguments.
        """
        own = None
        expected = kinds or (OSError, TypeError, ValueError)
        try:
            yield
        except expected as error:
            own = error
        for other in self.gather(own):
            if other is not None:
                raise own or other

    def decompose(self, factors: Sequence[Tensor], vectors: bool = True) -> list[eigen.Pair]:
        """Return what :func:`~laplace_invariance.curvature.eigen.decompose` does, shared out.

        Args:
            factors: Kronecker factors, the same on all ranks.
            vectors: Whether eigenvectors are wanted.
        """
        if self.size == 1:
            return eigen.decompose(factors, vectors)
        eigen.check_finite(factors)
        twins = eigen.find_twins(factors)
        different = sorted(set(twins))
        owners = _shared_out([eigen.work(factors[i]) for i in different], self.size)
        parts: list[list[int]] = [[] for _ in range(self.size)]
        for i, owner in zip(different, owners, strict=True):
            parts[owner].append(i)
        pairs = {i: _empty_pair(factors[i].detach(), vectors) for i in different}
        own = parts[self.rank]
        # all ranks at once, before any of them waits for another
        pairs.update(zip(own, self._decomposed([factors[i] for i in own], vectors), strict=True))
        for rank, part in enumerate(parts):
            flat = [tensor for i in part for tensor in pairs[i] if tensor is not None]
            rest = iter(self._together(flat, partial(dist.broadcast, src=rank)))
            for i in part:
                values, directions = next(rest), pairs[i][1]
                pairs[i] = (values, None if directions is None else next(rest))
        return [pairs[twin] for twin in twins]

    def _decomposed(self, factors: Sequence[Tensor], vectors: bool) -> list[eigen.Pair]:
        """Decompose the factors of this rank; raise if any rank cannot decompose its own."""
        found: list[eigen.Pair] = []
        with self.agreeing(torch.linalg.LinAlgError):
            found = eigen.decompose(factors, vectors)
        return found

    def _together(
        self, tensors: Sequence[Tensor], communicate: Callable[[Tensor], Any]
    ) -> list[Tensor]:
        """Return tensors after one communication for all of a kind."""
        kinds: dict[object, list[int]] = {}
        for i, tensor in enumerate(tensors):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(i)
        found: dict[int, Tensor] = {}
        for members in kinds.values():
            flat = torch.cat([tensors[i].detach().reshape(-1) for i in members])
            communicate(flat)
            parts = flat.split([tensors[i].numel() for i in members])
            for i, part in zip(members, parts, strict=True):
                found[i] = part.view(tensors[i].shape)
        return [found[i] for i in range(len(tensors))]


ALONE = Ranks()


def present_ranks() -> Ranks:
    """Return the ranks of torch's default process group; one alone if there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return ALONE
    return Ranks(dist.get_rank(), dist.get_world_size())


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the network that ``DistributedDataParallel`` or ``DataParallel`` has inside.

    Raises:
        TypeError: If the weights are split over ranks.
    """
    if any(_is_split(module) for module in model.modules()):
        raise TypeError(
            "the weights of a model under FSDP are split over ranks, but the curvature of a layer "
            "needs all of its weights; train the model itself, or under DistributedDataParallel, "
            "whose ranks share out the data; for a network that does not fit into memory, freeze "
            "it and learn by the last layer: subset_of_weights='last_layer'"
        )
    if isinstance(model, DistributedDataParallel | nn.DataParallel):
        return model.module
    return model


def _is_split(module: nn.Module) -> bool:
    """Return whether a module is that of either version of FSDP."""
    return any(
        kind.__name__ in ("FullyShardedDataParallel", "FSDPModule")
        and kind.__module__.startswith("torch.distributed.")
        for kind in type(module).__mro__
    )


def whole_loader(loader: Any, ranks: Ranks) -> Any:
    """Return a loader of the batches that all ranks have together.

    That is the loader itself, the same on all ranks, unless its sampler is a
    ``DistributedSampler``. Of that one, batches are the union of those of ranks, and no example is
    repeated to make these equal in length.

    Args:
        loader: Loader of one rank.
        ranks: All ranks.

    Raises:
        TypeError: If the sampler is of another kind, of which it is not known what it yields.
        ValueError: If it is that of another number of ranks.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return loader
    if type(sampler) is not DistributedSampler or type(batches) is not BatchSampler:
        raise TypeError(
            f"a {type(sampler).__name__} in a {type(batches).__name__} may leave out or repeat "
            "examples, but the evidence is that of every example once; use torch's own "
            "DistributedSampler, or leave it out: ranks share out the rows of an ordinary loader"
        )
    if sampler.num_replicas != ranks.size:
        raise ValueError(
            f"the DistributedSampler has num_replicas={sampler.num_replicas}, but there are "
            f"{ranks.size} processes; start them with torchrun, or leave the sampler out"
        )
    every: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed
    )
    every.set_epoch(sampler.epoch)
    size = batches.batch_size * ranks.size
    return _with_batches(loader, BatchSampler(every, size, batches.drop_last))


def _has_index(loader: Any) -> bool:
    """Return whether batches are made of the examples that a batch sampler names."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return loader.batch_sampler is not None


class _OwnRows(Sampler[list[int]]):
    """The rows of one rank in the batches of a sampler, and in ``shares`` which they are."""

    def __init__(self, batches: Any, ranks: Ranks) -> None:
        self._batches = batches
        self._ranks = ranks
        self.shares: deque[Share] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        for indices in self._batches:
            share = Share(self._ranks.rank, self._ranks.size, len(indices))
            self.shares.append(share)
            yield list(indices)[share.rows]

    def __len__(self) -> int:
        return len(self._batches)


def _with_batches(loader: DataLoader, batches: Sampler[list[int]]) -> DataLoader:
    """Return a loader of other batches of the same examples."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
    )


def _empty_pair(factor: Tensor, vectors: bool) -> eigen.Pair:
    """Return tensors of the shapes that the decomposition of a factor has."""
    if factor.ndim == 1:
        return factor, None
    return factor[..., 0], factor if vectors else None


def _shared_out(work: Sequence[float], size: int) -> list[int]:
    """Return for each piece of work who does it: the largest first, by whoever has least."""
    loads = [0.0] * size
    owners = [0] * len(work)
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += work[i]
    return owners
