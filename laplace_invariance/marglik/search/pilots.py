"""Pilots: short trainings of candidates, all from the same weights, batches and draws."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from laplace_invariance.invariant import averaging_over
from laplace_invariance.marglik.approximation import constant, learnt_hyperparameters
from laplace_invariance.marglik.batches import batches_of
from laplace_invariance.marglik.estimators import Refit
from laplace_invariance.marglik.estimators.base import one_random_column
from laplace_invariance.marglik.guessing import guessing
from laplace_invariance.marglik.loaders import rebuilt
from laplace_invariance.marglik.loop import Trainer
from laplace_invariance.marglik.priors import Priors
from laplace_invariance.marglik.randomness import RandomStates
from laplace_invariance.marglik.ranks import ALONE
from laplace_invariance.marglik.search.spaces import AnyCandidate, AnySpace, space_of
from laplace_invariance.marglik.settings import Settings

__all__ = ["Pilot", "Pilots", "n_units"]

SEED = 0  # of estimates, unless told otherwise

# What a pilot was trained with, stage by stage. The first stage has one unit of training, and each
# further one as many as all before it: 1, 1, 2, 4, ... units.
Pilot = tuple[AnyCandidate, ...]


def n_units(pilot: Pilot) -> int:
    """Return the units of training that a pilot has had in all."""
    return 2 ** (len(pilot) - 1)


class Pilots:
    """Trains a model for a while with the ranges of candidates, and estimates its evidence.

    Everything but the ranges is common: initial weights, priors, batches, draws. So differences in
    evidence are those of the ranges, and a pilot that is trained again comes out the same.

    Args:
        model: Model as training will start with it.
        settings: Settings of the training.
        random_states: All sources of randomness.
        n_steps: Number of steps on the weights in a unit of training; None is as the space says.
        n_samples: Number of samples in estimates, as a multiple of that in training.
        n_examples: Number of examples that the evidence is estimated from, at most.
        seed: Seed of these examples, and of the draws in estimates.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        random_states: RandomStates,
        n_steps: int | None,
        n_samples: int,
        n_examples: int,
        seed: int = SEED,
    ) -> None:
        self._model = model
        self._space = space_of(model, settings)
        self._random_states = random_states
        self._n_steps = n_steps or self._space.n_steps(len(settings.data.train_loader))
        self._n_samples = n_samples
        self._seed = seed
        self._loader = _some_of(settings, n_examples, seed)
        self._batches = settings.data.train_loader
        self._hyperparameters = learnt_hyperparameters(model)
        with constant(self._hyperparameters):
            self._trainer = Trainer(model, _without_learning(settings))
        self._start = self._state()
        self._states: dict[Pilot, dict[str, Any]] = {}

    @property
    def most_units(self) -> int:
        """Units after which candidates are compared at the latest: a quarter of the training."""
        n_epochs = self._trainer.settings.schedule.n_epochs
        return n_epochs * len(self._batches) // (4 * self._n_steps)

    @property
    def n_steps(self) -> int:
        """Number of steps on the weights in a unit of training."""
        return self._n_steps

    @property
    def space(self) -> AnySpace:
        """The ranges, or the levels of free paths, to search."""
        return self._space

    def evidence(self, pilot: Pilot) -> float:
        """Return the evidence per example of a pilot at the end of its last stage.

        In each stage the step size falls to zero, so that the weights come to rest, and then the
        priors go to their optimum. Earlier stages are trained again if their state is not known.
        The model and all random states are afterwards as they were before.
        """
        try:
            with constant(self._hyperparameters):
                return self._run(pilot)
        finally:
            self._put(self._start)

    def _run(self, pilot: Pilot) -> float:
        """Train the last stage of a pilot, and keep the state of everything then."""
        *before, candidate = pilot
        earlier = tuple(before)
        if earlier and earlier not in self._states:
            self._run(earlier)
        self._put(self._states[earlier] if earlier else self._start)
        if not earlier or self._space.continues:
            self._space.put(candidate, self._trainer.priors)
        n_before = n_units(earlier) if earlier else 0
        found = self._train(n_units(pilot) - n_before)
        self._states[pilot] = self._state()
        return found

    def _train(self, length: int) -> float:
        """Train for some units, and return the evidence per example then.

        The step size of the weights falls to zero, so that they come to rest.
        """
        n_steps = length * self._n_steps
        n_estimates = min(n_steps, length * self._space.n_estimates)
        self._trainer.restart_rate(n_steps)
        batches = _endless(self._batches)
        evidence, done = -math.inf, 0
        for i in range(1, n_estimates + 1):
            until = n_steps * i // n_estimates
            self._trainer.train_on(itertools.islice(batches, until - done))
            evidence = self._assess()
            done = until
        return evidence

    def _assess(self) -> float:
        """Take the priors to their optimum, and return the evidence per example."""
        before = self._random_states.state_dict()
        with averaging_over(self._model, lambda n_samples: n_samples * self._n_samples):
            found = self._trainer.estimator.assess(self._loader, self._seed)
        self._random_states.load_state_dict(before)
        return found / self._trainer.settings.data.n_data

    def at_rest(self, priors: Priors) -> float:
        """Return the evidence per example of the model as it is, with weights that come to rest.

        They are trained for a unit, in which the step size falls to zero, with ranges as they are.
        The model and all random states are afterwards as they were before.

        Args:
            priors: Prior precisions to start from; they stay as they are.
        """
        before = self._state()
        self._trainer.priors.load_state_dict(deepcopy(priors.state_dict()))
        try:
            with constant(self._hyperparameters):
                return self._train(1)
        finally:
            self._put(before)

    def state_of(self, pilot: Pilot) -> dict[str, Any]:
        """Return the state of everything at the end of a pilot that was trained here."""
        return self._states[pilot]

    def know(self, pilot: Pilot, state: dict[str, Any]) -> None:
        """Take over the state at the end of a pilot that another process trained."""
        self._states[pilot] = state

    def forget(self, keep: Iterable[Pilot]) -> None:
        """Drop the weights of all pilots but some, and of the stages before their last one."""
        kept = {pilot for one in keep for pilot in (one, one[:-1])}
        self._states = {pilot: state for pilot, state in self._states.items() if pilot in kept}

    def targets(self) -> Tensor:
        """Return the targets of the examples that evidences are estimated from."""
        with torch.random.fork_rng(devices=[]):
            batches = [self._trainer.estimator.approximation.batch(data) for data in self._loader]
        return torch.cat([targets for _, targets in batches])

    def chance(self) -> float:
        """Return the evidence per example of guessing by the frequencies of classes.

        Of a regression it is minus infinity: a search compares its candidates whatever they are.
        """
        if self._trainer.settings.evidence.is_regression:
            return -math.inf
        return guessing(self.targets(), self._trainer.settings.evidence)

    def _state(self) -> dict[str, Any]:
        state = {
            "run": self._trainer.state_dict(),
            "random": self._random_states.state_dict(),
            "buffers": [buffer.detach() for buffer in self._model.buffers()],
        }
        return deepcopy(state)

    def _put(self, state: dict[str, Any]) -> None:
        self._trainer.load_state_dict(deepcopy(state["run"]))
        self._random_states.load_state_dict(state["random"])
        # those that are in no state_dict, too
        for buffer, kept in zip(self._model.buffers(), state["buffers"], strict=True):
            buffer.data.copy_(kept)


def _endless(loader: DataLoader) -> Iterator[Any]:
    """Yield batches of a loader, epoch after epoch."""
    return itertools.chain.from_iterable(map(batches_of, itertools.repeat(loader)))


def _some_of(settings: Settings, n_examples: int, seed: int) -> Iterable[Any]:
    """Return batches of so many examples at random, the same for a seed, or of all."""
    loader = settings.data.ordered_loader
    if settings.data.n_data <= n_examples or not isinstance(loader, DataLoader):
        return loader
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(settings.data.n_data, generator=generator)[:n_examples]
    return rebuilt(loader, Subset(loader.dataset, chosen.tolist()), loader.batch_size)


def _without_learning(settings: Settings) -> Settings:
    """Return settings of a pilot: constant step size, one random column, and one process."""
    optimizer = replace(settings.optimizer, scheduler_cls=None, scheduler_kwargs=None)
    options = one_random_column(settings) | (settings.evidence.backend_kwargs or {})
    evidence = replace(settings.evidence, estimator=Refit(), backend_kwargs=options)
    return replace(settings, optimizer=optimizer, evidence=evidence, ranks=ALONE)
