"""Refit: the curvature of all data anew for every estimate."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from laplace_invariance.draws import Share, sharing
from laplace_invariance.marglik.approximation import added, fresh_seed, replayable
from laplace_invariance.marglik.estimators.base import Context, Estimator, RunningEstimator
from laplace_invariance.marglik.randomness import RandomStates
from laplace_invariance.marglik.settings import Record, check_numbers

__all__ = ["Refit"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refit(Estimator):
    """Fit the curvature of all data for every estimate, as ``laplace.marglik_training`` does.

    Hyperparameters take one step per fit, whose gradient takes one more pass through the data;
    neither pass keeps anything of a batch. What is returned is the state of the best estimate.

    Attributes:
        n_hyper_batches: Number of batches in which hyperparameters are differentiated, drawn at
            random for every estimate; the gradient is scaled to be unbiased. None is all.
        generator: Generator that draws these; None is torch's default.
    """

    n_hyper_batches: int | None = None
    generator: torch.Generator | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_numbers(self, "n_hyper_batches", whole=True)

    def start(self, context: Context) -> RunningEstimator:
        return _Refitting(context, self)


class _Refitting(RunningEstimator):
    """Estimates by fits of all data; keeps the best state so far."""

    def __init__(self, context: Context, settings: Refit) -> None:
        super().__init__(context)
        self._refit = settings
        self._random_states = RandomStates(context.model, [self._loader])
        self.best: dict[str, Any] = {}

    def estimate(self, epoch: int) -> Record:
        record: Record = {}
        for _ in range(self._settings.schedule.rounds):
            chosen, seed = self._choose_batches(), fresh_seed(epoch)
            random_states = self._random_states.state_dict()
            try:
                leaves = self.approximation.put(self._sum(seed), self._steps_hyperparameters)
            except torch.linalg.LinAlgError as error:
                self._guard.skip("priors", str(error))
                continue
            self.margliks += self._step_priors(self.approximation)
            evidence = self._evidence(self.approximation)
            if not self._settings.schedule.prior_steps and torch.isfinite(evidence):
                self.margliks.append(-evidence.item())
            record = self._describe(evidence)
            if evidence.isfinite() and evidence.item() > self.best.get("evidence", -math.inf):
                self._keep(epoch, evidence.item())
                logger.info("epoch %d: log evidence %.2f, the best so far", epoch, evidence.item())
            if self._steps_hyperparameters:
                gradients = [torch.zeros_like(t) for t in self._hyperparameters.tensors]
                if torch.isfinite(evidence):
                    cotangents = self.approximation.cotangents(evidence, leaves)
                    self._random_states.load_state_dict(random_states)
                    gradients = self._pull_back(cotangents, seed, chosen)
                self._step_hyperparameters(gradients, evidence)
        return record

    def _batches(self, seed: int) -> Iterator[tuple[int, Any, Tensor, Share]]:
        """Yield index, inputs, targets and share of all batches, each inside draws of its own."""
        next(iter(self._loader))  # as laplace does, so that a shuffled loader goes on as there
        for index, (x, y, share) in enumerate(self.approximation.batches(self._loader)):
            with replayable(seed + index), sharing(share):
                yield index, x, y, share

    def _sum(self, seed: int) -> list[Tensor]:
        """Return loss and curvature of all data."""
        totals: list[Tensor] = []
        for _, x, y, share in self._batches(seed):
            totals = added(totals, self.approximation.curvature(x, y), share)
        return self._ranks.sum(totals)

    def _pull_back(self, cotangents: list[Tensor], seed: int, chosen: set[int]) -> list[Tensor]:
        """Return the gradient of hyperparameters, by a pass that sees what the fit saw."""
        totals = [torch.zeros_like(tensor) for tensor in self._hyperparameters.tensors]
        for index, x, y, share in self._batches(seed):
            if index in chosen:
                _, found = self.approximation.pull_back(x, y, cotangents, values=False)
                totals = added(totals, found, share)
        scale = len(self._loader) / len(chosen)
        return [scale * total for total in self._ranks.sum(totals)]

    def _choose_batches(self) -> set[int]:
        """Return the indices of the batches in which hyperparameters are differentiated."""
        if not self._steps_hyperparameters:
            return set()
        n_batches = len(self._loader)
        n_chosen = self._refit.n_hyper_batches
        if n_chosen is None or n_chosen >= n_batches:
            return set(range(n_batches))
        generator = self._refit.generator
        device = None if generator is None else generator.device
        order = torch.randperm(n_batches, generator=generator, device=device)
        return set(order[:n_chosen].tolist())

    def _keep(self, epoch: int, evidence: float | None) -> None:
        state = self._model.state_dict()
        self.best = {
            "evidence": evidence,
            "epoch": epoch,
            "model": {name: value.detach().clone() for name, value in state.items()},
            "priors": self._priors.values(),
        }

    def choose_final(self, epoch: int) -> int:
        if not self.best:
            return epoch
        self._model.load_state_dict(self.best["model"])
        self._priors.set_values(self.best["priors"])
        return self.best["epoch"]

    def _steps_at_the_end(self) -> bool:
        return False  # the priors of the best estimate have had theirs

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.best = state["best"]
