"""What an augmentation is: draws that do not depend on hyperparameters, and a map from input and draws to samples."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace_invariance.draws import taped
from laplace_invariance.hyper import Hyperparameterised

__all__ = ["Augmentation"]


class Augmentation(Hyperparameterised):
    """A distribution over transformations of a batch of inputs.

    A sample is ``apply(x, draws)``: all randomness is in the draws, all hyperparameters are in ``apply``, so any draw can
    be replayed and the sample differentiated with respect to the hyperparameters. With all hyperparameters zero it is the
    identity. As a module it transforms each input once, ``(n, ...) -> (n, ...)``, so it also fits into ``nn.Sequential``.
    """

    def sample(self, n: int, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Return fresh draws ``[n, n_samples, ...]`` for ``n`` inputs."""
        raise NotImplementedError

    def fixed(self, n_samples: int) -> Tensor:
        """Return one set of draws ``[1, n_samples, ...]``, always the same, that covers the distribution evenly."""
        raise NotImplementedError

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        """Transform ``x`` ``[n, ...]`` by ``draws`` ``[n or 1, n_samples, ...]`` into samples ``[n, n_samples, ...]``."""
        raise NotImplementedError

    def count(self, n_samples: int) -> int:
        """Return how many samples per input there are when ``n_samples`` are asked for."""
        return n_samples

    def weights(self, n_samples: int) -> Tensor:
        """Return the weight of each of ``n_samples`` samples in the average over them, ``[n_samples]``, summing to one."""
        reference = next(iter(self._buffers.values()))
        return torch.full((n_samples,), 1 / n_samples, dtype=reference.dtype, device=reference.device)

    def ranges(self) -> dict[str, str]:
        """Say in words and units what the hyperparameters mean, by name."""
        raise NotImplementedError

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Transform each input of ``x`` once, by a fresh draw."""
        return self.apply(x, taped(lambda: self.sample(len(x), 1, generator))).squeeze(1)

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
