"""What guards a fit: all data in its loader, the same weights, and few walks back through it."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

from laplace_invariance.hyper import being_learnt

__all__ = ["MANY_WALKS", "Guards", "Walks", "check_loader_of_fit"]

MOST_CALLS = 8  # from a backend up to laplace's fit
MANY_WALKS = 4  # backward passes through one fit, from which on they seem to be a mistake


class Guards:
    """Guards of all fits of one backend.

    Args:
        parameters: Parameters whose values a fit depends on.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._walks = Walks()

    def weights(self) -> Tensor:
        """Return numbers that show whether the weights are the same, their signs and order too."""
        sums = []
        for parameter in self._parameters:
            values = parameter.detach().flatten()
            sums += [values.abs().sum(), values.sum(), values[: len(values) // 2].sum()]
        return torch.stack(sums)

    def check_weights(self, before: Tensor, first: bool = True) -> Tensor | None:
        """Raise unless the weights are those of which :meth:`weights` returned ``before``.

        Predictions of laplace put other weights in and these back, so values decide. On a GPU, to
        look at them is to wait, which is done for the first batch of a backward pass only.

        Args:
            before: What :meth:`weights` returned.
            first: Whether this is the first batch of a backward pass.

        Returns:
            For other batches on a GPU, a factor of their gradients: one, or NaN if the weights
            changed.

        Raises:
            RuntimeError: The weights changed.
        """
        now = self.weights()
        same = ((now - before).abs() <= 1e-6 * before.abs().max() + 1e-5 * before.abs()).all()
        if not first and same.device.type != "cpu":
            return before.new_ones(()).where(same, math.nan)
        if not same:
            raise RuntimeError(
                "the weights changed after fit(), so its evidence has no gradient any more; "
                "fit again"
            )
        return None

    def walks(self) -> Walks:
        """Return the walks of the present fit; a batch after a backward pass begins another."""
        if self._walks.begun:
            self._walks = Walks()
        return self._walks


class Walks:
    """Backward passes through one fit, each of which runs all batches again.

    Attributes:
        begun: Whether there was one.
        latest: Number of times that some batch was walked through.
    """

    def __init__(self) -> None:
        self.begun = False
        self._warned = False
        self.latest = 0

    def count(self, before: int, hyperparameters: Iterable[Tensor]) -> int:
        """Count a walk through a batch, and warn, once per fit, if there are many.

        Args:
            before: Number of walks through this batch so far.
            hyperparameters: Tensors whose gradient is computed.

        Returns:
            The number of walks now; those of :func:`~laplace_invariance.learning` do not count.
        """
        self.begun = True
        if being_learnt(hyperparameters):
            return before
        if before + 1 >= MANY_WALKS and not self._warned:
            self._warned = True
            warnings.warn(
                f"this is backward pass {before + 1} through one fit, and each runs the model on "
                "all batches for the gradient of its hyperparameters; where only the prior or the "
                "noise is optimised, `with laplace_invariance.constant_curvature(la):` saves that",
                stacklevel=2,
            )
        return before + 1


def check_loader_of_fit() -> None:
    """Raise if laplace, which called, fits to one rank's part of the data.

    Its ``fit`` goes through a loader and takes the length of the data set for that of what it saw.
    With a ``DistributedSampler`` every rank would have an evidence of its own, of a part of the
    data and without a word.

    Raises:
        ValueError: If the loader's sampler has a part of the data.
    """
    frame = sys._getframe(1)
    for _ in range(MOST_CALLS):
        if frame.f_back is None:
            return
        frame = frame.f_back
        is_laplace = frame.f_globals.get("__name__", "").startswith("laplace.")
        if not is_laplace or frame.f_code.co_name != "fit":
            continue
        batches = getattr(frame.f_locals.get("train_loader"), "batch_sampler", None)
        sampler = getattr(batches, "sampler", None)
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise ValueError(
                f"the loader has a DistributedSampler, of which this rank sees one of "
                f"{sampler.num_replicas} parts, but Laplace.fit takes it for all data, and knows "
                "nothing of other ranks; fit with a loader without it, on every rank or on one, "
                "or train with laplace_invariance.marglik_training, which sums over ranks"
            )
        return
