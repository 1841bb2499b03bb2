"""What guards a fit: all data in its loader, nothing changed since, few walks back through it."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

from laplace_invariance.hyper import Hyperparameterised, being_learnt, hyperparameters
from laplace_invariance.invariant import InvariantModel

__all__ = ["MANY_WALKS", "Fingerprints", "Guards", "Walks", "check_loader_of_fit"]

MOST_CALLS = 8  # from a backend up to laplace's fit
GUARDED = {
    "weights": "fit again",
    "buffers (such as statistics of batch normalisation)": "fit again",
    "inputs": "let the loader yield a tensor of its own for every batch, as by x.clone()",
}
BLOCK = 2**18  # numbers that are looked at together
MIXING = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)  # large and odd
MANY_WALKS = 4  # backward passes through one fit, from which on they seem to be a mistake


@dataclass(frozen=True, eq=False)
class Fingerprints:
    """What a fit depends on.

    Attributes:
        numbers: A number each for weights, buffers and inputs, which changes with any of them.
        learnt: Hyperparameters that are learnt.
        modules: Modules of the model.
        options: Options and hooks of each module, as far as it says.
    """

    numbers: Tensor
    learnt: list[Tensor]
    modules: list[nn.Module]
    options: list[tuple[object, ...]]


class Guards:
    """Guards of all fits of one backend.

    Args:
        model: Model whose parameters and buffers a fit depends on. Learnt hyperparameters are not
            looked at: a fit keeps their values.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._walks = Walks()

    def fingerprints(self, inputs: Sequence[Tensor] = ()) -> Fingerprints:
        """Return what a fit depends on.

        Args:
            inputs: Inputs and targets that others may change.
        """
        learnt = [tensor for tensor in hyperparameters(self._model) if tensor.requires_grad]
        known = {id(tensor) for tensor in learnt}
        buffers = [tensor for tensor in self._model.buffers() if id(tensor) not in known]
        # counters may change with every pass
        statistics = [b for b in buffers if b.is_floating_point() or b.numel() > 1]
        groups = (list(self._model.parameters()), statistics, inputs)
        device = groups[0][0].device
        numbers = torch.stack([_fingerprint(group, device) for group in groups])
        modules = list(self._model.modules())
        return Fingerprints(numbers, learnt, modules, list(map(_options, modules)))

    def check(
        self, before: Fingerprints, inputs: Sequence[Tensor] = (), first: bool = True
    ) -> Tensor | None:
        """Raise unless everything is as it was when :meth:`fingerprints` returned ``before``.

        Predictions of laplace put other weights in and these back, so values decide. On a GPU, to
        look at them is to wait, which is done for the first batch of a backward pass only.

        Args:
            before: What :meth:`fingerprints` returned.
            inputs: The same tensors as then.
            first: Whether this is the first batch of a backward pass.

        Returns:
            For other batches on a GPU, a factor of their gradients: one, or NaN if something
            changed.

        Raises:
            RuntimeError: Something changed.
        """
        now = self.fingerprints(inputs)
        if list(map(id, now.learnt)) != list(map(id, before.learnt)):
            raise _changed("choice of hyperparameters that are learnt", "fit again")
        if now.modules != before.modules or now.options != before.options:
            raise _changed("modules of the model, or their options or hooks,", "fit again")
        same = now.numbers == before.numbers
        if not first and same.device.type != "cpu":
            return torch.ones((), device=same.device).where(same.all(), math.nan)
        for name, is_same in zip(GUARDED, same.tolist(), strict=True):
            if not is_same:
                raise _changed(name, GUARDED[name])
        return None

    def check_loss(self, before: Tensor, now: Tensor) -> Tensor | None:
        """Raise unless the loss of a batch is the same in both passes, but for round-off.

        Args:
            before: Loss of the forward pass.
            now: Loss of the backward pass, which runs the model again.

        Returns:
            On a GPU, which is not waited for, a factor of the gradients: one, or NaN if the loss is
            another one.

        Raises:
            RuntimeError: It is another one.
        """
        allowed = torch.finfo(before.dtype).eps ** 0.5 * (1 + before.abs())
        same = ((now - before).abs() <= allowed) | ~before.isfinite()
        if same.device.type != "cpu":
            return torch.ones((), device=same.device).where(same, math.nan)
        if not same:
            raise RuntimeError(
                f"the model has another loss in the backward pass, which runs it again, than in "
                f"fit(): {now.item():.6g} instead of {before.item():.6g}; it must not draw random "
                "numbers of its own, nor depend on anything that changed in between"
            )
        return None

    def walks(self) -> Walks:
        """Return the walks of the present fit; a batch after a backward pass begins another."""
        if self._walks.begun:
            self._walks = Walks()
        return self._walks


def _changed(what: str, way_out: str) -> RuntimeError:
    return RuntimeError(
        f"the {what} changed after fit(), so its evidence has no gradient any more; {way_out}"
    )


def _options(module: nn.Module) -> tuple[object, ...]:
    """Return options and hooks of a module; draws are kept, and so are hyperparameters."""
    hooks = (*module._forward_hooks, *module._forward_pre_hooks)
    if isinstance(module, InvariantModel | Hyperparameterised):
        return hooks
    return (module.extra_repr(), *hooks)


def _fingerprint(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a number that depends on all bits of tensors, and on the place of each.

    Sums of integers do not depend on their order, so that it is the same to the last digit.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        bits = _bits(tensor)
        factors = _factors(min(len(bits), BLOCK), bits.device)
        for part in bits.split(BLOCK):
            own = (part * factors[: len(part)]).sum().to(device, non_blocking=True)
            total = total * MIXING[0] + own
    return total


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as small integers, or, if it has none, the number of changes."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        return torch.tensor([tensor._version])
    integers = {1: torch.int8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
    return tensor.detach().reshape(-1).contiguous().view(integers)


def _factors(n: int, device: torch.device) -> Tensor:
    """Return ``n`` integers without a pattern, modulo 2^64."""
    mixed = torch.arange(1, n + 1, device=device) * MIXING[0]
    mixed = (mixed ^ (mixed >> 29)) * MIXING[1]
    return mixed ^ (mixed >> 32)


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
    """Raise if laplace, which called, fits to other data than the data set of its loader.

    Its ``fit`` goes through a loader and takes the length of the data set for that of what it saw.
    With a sampler that draws some examples twice or not at all, such as a ``DistributedSampler``,
    the evidence would be one of other data, without a word.

    Raises:
        ValueError: If the loader's sampler has a part of the data, or draws with replacement.
    """
    frame = sys._getframe(1)
    for _ in range(MOST_CALLS):
        if frame.f_back is None:
            return
        frame = frame.f_back
        is_laplace = frame.f_globals.get("__name__", "").startswith("laplace.")
        if is_laplace and frame.f_code.co_name == "fit":
            _check_sampler(frame.f_locals.get("train_loader"))
            return


def _check_sampler(loader: Any) -> None:
    """Raise unless the sampler of a loader says that it yields every example once."""
    sampler: Any = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise ValueError(
            f"the loader has a DistributedSampler, of which this rank sees one of "
            f"{sampler.num_replicas} parts, but Laplace.fit takes it for all data, and knows "
            "nothing of other ranks; fit with a loader without it, on every rank or on one, "
            "or train with laplace_invariance.marglik_training, which sums over ranks"
        )
    n = len(loader.dataset) if hasattr(loader, "dataset") else 0
    drawn = len(sampler) if hasattr(sampler, "__len__") else n
    if getattr(sampler, "replacement", False) or drawn != n:
        raise ValueError(
            f"the loader has a {type(sampler).__name__}, which draws {drawn} of {n} examples, "
            "perhaps some of them twice, but Laplace.fit takes them for the whole data set; fit "
            "with a loader without it, of a torch.utils.data.Subset if some are to be left out"
        )
