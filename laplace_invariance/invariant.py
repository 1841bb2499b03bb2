"""A network made invariant: the weighted mean of its outputs over transformations of the input."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from laplace_invariance.augmentations.base import Augmentation, check_n_samples
from laplace_invariance.draws import are_fixed, generator_of_draws, taped
from laplace_invariance.precision import at_least_single, without_autocast

__all__ = ["LEVELS", "InvariantModel", "Levels", "SampleMean", "averaging_over", "with_values"]


# Sampling levels of the current forward pass, outermost first: the batch size and sample weights
# [S] of each enclosing InvariantModel.
Levels = tuple[tuple[int, Tensor], ...]
LEVELS: ContextVar[Levels] = ContextVar("laplace_invariance_levels", default=())


class SampleMean(nn.Module):
    """The weighted mean over samples, ``[n * S, ...] -> [n, ...]``.

    It is a module so that engines of curvature see the batch pass through it.
    """

    @without_autocast()
    def forward(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Return the mean of ``outputs`` ``[n * S, ...]`` with ``weights`` ``[S]``."""
        dtype = at_least_single(outputs.dtype)
        samples = outputs.unflatten(0, (-1, len(weights)))
        mean = weights.to(dtype) @ samples.flatten(2).to(dtype)
        return mean.view(len(samples), *outputs.shape[1:]).to(outputs.dtype)


class InvariantModel(nn.Module):
    """The average of a network over transformations of its input.

    ``f(x) = sum_s w_s net(g(x, e_s; eta))`` with draws ``e_s``, weights ``w_s`` and hyperparameters
    ``eta`` of the augmentation. Draws are fresh and independent for every input wherever gradients
    are enabled, in ``eval()`` mode too: that is in training and in the fitting of curvature. Under
    ``torch.no_grad()`` one fixed, evenly spread set is used for all inputs, so that predictions
    repeat; so it is for derivatives in forward mode. laplace-torch works on the model with the
    backends of this package.

    Args:
        net: Network that maps ``[n, ...]``, or a mapping with such tensors in it, to
            ``[n, outputs]``.
        augmentation: Distribution over transformations, whose hyperparameters can be learnt.
        n_samples: Number of samples per input.
        generator: Source of the draws; None is torch's default generator.
        dict_key_x: Key of what is transformed, if inputs are a mapping; other tensors of ``n`` rows
            are repeated for every sample.

    Raises:
        TypeError: If the augmentation is not one.
        ValueError: If ``n_samples`` is not a positive integer.
    """

    mean: SampleMean

    def __init__(
        self,
        net: nn.Module,
        augmentation: Augmentation,
        n_samples: int = 16,
        generator: torch.Generator | None = None,
        dict_key_x: str = "input_ids",
    ) -> None:
        super().__init__()
        if not isinstance(augmentation, Augmentation):
            raise TypeError(
                "augmentation must be a laplace_invariance.Augmentation, "
                f"got {type(augmentation).__name__}"
            )
        self.net = net
        self.augmentation = augmentation
        # not registered, because laplace takes the last module that runs for the last layer
        self.__dict__["mean"] = SampleMean()
        self.n_samples = check_n_samples(n_samples)
        self.generator = generator
        self.dict_key_x = dict_key_x

    def draw(self, n: int) -> Tensor:
        """Return the draws for ``n`` inputs: fixed, fresh, or replayed by a curvature pass."""
        if are_fixed():
            return self.augmentation.fixed(self.n_samples)
        generator = generator_of_draws(self.generator)
        return taped(self.augmentation.sample, n, self.n_samples, generator)

    def inputs(self, x: Any) -> Tensor:
        """Return what is transformed: the inputs ``[n, ...]``, or a tensor of a mapping.

        Raises:
            KeyError: If a mapping has nothing under ``dict_key_x``.
        """
        if not isinstance(x, Mapping):
            return x
        if self.dict_key_x not in x:
            raise KeyError(
                f"inputs have no {self.dict_key_x!r}, only {', '.join(map(repr, x))}; "
                "InvariantModel(..., dict_key_x=...) says what is to be transformed"
            )
        return x[self.dict_key_x]

    def forward(self, x: Any) -> Tensor:
        """Return the averaged outputs ``[n, outputs]`` of inputs ``[n, ...]``, or of a mapping."""
        inputs = self.inputs(x) if isinstance(x, Mapping) else x
        return self.average(x, self.draw(len(inputs)))

    def average(self, x: Any, draws: Tensor, part: slice = slice(None)) -> Tensor:
        """Return the average over given draws, or what some of the samples contribute to it.

        Args:
            x: Inputs ``[n, ...]``, or a mapping with such a tensor in it.
            draws: Draws ``[n or 1, S, ...]`` of the augmentation.
            part: The samples to sum over, with their weights in the whole average.

        Returns:
            Outputs ``[n, outputs]``.
        """
        inputs = self.inputs(x) if isinstance(x, Mapping) else x
        weights = self.augmentation.weights(draws.shape[1])[part]
        with without_autocast():
            samples = self.augmentation.transform(inputs, draws[:, part]).flatten(0, 1)
        if isinstance(x, Mapping):
            samples = self._repeated(x, samples, len(weights))
        token = LEVELS.set((*LEVELS.get(), (len(inputs), weights)))
        try:
            outputs = self.net(samples)
        finally:
            LEVELS.reset(token)
        return self.mean(outputs, weights)

    def _repeated(self, x: Mapping[str, Any], samples: Tensor, n_samples: int) -> Any:
        """Return a mapping with samples in the place of inputs, and its other rows repeated."""
        n = len(self.inputs(x))
        rest = {
            key: value.repeat_interleave(n_samples, 0) if _has_rows(value, n) else value
            for key, value in x.items()
        }
        return with_values(x, rest | {self.dict_key_x: samples})

    def extra_repr(self) -> str:
        return f"n_samples={self.n_samples}"


def with_values(x: Any, values: dict[str, Any]) -> Any:
    """Return a mapping of the same kind, such as transformers' ``BatchEncoding``, with new values.

    Raises:
        TypeError: Its class cannot be made from a ``dict``.
    """
    if isinstance(x, (dict, UserDict)):
        result = copy(x)  # what a defaultdict is made from, for one, is kept
        result.update(values)
        return result
    try:
        return type(x)({**x, **values})
    except TypeError as error:
        raise TypeError(
            f"inputs are a {type(x).__name__}, which cannot be made from a dict of its parts; "
            "let the loader return a dict"
        ) from error


def _has_rows(value: Any, n: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == n


@contextmanager
def averaging_over(model: nn.Module, change: Callable[[int], int]) -> Iterator[None]:
    """Change the number of samples of all averaging models inside another one, for the context.

    Args:
        model: Any module.
        change: New number of samples, as a function of the present one.
    """
    averages = [module for module in model.modules() if isinstance(module, InvariantModel)]
    before = [module.n_samples for module in averages]
    try:
        for module in averages:
            module.n_samples = check_n_samples(change(module.n_samples))
        yield
    finally:
        for module, n_samples in zip(averages, before, strict=True):
            module.n_samples = n_samples
