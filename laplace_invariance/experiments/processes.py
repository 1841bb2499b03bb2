"""The processes that ``torchrun`` starts, as one run of the program."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from laplace_invariance.marglik.ranks import ALONE, Ranks, present_ranks

__all__ = ["joined"]


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Join the other processes of ``torchrun`` inside the context, if there are any.

    Args:
        device: Device of the run; of ``"cuda"``, every process of a machine has one of its own.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    on_cuda = torch.device(device).type == "cuda"
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_cuda else "gloo")
    ranks = present_ranks()
    with warnings.catch_warnings():
        if not ranks.is_first:  # the first one says the same
            warnings.simplefilter("ignore")
        yield ranks
    dist.destroy_process_group()  # after an error, others might never answer
