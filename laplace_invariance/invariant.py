"""A network made invariant: the weighted mean of its outputs over transformations of the input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from laplace_invariance.augmentations.base import Augmentation, check_n_samples

__all__ = ["InvariantModel"]


# How InvariantModel gets its draws: None (fresh where gradients flow, else fixed), "fixed", or a function of a fresh draw.
_source: ContextVar[str | Callable[..., Tensor] | None] = ContextVar("laplace_invariance_draws", default=None)
# Weights of the samples that the rows of the current forward pass are, [S]; None outside of an InvariantModel.
_samples: ContextVar[Tensor | None] = ContextVar("laplace_invariance_samples", default=None)


@contextmanager
def _using(source: object) -> Iterator[None]:
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def fixed_draws() -> AbstractContextManager[None]:
    """Use the fixed set of draws of every augmentation, as for predictions."""
    return _using("fixed")


def recording(tape: list[Tensor]) -> AbstractContextManager[None]:
    """Draw afresh and append the draws to ``tape``, as a curvature pass does when it first sees a batch."""

    def record(fresh: Callable[[], Tensor]) -> Tensor:
        tape.append(fresh())
        return tape[-1]

    return _using(record)


def replaying(tape: list[Tensor]) -> AbstractContextManager[None]:
    """Use the draws on ``tape``, in their order, as its backward pass does when it sees the batch again."""
    draws = iter(tape)
    return _using(lambda fresh: next(draws))


def taped(fresh: Callable[[], Tensor]) -> Tensor:
    """Return ``fresh()``, recorded or replayed like the draws of an augmentation."""
    source = _source.get()
    return source(fresh) if callable(source) else fresh()


def current_sample_weights() -> Tensor | None:
    """Return the weights ``[S]`` of the samples that rows belong to, inside ``InvariantModel``; None outside."""
    return _samples.get()


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
        self.n_samples = check_n_samples(n_samples)
        self.generator = generator

    def draw(self, n: int) -> Tensor:
        """Return the draws for ``n`` inputs: fresh, fixed or replayed, as the class and the curvature pass say."""
        source = _source.get()
        if source == "fixed" or (source is None and not torch.is_grad_enabled()):
            return self.augmentation.fixed(self.n_samples)
        return taped(lambda: self.augmentation.sample(n, self.n_samples, self.generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.average(x, self.draw(len(x)))

    def average(self, x: Tensor, draws: Tensor, part: slice = slice(None)) -> Tensor:
        """Return the average over the given draws, or the part of that sum which some of the samples contribute."""
        weights = self.augmentation.weights(draws.shape[1])[part]
        samples = self.augmentation.apply(x, draws[:, part])
        outer = _samples.get()
        token = _samples.set(weights if outer is None else torch.outer(outer, weights).flatten())
        try:
            outputs = self.net(samples.flatten(0, 1))
        finally:
            _samples.reset(token)
        outputs = outputs.unflatten(0, (len(x), len(weights)))
        return torch.einsum("s,ns...->n...", weights.to(outputs.dtype), outputs)

    def extra_repr(self) -> str:
        return f"n_samples={self.n_samples}"
