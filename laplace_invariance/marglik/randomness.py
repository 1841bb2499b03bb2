"""States of all sources of randomness, to go on from them or to put them back."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from laplace_invariance.marglik.ranks import Ranks

__all__ = ["RandomStates"]

Generator = torch.Generator | np.random.Generator


class RandomStates:
    """The states of all sources of randomness that a run may draw from.

    These are the generators of torch (on all devices), of numpy and of Python, and those that are
    found in the model's modules, in the loaders with their samplers, data sets and transforms, and
    among ``others``.

    Args:
        model: Model that is trained.
        loaders: Loaders; None is ignored.
        others: Further generators; None is ignored.
    """

    def __init__(
        self,
        model: nn.Module,
        loaders: Iterable[DataLoader | None],
        others: Iterable[torch.Generator | None] = (),
    ) -> None:
        found: dict[int, Generator] = {}
        for owner in (*model.modules(), *loaders, *others):
            _collect_generators(owner, found)
        self._generators = list(found.values())

    def state_dict(self) -> dict[str, Any]:
        """Return all states, as tensors, numbers and strings."""
        legacy: Any = np.random.get_state()  # noqa: NPY002 - data sets may draw from it
        _, keys, position, has_gauss, cached = legacy
        numpy_state = [torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached]
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": numpy_state,
            "python": random.getstate(),
            "generators": [_state_of(generator) for generator in self._generators],
        }

    def seed(self, seed: int) -> None:
        """Seed all sources of randomness, each of the generators found with a number of its own.

        Args:
            seed: The seed, from 0 to ``2**32 - 1``.
        """
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - data sets may draw from it
        random.seed(seed)
        for i, generator in enumerate(self._generators):
            own = zlib.crc32(f"{seed}, generator {i}".encode())
            if isinstance(generator, torch.Generator):
                generator.manual_seed(own)
            else:
                generator.bit_generator.state = type(generator.bit_generator)(own).state

    def equal(self, ranks: Ranks) -> None:
        """Take over the states of the first rank."""
        if ranks.size > 1:
            self.load_state_dict(ranks.first(self.state_dict()))

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless the state is that of as many generators, of the same kinds."""
        theirs, ours = len(state["generators"]), len(self._generators)
        if theirs != ours:
            raise ValueError(
                f"the checkpoint has the states of {theirs} generators, but model, loaders and "
                f"arguments have {ours}; build them as in the run that wrote it; "
                "nothing was changed"
            )
        kinds = [_kind_of(_state_of(generator)) for generator in self._generators]
        if [_kind_of(value) for value in state["generators"]] != kinds:
            raise ValueError(
                "the checkpoint has the states of generators of other kinds or devices than those "
                "of model, loaders and arguments; build them as in the run that wrote it; "
                "nothing was changed"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back states that :meth:`state_dict` returned."""
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available() and state["cuda"]:
            torch.cuda.set_rng_state_all(state["cuda"])
        keys, *rest = state["numpy"]
        legacy = ("MT19937", keys.numpy().astype(np.uint32), *rest)
        np.random.set_state(legacy)  # noqa: NPY002
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        for generator, value in zip(self._generators, state["generators"], strict=True):
            if isinstance(generator, torch.Generator):
                generator.set_state(value)
            else:
                generator.bit_generator.state = json.loads(value)


# Attributes under which loaders, samplers, data sets and transforms keep what they are made of.
PARTS = "generator rng sampler batch_sampler dataset datasets transform transforms target_transform"


def _collect_generators(owner: Any, found: dict[int, Generator], depth: int = 6) -> None:
    """Add the generators in an object, and in what it is made of, by their id."""
    if isinstance(owner, torch.Generator | np.random.Generator):
        found[id(owner)] = owner
    elif isinstance(owner, list | tuple):
        for item in owner[:100]:
            _collect_generators(item, found, depth - 1)
    elif depth and hasattr(owner, "__dict__") and not isinstance(owner, torch.Tensor):
        for name in PARTS.split():
            _collect_generators(vars(owner).get(name), found, depth - 1)


def _state_of(generator: Generator) -> torch.Tensor | str:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return json.dumps(generator.bit_generator.state, default=lambda array: array.tolist())


def _kind_of(state: torch.Tensor | str) -> object:
    """Return by what states of one generator differ from those of another kind."""
    if isinstance(state, torch.Tensor):
        return len(state)
    return json.loads(state)["bit_generator"]
