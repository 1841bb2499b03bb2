"""Copies of a model that train for a while with one range fixed."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from laplace_invariance.invariant import averaging_over
from laplace_invariance.marglik.approximation import constant, learnt_hyperparameters
from laplace_invariance.marglik.checks import check_every_target
from laplace_invariance.marglik.fingerprints import data_fingerprint, model_fingerprint, seeded
from laplace_invariance.marglik.loop import Trainer
from laplace_invariance.marglik.profiles.following import N_LOOKS, Following, followers
from laplace_invariance.marglik.profiles.ranges import Range
from laplace_invariance.marglik.randomness import RandomStates
from laplace_invariance.marglik.settings import Settings, check_numbers

__all__ = ["Amounts", "Retuning"]

MOST_EPOCHS = 10_000  # of a repetition, which the next one does not have
OVERSAMPLING = 2  # samples in estimates, as a multiple of the model's, as in training


@dataclass(frozen=True)
class Amounts:
    """Numbers of steps, samples and repetitions, and what is held, as of :func:`profile`."""

    n_steps: int
    n_samples: int | None
    n_repeats: int
    hold_others: bool = False

    def __post_init__(self) -> None:
        for name in ("n_steps", "n_repeats"):
            if getattr(self, name) is None:
                raise TypeError(f"{name} must be a whole number, got None")
        check_numbers(self, "n_steps", least=0, whole=True)
        check_numbers(self, "n_samples", "n_repeats", whole=True)


class Retuning:
    """Trains copies of a model for a while, each with one range fixed, all from the same start.

    Args:
        model: Trained model, which is copied.
        settings: Settings of the evidence and of the optimiser.
        name: Name of the range.
        amounts: Numbers of steps and samples.

    Attributes:
        range: The range as it was learnt.
        amounts: The same.
    """

    def __init__(self, model: nn.Module, settings: Settings, name: str, amounts: Amounts) -> None:
        self._model = deepcopy(model)
        self._settings = settings
        self.range = Range(self._model, name)
        self.amounts = amounts
        copy = self._copy()
        copy.check()
        self._trained = copy.signature()

    def signature(self) -> dict[str, Any]:
        """Return what must agree between two runs that share evidences; all data are read."""
        return {
            **self._trained,
            "name of the range": self.range.name,
            "number of steps": self.amounts.n_steps,
            "number of samples": self.amounts.n_samples,
            "hold_others": self.amounts.hold_others,
            **model_fingerprint(self._model),
            **data_fingerprint(self._settings.data, self._model),
        }

    def _copy(self) -> RetunedCopy:
        return RetunedCopy(deepcopy(self._model), self._settings, self.range.name, self.amounts)

    @cached_property
    def _priors(self) -> dict[str, Any]:
        """State of the best priors for the weights as they are."""
        return self._copy().best_priors()

    def evidence(self, value: float, repeat: int) -> float:
        """Return the evidence per example with the range at a value, after some training.

        The copy is a new one, so that nothing is left of values before.

        Args:
            value: Width of the range.
            repeat: Number of the repetition, which is the seed of batches and draws.
        """
        return self._copy().evidence(value, repeat, self._priors)


class RetunedCopy:
    """A copy of a model that trains once for a while, with one range fixed.

    Args:
        model: The copy.
        settings: Settings of the evidence and of the optimiser.
        name: Name of the range.
        amounts: Numbers of steps and samples.
    """

    def __init__(self, model: nn.Module, settings: Settings, name: str, amounts: Amounts) -> None:
        self._model = model
        self._settings = settings
        self._amounts = amounts
        self._range = Range(model, name)
        self._hyperparameters = learnt_hyperparameters(model)
        self._random_states = RandomStates(model, (settings.data.train_loader,))
        with constant(self._hyperparameters):
            self._trainer = Trainer(model, settings)
        self._following = None
        if not amounts.hold_others and followers(model, self._range):
            self._following = Following(model, self._trainer, self._range)

    def check(self) -> None:
        """Raise if targets make no sense, or the curvature of this model cannot be computed."""
        check_every_target(self._model, self._settings)
        with constant(self._hyperparameters):
            self._trainer.estimator.rehearse()

    def signature(self) -> dict[str, Any]:
        """Return what must agree between two runs, but for what is particular to profiles."""
        return self._trainer.signature()

    def best_priors(self) -> dict[str, Any]:
        """Return the state of the best priors for the weights as they are."""
        with seeded(0, self._random_states), constant(self._hyperparameters):
            self._assess(0)
        return self._trainer.priors.state_dict()

    def evidence(self, value: float, repeat: int, priors: dict[str, Any]) -> float:
        """Return the evidence per example with the range at a value, after some training.

        Args:
            value: Width of the range.
            repeat: Number of the repetition, which is the seed of batches and draws.
            priors: State of the priors at the start.
        """
        self._trainer.priors.load_state_dict(deepcopy(priors))
        self._range.put(value)
        with seeded(repeat, self._random_states):
            self._train(repeat)
            with constant(self._hyperparameters):
                return self._assess(repeat)

    def _train(self, repeat: int) -> None:
        """Step the weights, with a step size that falls to zero, so that they come to rest.

        Other ranges follow, by gradients from some of the batches before the weights see them.
        """
        n_steps = self._amounts.n_steps
        if not n_steps:
            return
        self._trainer.restart_rate(n_steps)
        every = max(1, n_steps // N_LOOKS)
        with closing(self._batches(repeat)) as endless:
            batches = itertools.islice(endless, n_steps)
            if self._following is None:
                self._train_on(batches)
                return
            for step, data in enumerate(batches):
                if step % every == 0:
                    self._following.look(data, step / n_steps)
                self._train_on([data])

    def _train_on(self, batches: Iterable[Any]) -> None:
        with constant(self._hyperparameters):
            self._trainer.train_on(batches)

    def _batches(self, repeat: int) -> Generator[Any]:
        """Yield batches, epoch after epoch, others in every repetition if the loader shuffles."""
        loader = self._settings.data.train_loader
        batches: Any = getattr(loader, "batch_sampler", None)
        samplers = [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
        # as a DistributedSampler shuffles by the number of the epoch, and by nothing else
        counting = [one for one in samplers if hasattr(one, "set_epoch")]
        before = [getattr(one, "epoch", 0) for one in counting]
        try:
            for epoch in itertools.count(MOST_EPOCHS * repeat):
                for one in counting:
                    one.set_epoch(epoch)
                yield from loader
        finally:
            for one, epoch in zip(counting, before, strict=True):
                one.set_epoch(epoch)

    def _assess(self, seed: int) -> float:
        """Take the priors to their optimum, and return the evidence per example."""
        data = self._settings.data

        def more(present: int) -> int:
            return self._amounts.n_samples or OVERSAMPLING * present

        with averaging_over(self._model, more):
            found = self._trainer.estimator.assess(data.ordered_loader, seed)
        return found / data.n_data
