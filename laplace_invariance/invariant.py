"""A network made invariant: the weighted mean of its outputs over transformations of the input."""

from __future__ import annotations

from contextvars import ContextVar

import torch
from torch import Tensor, nn

from laplace_invariance.augmentations.base import Augmentation, check_n_samples
from laplace_invariance.draws import are_fixed, are_taped, taped

__all__ = ["InvariantModel"]


# Of the samples that the rows of the current forward pass are: for every InvariantModel around it, from the outermost, the
# number of rows that it was called with and the weights [S] of what it made of each.
Levels = tuple[tuple[int, Tensor], ...]
_levels: ContextVar[Levels] = ContextVar("laplace_invariance_levels", default=())


def current_levels() -> Levels:
    """Return which samples the rows are: ``(rows before, weights [S])`` for every enclosing ``InvariantModel``."""
    return _levels.get()


class SampleMean(nn.Module):
    """The weighted mean over samples, ``[n * S, ...] -> [n, ...]``; a module, so that engines see the batch pass through it."""

    def forward(self, outputs: Tensor, weights: Tensor) -> Tensor:
        samples = outputs.unflatten(0, (-1, len(weights)))
        return torch.einsum("s,ns...->n...", weights.to(outputs.dtype), samples)


class InvariantModel(nn.Module):
    """Average a network over transformations of its input: ``f(x) = sum_s w_s net(g(x, e_s; eta))``.

    Draws are fresh and independent for every input wherever gradients are enabled, in ``eval()`` mode too: that is training
    and the fitting of curvature. Under ``torch.no_grad()`` one fixed, evenly spread set is used for all inputs, so that
    predictions repeat. Any API of laplace-torch works on the model, with the backends of this package.

    Args:
        net: maps ``[n, ...]`` to ``[n, outputs]``.
        augmentation: the distribution over transformations, whose hyperparameters can be learnt.
        n_samples: samples per input.
        generator: source of the draws; None is torch's default generator.
    """

    def __init__(
        self,
        net: nn.Module,
        augmentation: Augmentation,
        n_samples: int = 16,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(augmentation, Augmentation):
            raise TypeError(
                f"augmentation must be a laplace_invariance.Augmentation, got {type(augmentation).__name__}"
            )
        self.net = net
        self.augmentation = augmentation
        self.__dict__["mean"] = (
            SampleMean()
        )  # not registered: laplace takes the last module that runs for the last layer
        self.n_samples = check_n_samples(n_samples)
        self.generator = generator

    def draw(self, n: int) -> Tensor:
        """Return the draws for ``n`` inputs: fresh, fixed or replayed, as the class and the curvature pass say."""
        if are_fixed() or not (are_taped() or torch.is_grad_enabled()):
            return self.augmentation.fixed(self.n_samples)
        return taped(lambda: self.augmentation.sample(n, self.n_samples, self.generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.average(x, self.draw(len(x)))

    def average(self, x: Tensor, draws: Tensor, part: slice = slice(None)) -> Tensor:
        """Return the average over the given draws, or the part of that sum which some of the samples contribute."""
        weights = self.augmentation.weights(draws.shape[1])[part]
        samples = self.augmentation.transform(x, draws[:, part])
        token = _levels.set((*_levels.get(), (len(x), weights)))
        try:
            outputs = self.net(samples.flatten(0, 1))
        finally:
            _levels.reset(token)
        return self.mean(outputs, weights)

    def extra_repr(self) -> str:
        return f"n_samples={self.n_samples}"
