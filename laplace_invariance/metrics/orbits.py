"""Inputs along an orbit, ``g x``: for elements of a finite group, or draws of an augmentation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from laplace_invariance.augmentations import Augmentation, FiniteGroup
from laplace_invariance.augmentations.base import check_n_samples
from laplace_invariance.layers.symmetry import Group

__all__ = ["Data", "GroupLike", "Orbit", "batches", "check_outputs"]

GroupLike = str | Group | Augmentation
Data = Tensor | Iterable


class Orbit:
    """The orbit of each input under a group, without the identity.

    For a finite group it has all elements but the identity, each once, whatever the learnt
    weights of a ``FiniteGroup`` are; for any other augmentation it has draws.

    Args:
        group: ``"p2"``, ``"p4"``, ``"pm"``, ``"p4m"``, a
            :class:`~laplace_invariance.layers.Group`, or an augmentation.
        n_samples: Number of fixed draws of an augmentation, one more if odd, since the middle of
            these is the identity; without effect for finite groups.

    Attributes:
        group: The group or the augmentation.
        size: Number of transformations of each input in :meth:`all`.

    Raises:
        TypeError: If ``group`` is none of these.
        ValueError: If it leaves every input as it is.
    """

    def __init__(self, group: GroupLike, n_samples: int = 8) -> None:
        check_n_samples(n_samples)
        if not isinstance(group, GroupLike):
            raise TypeError(
                "group must be the name of a group, a layers.Group or an Augmentation, "
                f"got {type(group).__name__}"
            )
        self.group = group if isinstance(group, Augmentation) else Group.of(group)
        self._sampled: Augmentation | None = None  # what is drawn from, if the group is not finite
        if isinstance(self.group, Group):
            self.size = self.group.order - 1
            transforms = self.size > 0 and self.group.moves_positions
        elif isinstance(self.group, FiniteGroup):
            self.size = len(self.group.names) - 1
            transforms = self.size > 0
        else:
            self._sampled = self.group
            self.size = n_samples + n_samples % 2
            transforms = any(self.group.magnitudes().values())
        if not transforms:
            raise ValueError(
                f"{self.group!r} transforms nothing, so every network is invariant to it; "
                "give it a range"
            )

    def all(self, x: Tensor) -> Tensor:
        """Return ``x`` ``[n, ...]`` under every element or fixed draw, ``[n, size, ...]``."""
        if self._sampled is not None:
            return self._transform(x, self._sampled.fixed(self.size))
        return self._transform(x, torch.arange(1, self.size + 1).unsqueeze(0))

    def random(self, x: Tensor, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Return each of ``x`` under random elements or draws, ``[n, n_samples, ...]``."""
        if self._sampled is not None:
            return self._transform(x, self._sampled.sample(len(x), n_samples, generator))
        device = None if generator is None else generator.device
        shape = len(x), n_samples
        elements = torch.randint(1, self.size + 1, shape, generator=generator, device=device)
        return self._transform(x, elements)

    def _transform(self, x: Tensor, draws: Tensor) -> Tensor:
        draws = draws.to(x.device)
        if isinstance(self.group, Augmentation):
            return self.group.transform(x, draws)
        if x.ndim != 4:
            raise ValueError(
                f"group {self.group.name!r} moves images [n, channels, height, width], "
                f"got shape {list(x.shape)}"
            )
        elements = range(self.group.order)
        transformed = torch.stack([self.group.transform(x, element) for element in elements], 1)
        return transformed[torch.arange(len(x), device=x.device).unsqueeze(1), draws]


def batches(data: Data, model: nn.Module, size: int) -> Iterator[Tensor]:
    """Yield inputs on the device of the model, a few at a time.

    Args:
        data: Inputs ``[n, ...]``, or a loader of batches of them, or of tuples whose first
            entries they are.
        model: The model.
        size: Largest number of inputs in a batch.

    Raises:
        TypeError: If inputs are not floating-point tensors.
        ValueError: If there are none, or they are not finite.
    """
    reference = next(model.parameters(), None)
    found = 0
    if isinstance(data, Tensor):
        data = [data]
    for batch in data:
        x = batch[0] if isinstance(batch, list | tuple) else batch
        _check_inputs(x)
        found += len(x)
        if reference is not None:
            x = x.to(reference.device)
        if len(x):
            yield from x.split(size)
    if not found:
        raise ValueError("there are no inputs to measure on")


def _check_inputs(x: object) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"inputs must be floating-point tensors, or a loader of them, got {kind}")
    if not torch.isfinite(x).all():
        raise ValueError("inputs hold NaN or infinite values")


def check_outputs(outputs: Tensor, n: int) -> Tensor:
    """Return the outputs; raise unless they are ``[n, outputs]`` and finite."""
    if outputs.ndim != 2 or len(outputs) != n:
        raise ValueError(
            f"the model must return [n, outputs] for n = {n} inputs, "
            f"got shape {list(outputs.shape)}"
        )
    if not torch.isfinite(outputs).all():
        raise ValueError("outputs of the model hold NaN or infinite values")
    return outputs
