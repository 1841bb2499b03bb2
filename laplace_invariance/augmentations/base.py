"""Base class of distributions over transformations, whatever their hyperparameters are."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace_invariance.draws import generator_of_draws, taped
from laplace_invariance.hyper import Hyperparameterised, hyperparameters
from laplace_invariance.precision import at_least_single, without_autocast

if TYPE_CHECKING:
    from typing_extensions import Self

    from laplace_invariance.augmentations.export import LearntTransform

__all__ = [
    "CLOSED",
    "Augmentation",
    "Openings",
    "Shape",
    "check_draws",
    "check_n_samples",
    "check_names",
]

# Widths at which a search opens ranges without limit first
WIDTHS = (0.25, 0.6)
CLOSED = 1e-12  # width of a range that is so small that it has no proportions to keep

Openings = dict[tuple[str, ...], tuple[float, ...]]
Shape = Sequence[int]


class Augmentation(Hyperparameterised):
    """A distribution over transformations of a batch of inputs.

    A sample is ``transform(x, draws)``: all randomness is in the draws and all hyperparameters are
    in :meth:`transform`, so that any draw can be replayed and every sample differentiated with
    respect to the hyperparameters. With all hyperparameters at zero it is the identity. As a module
    an augmentation transforms each input once, ``[n, ...] -> [n, ...]``, so that it also fits into
    ``nn.Sequential``.

    Attributes:
        input_ndims: Numbers of dimensions that one input, without the batch, can have; only
            :meth:`to_transform` needs them.
        unit_range: Whether inputs have values in ``[0, 1]``, which :meth:`to_transform` keeps.
    """

    input_ndims: tuple[int, ...] = ()
    unit_range: bool = False

    def sample(self, n: int, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Return fresh draws ``[n or 1, n_samples, ...]`` for ``n`` inputs."""
        raise NotImplementedError

    def fixed(self, n_samples: int) -> Tensor:
        """Return one set of draws ``[1, n_samples, ...]``, always the same, evenly spread."""
        raise NotImplementedError

    def transform(self, x: Tensor, draws: Tensor) -> Tensor:
        """Transform inputs by given draws.

        Args:
            x: Inputs ``[n, ...]``.
            draws: Draws ``[n or 1, n_samples, ...]`` of :meth:`sample` or :meth:`fixed`.

        Returns:
            Samples ``[n, n_samples, ...]``.
        """
        kind = type(self)
        if kind.apply is Augmentation.apply:
            raise NotImplementedError(f"{kind.__name__} has no transform(x, draws)")
        warnings.warn(
            f"{kind.__name__}.apply(x, draws) is deprecated: call it transform",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.apply(x, draws)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Call a function on all modules, as ``nn.Module.apply`` does.

        Deprecated: ``apply(x, draws)`` is :meth:`transform`, which once had this name.
        """
        (first, *_) = (*args, *kwargs.values())
        if callable(first):
            return super().apply(first)
        warnings.warn(
            "Augmentation.apply(x, draws) is now called transform(x, draws)",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.transform(*args, **kwargs)

    def count(self, n_samples: int) -> int:
        """Return the number of samples per input when ``n_samples`` are asked for."""
        return n_samples

    def weights(self, n_samples: int) -> Tensor:
        """Return the weights ``[n_samples]`` of samples in the average over them; they sum to 1."""
        buffers = list(self.buffers())
        # an integer, such as a counter, has no fractions
        real = [buffer for buffer in buffers if buffer.is_floating_point()]
        dtype = at_least_single(real[0].dtype) if real else torch.get_default_dtype()
        device = (real or buffers or [torch.empty(())])[0].device
        return torch.full((n_samples,), 1 / n_samples, dtype=dtype, device=device)

    def draw_one(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return one draw ``[n, 1, ...]`` from the learnt distribution for each of ``n`` inputs."""
        return self.sample(n, 1, generator)

    def magnitudes(self) -> dict[str, float]:
        """Return the learnt ranges, by name, in the units of the hyperparameters."""
        return {
            name: self.hyperparameter(name).detach().abs().max().item()
            for name in self._hyperparameter_names
        }

    def ranges(self, shape: Shape | None = None) -> dict[str, str]:
        """Return the learnt ranges, by name, in words and units such as degrees.

        Args:
            shape: Shape of one input, without the batch, with which translations are in pixels;
                None leaves them in halves of the input.
        """
        raise NotImplementedError

    def openings(self) -> Openings:
        """Return which learnt ranges open together in a search, and how far it opens them first."""
        return {(name,): WIDTHS for name, tensor in self._learnt_tensors()}

    def largest(self, name: str) -> float:
        """Return the largest width of a range, or infinity."""
        return math.inf

    @torch.no_grad()
    def open_(self, widths: Mapping[str, float]) -> None:
        """Set learnt ranges to given widths, in place, and those that are not named to zero.

        Args:
            widths: Widths in the units of :meth:`magnitudes`, by names as in :meth:`openings`.
        """
        check_names(self, widths, [name for name, _ in self._learnt_tensors()])
        for name, tensor in self._learnt_tensors():
            tensor.fill_(widths.get(name, 0.0))
        self.project_()

    def widths(self) -> dict[str, float]:
        """Return the widths of learnt ranges, by name, as :meth:`open_` takes them."""
        return {name: tensor.abs().max().item() for name, tensor in self._learnt_tensors()}

    @torch.no_grad()
    def resize_(self, name: str, width: float) -> None:
        """Set one learnt range to a given width, in place; all others stay as they are.

        Args:
            name: Name of the range, as in :meth:`widths`.
            width: Its width, in the same units.
        """
        tensors = dict(self._learnt_tensors())
        check_names(self, {name: width}, list(tensors))
        tensor, before = tensors[name], self.widths()[name]
        if width == before:  # to the last digit
            return
        if before > CLOSED:
            tensor.mul_(width / before)  # numbers of a range keep their proportions
        else:
            tensor.fill_(width)
        self.project_()

    def entries(self, name: str) -> list[Tensor]:
        """Return the numbers that a range is made of, as views: to write to them is to set them.

        Args:
            name: Name of the range, as in :meth:`widths`.
        """
        if name not in self._hyperparameter_names:
            raise NotImplementedError(
                f"{type(self).__name__} must say by entries(name) what its range {name!r} is made "
                "of, as it is no hyperparameter"
            )
        return [getattr(self, name).detach()]

    def in_words(self, name: str, magnitude: float, shape: Shape | None = None) -> str:
        """Return the range ``name``, plus or minus ``magnitude``, in words.

        Args:
            name: Name of the range.
            magnitude: Its width, in the units of :meth:`magnitudes`.
            shape: Shape of one input, as for :meth:`ranges`.
        """
        return f"±{magnitude:.3f}"

    def _learnt_tensors(self) -> list[tuple[str, Tensor]]:
        tensors = [(name, getattr(self, name)) for name in self._hyperparameter_names]
        return [(name, tensor) for name, tensor in tensors if tensor.requires_grad]

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Transform each input of ``x`` ``[n, ...]`` once, by a fresh draw."""
        draws = taped(self.draw_one, len(x), generator_of_draws(generator))
        with without_autocast():
            return self.transform(x, draws).squeeze(1)

    def frozen(self) -> Self:
        """Return a copy that has nothing to learn and does not change when this one learns."""
        copy = deepcopy(self)
        for tensor in hyperparameters(copy):
            tensor.requires_grad_(False).grad = None
        return copy

    def to_transform(self, generator: torch.Generator | None = None) -> LearntTransform:
        """Return a transform of ``torchvision.transforms.v2`` that draws from what was learnt.

        It is for ordinary training elsewhere: on images as tensors, ``tv_tensors.Image`` or PIL
        images, in a data set or on batches, of which each element gets its own draw. Later learning
        does not change it.

        Args:
            generator: Source of the draws; None is torch's default generator, which ``DataLoader``
                seeds in its workers.
        """
        # torchvision takes seconds to import
        from laplace_invariance.augmentations.export import LearntTransform

        return LearntTransform(self, generator)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}: {words}" for name, words in self.ranges().items())


def check_names(owner: Augmentation, widths: Mapping[str, float], learnt: Sequence[str]) -> None:
    """Raise ``ValueError`` if a width is of something that is not learnt."""
    for name in widths:
        if name not in learnt:
            raise ValueError(
                f"{type(owner).__name__} learns no range {name!r}; it learns "
                f"{', '.join(learnt) or 'none'}"
            )


def check_n_samples(n_samples: int) -> int:
    """Return ``n_samples``; raise ``ValueError`` unless it is a positive integer."""
    if isinstance(n_samples, bool) or not isinstance(n_samples, int) or n_samples < 1:
        raise ValueError(f"n_samples must be a positive integer, got {n_samples!r}")
    return n_samples


def check_draws(draws: Tensor, n: int, tail: tuple[int, ...], owner: Augmentation) -> None:
    """Raise ``ValueError`` unless draws are ``[n or 1, n_samples, *tail]``."""
    shape = tuple(draws.shape)
    fits = len(shape) == 2 + len(tail) and shape[2:] == tail
    if not fits or shape[0] not in (1, n) or shape[1] < 1:
        wanted = ", ".join(["n or 1", "n_samples", *map(str, tail)])
        raise ValueError(
            f"{type(owner).__name__} needs draws of shape [{wanted}] for n = {n} inputs, "
            f"got {list(shape)}; make them with sample(n, n_samples)"
        )
