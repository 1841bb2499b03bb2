"""Checksums of models and data, by which a checkpoint is known to be of the same ones.

They say no more than whether something changed: a fingerprint is a dictionary of which each entry
is named after what it is of, so that a message can name those that differ.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from laplace_invariance.augmentations.base import Augmentation
from laplace_invariance.marglik.loaders import batches_in_words, drops_last
from laplace_invariance.marglik.randomness import RandomStates
from laplace_invariance.marglik.settings import DataSettings

__all__ = ["data_fingerprint", "loader_fingerprint", "model_fingerprint", "seeded"]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Attributes that every module has, and one that laplace sets
NO_OPTIONS = frozenset({*vars(nn.Module()), "output_size"})


def model_fingerprint(model: nn.Module) -> dict[str, int]:
    """Return checksums of a model: of its weights and buffers, and of what else it is made of.

    The latter are the classes of modules, their representations, and their attributes that are
    numbers or texts, such as a slope that is in no ``state_dict``. Devices, modes and what requires
    grad do not count.

    Args:
        model: Any module; it stays as it is.
    """
    tensors = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    options = 0
    for name, module in model.named_modules(remove_duplicate=False):
        # an augmentation represents its ranges there, which are in its tensors
        words = "" if isinstance(module, Augmentation) else module.extra_repr()
        own = (name, type(module).__qualname__, words, _plain_attributes(module))
        options = _updated(options, own)
    return {
        "checksum of the model": _updated(0, dict(tensors)),
        "checksum of the model's options": options,
    }


def data_fingerprint(data: DataSettings, model: nn.Module | None = None) -> dict[str, Any]:
    """Return checksums of the inputs and targets of all examples, and how they are batched.

    Examples are read twice, in the order of the data, with the same seeds. Random transforms that
    these reach have the same result then, and in every other call. If they do not, so that two
    passes differ, the checksum is None: what is random tells nothing. Random states are put back.

    Args:
        data: The data.
        model: Model with random states to put back, too, if loading draws from its generators.
    """
    random_states = RandomStates(model or nn.Identity(), [data.train_loader, data.marglik_loader])
    passes = []
    for _ in range(2):
        with seeded(0, random_states):
            passes.append(_checksums(data))
    inputs, targets = (a if a == b else None for a, b in zip(*passes, strict=True))
    return {
        "checksum of the inputs": inputs,
        "checksum of the targets": targets,
        **loader_fingerprint(data.train_loader),
    }


def _checksums(data: DataSettings) -> tuple[int, int]:
    """Return the checksums of all inputs and of all targets."""
    inputs = targets = 0
    for batch in data.ordered_loader:
        if isinstance(batch, MutableMapping):
            y = batch[data.dict_key_y]
            x: Any = {key: value for key, value in batch.items() if key != data.dict_key_y}
        else:
            *x, y = batch
        inputs, targets = _updated(inputs, x), _updated(targets, y)
    return inputs, targets


def loader_fingerprint(loader: DataLoader) -> dict[str, Any]:
    """Return which examples a loader would put into a batch, but for what is random in it.

    Args:
        loader: Any loader.
    """
    sampler: Any = getattr(loader, "sampler", None)
    batches: Any = getattr(loader, "batch_sampler", None)
    own = [
        getattr(loader, "generator", None) is not None,
        *((type(part).__qualname__, _attributes(part)) for part in (sampler, batches)),
    ]
    return {
        "batches of training": batches_in_words(loader),
        "drop_last": bool(drops_last(loader)),
        "checksum of the sampler": _updated(0, own),
    }


@contextmanager
def seeded(seed: int, random_states: RandomStates) -> Iterator[None]:
    """Seed everything that a run draws from, and put it back at the end of the context.

    Args:
        seed: The seed.
        random_states: All sources of randomness: those of torch, numpy and Python, and the
            generators of the model, the loaders, their samplers and data sets.
    """
    before = random_states.state_dict()
    try:
        random_states.seed(seed)
        yield
    finally:
        random_states.load_state_dict(before)


def _attributes(owner: object) -> dict[str, Any]:
    """Return the attributes of a sampler that are numbers, texts, tensors, or made of those."""
    kept = (*PLAIN, Tensor, np.ndarray, list, tuple, range)
    found = vars(owner) if hasattr(owner, "__dict__") else {}
    return {name: value for name, value in found.items() if isinstance(value, kept)}


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are numbers or texts, or tuples of these."""

    def is_plain(value: object) -> bool:
        if isinstance(value, list | tuple):
            return all(map(is_plain, value))
        return isinstance(value, PLAIN)

    return {
        name: value
        for name, value in vars(module).items()
        if name not in NO_OPTIONS and is_plain(value)
    }


def _updated(checksum: int, value: Any) -> int:
    """Return a checksum with a value added to it: tensors, and whatever contains them."""
    if isinstance(value, Tensor):
        return zlib.crc32(_content(value), _updated(checksum, (str(value.dtype), *value.shape)))
    if isinstance(value, np.ndarray) and value.dtype != object:
        checksum = _updated(checksum, (str(value.dtype), *value.shape))
        return zlib.crc32(np.ascontiguousarray(value).tobytes(), checksum)
    if isinstance(value, Mapping):
        for key, item in value.items():
            checksum = _updated(_updated(checksum, key), item)
        return _updated(checksum, len(value))
    if isinstance(value, Set):
        return _updated(checksum, sorted(map(_text, value)))
    if isinstance(value, str | bytes | range) or not isinstance(value, Sequence | np.ndarray):
        return zlib.crc32(f"{_text(value)};".encode(), checksum)
    for item in value:
        checksum = _updated(checksum, item)
    return _updated(checksum, len(value))


def _content(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor of any type, layout and device."""
    tensor = tensor.detach().cpu()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg().contiguous().flatten()
    return tensor.view(torch.uint8).numpy().tobytes()


def _text(value: object) -> str:
    """Return the text of a value without addresses, which differ from process to process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
