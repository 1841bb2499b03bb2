"""Inputs along an orbit, ``g x``: for every element ``g`` of a finite group, or for draws of an augmentation."""

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
    """What a group makes of inputs, other than leaving them as they are.

    Of a finite group these are all elements but the identity, each once, whatever the learnt weights of a ``FiniteGroup`` are; of
    any other augmentation they are draws.

    Args:
        group: ``"p2"``, ``"p4"``, ``"pm"``, ``"p4m"``, a :class:`~laplace_invariance.layers.Group`, or an augmentation.
        n_samples: fixed draws of an augmentation, one more if odd, since the middle of these is the identity; of no effect for
            finite groups.
    """

    def __init__(self, group: GroupLike, n_samples: int = 8) -> None:
        check_n_samples(n_samples)
        if not isinstance(group, GroupLike):
            raise TypeError(
                f"group must be the name of a group, a layers.Group or an Augmentation, got {type(group).__name__}"
            )
        self.group = group if isinstance(group, Augmentation) else Group.of(group)
        if isinstance(self.group, Group):
            self.order = self.group.order
        else:
            self.order = len(self.group.names) if isinstance(group, FiniteGroup) else None
        still = (
            isinstance(self.group, Group)
            and self.group.matrices is None
            and not self.group.permutations
        )
        if (
            self.order == 1
            or still
            or (self.order is None and not any(self.group.magnitudes().values()))
        ):
            raise ValueError(
                f"{self.group!r} transforms nothing, so every network is invariant to it; give it a range"
            )
        self.size = n_samples + n_samples % 2 if self.order is None else self.order - 1

    def all(self, x: Tensor) -> Tensor:
        """Return ``x`` ``[n, ...]`` under every element, or every fixed draw, ``[n, size, ...]``."""
        fixed = (
            self.group.fixed(self.size)
            if self.order is None
            else torch.arange(1, self.order).unsqueeze(0)
        )
        return self._apply(x, fixed)

    def random(self, x: Tensor, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Return each of ``x`` ``[n, ...]`` under random elements or draws of its own, ``[n, n_samples, ...]``."""
        if self.order is None:
            return self._apply(x, self.group.sample(len(x), n_samples, generator))
        device = None if generator is None else generator.device
        elements = torch.randint(
            1, self.order, (len(x), n_samples), generator=generator, device=device
        )
        return self._apply(x, elements)

    def _apply(self, x: Tensor, draws: Tensor) -> Tensor:
        if isinstance(self.group, Augmentation):
            return self.group.transform(x, draws.to(x.device))
        if x.ndim != 4:
            raise ValueError(
                f"group {self.group.name!r} moves images [n, channels, height, width], got shape {list(x.shape)}"
            )
        moved = torch.stack(
            [self.group.transform(x, element) for element in range(self.order)], dim=1
        )
        return moved[torch.arange(len(x), device=x.device).unsqueeze(1), draws.to(x.device)]


def batches(data: Data, model: nn.Module, size: int) -> Iterator[Tensor]:
    """Yield inputs on the device of the model, at most ``size`` at a time.

    Args:
        data: inputs ``[n, ...]``, or a loader of batches of them, or of tuples whose first entries they are.
        model: the model.
        size: of batches.
    """
    reference = next(model.parameters(), None)
    found = 0
    for batch in [data] if isinstance(data, Tensor) else data:
        x = batch[0] if isinstance(batch, list | tuple) else batch
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(
                f"inputs must be floating-point tensors, or a loader of them, got {kind}"
            )
        if not torch.isfinite(x).all():
            raise ValueError("inputs hold NaN or infinite values")
        found += len(x)
        yield from (
            (x if reference is None else x.to(reference.device)).split(size) if len(x) else ()
        )
    if not found:
        raise ValueError("there are no inputs to measure on")


def check_outputs(outputs: Tensor, n: int) -> Tensor:
    """Refuse outputs that are not ``[n, outputs]`` or not finite."""
    if outputs.ndim != 2 or len(outputs) != n:
        raise ValueError(
            f"the model must return [n, outputs] for n = {n} inputs, got shape {list(outputs.shape)}"
        )
    if not torch.isfinite(outputs).all():
        raise ValueError("outputs of the model hold NaN or infinite values")
    return outputs
