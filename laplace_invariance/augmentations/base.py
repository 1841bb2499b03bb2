"""What an augmentation is: draws that do not depend on hyperparameters, and a map from input and draws to samples."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace_invariance.draws import taped
from laplace_invariance.hyper import Hyperparameterised, hyperparameters

if TYPE_CHECKING:
    from typing_extensions import Self

    from laplace_invariance.augmentations.export import LearntTransform

__all__ = ["Augmentation"]


class Augmentation(Hyperparameterised):
    """A distribution over transformations of a batch of inputs.

    A sample is ``transform(x, draws)``: all randomness is in the draws, all hyperparameters
    are in ``transform``, so any draw can be replayed and the sample differentiated with respect to the hyperparameters. With all hyperparameters zero it is the
    identity. As a module it transforms each input once, ``(n, ...) -> (n, ...)``, so it also fits into ``nn.Sequential``.

    Attributes:
        input_ndims: how many dimensions one input, without the batch, can have; needed by :meth:`to_transform` only.
        unit_range: whether inputs have values in ``[0, 1]``, which :meth:`to_transform` keeps.
    """

    input_ndims: tuple[int, ...] = ()
    unit_range: bool = False

    def sample(self, n: int, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Return fresh draws ``[n, n_samples, ...]`` for ``n`` inputs."""
        raise NotImplementedError

    def fixed(self, n_samples: int) -> Tensor:
        """Return one set of draws ``[1, n_samples, ...]``, always the same, that covers the distribution evenly."""
        raise NotImplementedError

    def transform(self, x: Tensor, draws: Tensor) -> Tensor:
        """Transform ``x`` ``[n, ...]`` by ``draws`` ``[n or 1, n_samples, ...]`` into samples ``[n, n_samples, ...]``."""
        raise NotImplementedError

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Call a function on all modules, as ``nn.Module.apply`` does.

        Deprecated: with inputs and draws, return :meth:`transform` of them, which once had this name.
        """
        function = kwargs["fn"] if "fn" in kwargs else args[0] if args else None
        if callable(function) and not isinstance(function, Tensor):
            return super().apply(*args, **kwargs)
        warnings.warn(
            "Augmentation.apply(x, draws) is now called transform(x, draws)",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.transform(*args, **kwargs)

    def count(self, n_samples: int) -> int:
        """Return how many samples per input there are when ``n_samples`` are asked for."""
        return n_samples

    def weights(self, n_samples: int) -> Tensor:
        """Return the weight of each of ``n_samples`` samples in the average over them, ``[n_samples]``, summing to one."""
        reference = next(self.buffers(), torch.empty(()))
        return torch.full(
            (n_samples,), 1 / n_samples, dtype=reference.dtype, device=reference.device
        )

    def draw_one(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return for each of ``n`` inputs one draw from the learnt distribution, ``[n, 1, ...]``."""
        return self.sample(n, 1, generator)

    def magnitudes(self) -> dict[str, float]:
        """Return how far the transformations reach, in the units of the hyperparameters, by name."""
        return {
            name: self._buffers[name].detach().abs().max().item()
            for name in self._hyperparameter_names
        }

    def ranges(self) -> dict[str, str]:
        """Say in words and units what the hyperparameters mean, by name."""
        raise NotImplementedError

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Transform each input of ``x`` once, by a fresh draw."""
        return self.transform(x, taped(lambda: self.draw_one(len(x), generator))).squeeze(1)

    def frozen(self) -> Self:
        """Return a copy that has nothing to learn and does not change when this one learns."""
        copy = deepcopy(self)
        for tensor in hyperparameters(copy):
            tensor.requires_grad_(False).grad = None
        return copy

    def to_transform(self, generator: torch.Generator | None = None) -> LearntTransform:
        """Return a transform of ``torchvision.transforms.v2`` that draws from what has been learnt so far.

        It is for ordinary training elsewhere: on images as tensors, ``tv_tensors.Image`` or PIL images, in a data set or
        on batches, of which each element gets its own draw. Later learning does not change it.

        Args:
            generator: source of the draws; None is torch's default generator, which ``DataLoader`` seeds in its workers.
        """
        from laplace_invariance.augmentations.export import (
            LearntTransform,  # torchvision takes seconds to import
        )

        return LearntTransform(self, generator)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}: {words}" for name, words in self.ranges().items())


def check_n_samples(n_samples: int) -> int:
    """Refuse anything but a positive number of samples."""
    if isinstance(n_samples, bool) or not isinstance(n_samples, int) or n_samples < 1:
        raise ValueError(f"n_samples must be a positive integer, got {n_samples!r}")
    return n_samples


def check_draws(draws: Tensor, n: int, tail: tuple[int, ...], owner: Augmentation) -> None:
    """Refuse draws that are not ``[n or 1, n_samples, *tail]``."""
    shape = tuple(draws.shape)
    if len(shape) != 2 + len(tail) or shape[0] not in (1, n) or shape[1] < 1 or shape[2:] != tail:
        wanted = ", ".join(["n or 1", "n_samples", *map(str, tail)])
        raise ValueError(
            f"{type(owner).__name__} needs draws of shape [{wanted}] for n = {n} inputs, got {list(shape)}; "
            "make them with sample(n, n_samples)"
        )
