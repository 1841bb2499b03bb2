"""Keep what the backward pass needs outside of the heap.

A fit keeps the inputs of every batch until its backward pass. Where these are allocated between
the large temporaries of curvature, the allocator can neither return the space around them to the
system nor find room there for the temporaries of the next batch, and the memory of a fit grows
several times faster than its data. A region of its own for each batch leaves the heap as it was.
What remains there, the small objects of the graph, still splits large blocks now and then, so from
time to time free pages are returned to the system.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, MutableMapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from laplace_invariance.invariant import with_values

__all__ = ["keep", "keep_batch", "trim"]

ALIGNMENT = 64  # bytes, as torch's own allocator has it
TRIM_EVERY = 32  # batches; the pages that are returned are faulted in again, which takes time

_batches = count(1)


def keep(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors in one region of memory, which is freed with the last of them.

    A tensor on another device and one with a graph are returned as they are; a tensor that is given
    twice is copied once. Views of larger tensors are copied, too: loaders may fill these again.
    """
    found = {id(tensor): tensor for tensor in tensors}
    copied = {key: tensor for key, tensor in found.items() if _is_plain(tensor)}
    if copied:
        region = _region(sum(_padded(tensor) for tensor in copied.values()))
        start = 0
        for key, tensor in copied.items():
            found[key] = _copy(tensor, region[start:])
            start += _padded(tensor)
    return [found[id(tensor)] for tensor in tensors]


def keep_batch(x: Any, y: Tensor) -> tuple[Any, Tensor]:
    """Return inputs, a tensor or a mapping with tensors in it, and targets, :func:`keep` applied.

    Anything else in a mapping is left as it is.
    """
    if isinstance(x, MutableMapping):
        names = [name for name, value in x.items() if isinstance(value, Tensor)]
        *tensors, y = keep([*(x[name] for name in names), y])
        values = dict(x.items()) | dict(zip(names, tensors, strict=True))
        return with_values(x, values), y
    if isinstance(x, Tensor):
        x, y = keep([x, y])
    return x, y


def _is_plain(tensor: Tensor) -> bool:
    """Return whether this is a plain tensor on the CPU."""
    plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized
    return plain and tensor.device.type == "cpu" and not tensor.requires_grad and tensor.numel() > 0


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _region(size: int) -> Tensor:
    """Return ``size`` bytes, zeros, directly from the system."""
    if hasattr(mmap, "MAP_ANONYMOUS"):
        buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        buffer = mmap.mmap(-1, size)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _copy(tensor: Tensor, region: Tensor) -> Tensor:
    """Copy a tensor to the start of a region, its memory format included."""
    strides = torch.empty_like(tensor, device="meta").stride()
    place = region[: tensor.nbytes].view(tensor.dtype)
    return place.as_strided(tensor.shape, strides, place.storage_offset()).copy_(tensor)


def trim() -> None:
    """Return free pages of the heap to the system, once in a number of batches.

    To be called once per batch. Only glibc needs it, and has a function for it.
    """
    if next(_batches) % TRIM_EVERY == 0:
        _malloc_trim()(0)


@lru_cache(maxsize=1)
def _malloc_trim() -> Callable[[int], object]:
    if sys.platform == "linux":
        try:
            return ctypes.CDLL(None).malloc_trim
        except (AttributeError, OSError):  # another C library
            pass
    return lambda pad: None
