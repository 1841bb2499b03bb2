"""Running averages: curvature and gradients from a few minibatches, while the weights train."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_invariance.draws import Share
from laplace_invariance.invariant import averaging_over
from laplace_invariance.marglik.approximation import added, fresh_seed, replayable
from laplace_invariance.marglik.estimators.base import (
    Context,
    Estimator,
    RunningEstimator,
    one_random_column,
)
from laplace_invariance.marglik.settings import Record, Settings, check_numbers

__all__ = ["Running"]

LEAST_EXAMPLES = 200  # for one estimate, if there are as many


@dataclass(frozen=True)
class Running(Estimator):
    """Learn from some of the minibatches on which the weights are trained, one pass each.

    Before the weights are trained on every ``every``-th minibatch, one pass over it gives its
    curvature, which is accumulated, and the gradient of hyperparameters, which take a step. That
    takes the derivative of the log determinant in the curvature of *all* data, which is kept from
    the last estimate. An estimate scales what was accumulated to the size of the data, decomposes
    it, and takes the priors to their optimum, unless ``n_hypersteps`` is 0. So it costs no pass
    through the data, and hyperparameters take many more steps.

    The evidence of the history lags behind the weights and is not compared; what is returned is the
    last state, with its exact evidence. The loss Hessian is estimated by one random direction,
    but for a full curvature, unless ``backend_kwargs`` says otherwise.

    Attributes:
        every: Number of minibatches from one that is looked at to the next; fewer where an estimate
            would see less than 200 examples, or less than all.
        decay: Weight of the curvature of earlier estimates, at the present scale, in a running
            average. Curvature of weights that were less fitted makes prior precisions too large,
            hence none by default; it helps where minibatches are few and small.
        tolerance: Relative change of a Kronecker factor up to which its decomposition is used again
            at another scale. It saves time where decompositions dominate, from widths of 1,000 on.
        oversampling: Number of samples in estimates, as a multiple of that in training. The noise
            of few samples counts as complexity, for which ranges that are too narrow, and networks
            that are fitted too little, are paid.
        settle: Share of the epochs, the last ones, in which nothing is estimated and only weights
            are learnt. They come closer to the mode that a Laplace approximation takes them for.
    """

    sees_training = True

    every: int = 10
    decay: float = 0.0
    tolerance: float = 0.0
    oversampling: int = 2
    settle: float = 0.25

    def __post_init__(self) -> None:
        check_numbers(self, "every", "oversampling", whole=True)
        check_numbers(self, "tolerance", least=0)
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {self.decay}")
        if not 0 <= self.settle < 1:
            raise ValueError(f"settle must be at least 0 and below 1, got {self.settle}")

    def n_epochs_learning(self, n_epochs: int) -> int:
        return n_epochs - int(self.settle * n_epochs)

    def start(self, context: Context) -> RunningEstimator:
        return _Averaging(context, self)


class _Averaging(RunningEstimator):
    """Estimates from running averages over minibatches; returns the last state."""

    def __init__(self, context: Context, settings: Running) -> None:
        super().__init__(context, one_random_column(context.settings), settings.tolerance)
        self._every = min(settings.every, _largest_interval(context.settings))
        self._decay = settings.decay
        self._oversampling = settings.oversampling
        self._n_epochs_learning = settings.n_epochs_learning(context.settings.schedule.n_epochs)
        self._step = 0  # minibatches seen since the first that counts
        self._own: list[Tensor] = []  # loss and curvature that this rank has seen in this epoch
        self._sum: list[Tensor] = []  # that all have seen since the last estimate, without these
        self._n_seen = 0  # examples that both are of
        self._average: list[Tensor] = []  # loss and curvature as if of all data
        self._cotangents: list[Tensor] = []  # derivatives of the evidence in these

    def observe(self, x: Any, y: Tensor, epoch: int, share: Share | None = None) -> None:
        schedule = self._settings.schedule
        is_early = epoch <= schedule.n_epochs_burnin - schedule.marglik_frequency
        if is_early or epoch > self._n_epochs_learning:
            return
        self._step += 1
        if (self._step - 1) % self._every:
            return
        more = averaging_over(self._model, lambda n_samples: n_samples * self._oversampling)
        with replayable(fresh_seed(self._step)), more:
            self._learn_from(x, y, share or Share(0, 1, len(y)))

    def _learn_from(self, x: Any, y: Tensor, share: Share) -> None:
        """Accumulate the curvature of a minibatch, and step hyperparameters by its gradient."""
        if self._cotangents:
            found, gradients = self.approximation.pull_back(x, y, self._cotangents)
            weight = self.approximation.n_data / share.n * bool(share.n_counted)
            loss, *gradients = self._ranks.sum([found[0], *(weight * g for g in gradients)])
            self._step_hyperparameters(gradients, loss)
        else:
            found = self.approximation.curvature(x, y)
        self._own = added(self._own, found, share)
        self._n_seen += share.n

    def hold(self, held: bool) -> None:
        super().hold(held)
        self._cotangents = []

    def end_epoch(self) -> None:
        if self._own:
            whole = Share(0, 1, self._n_seen)
            self._sum = added(self._sum, self._ranks.sum(self._own), whole)
            self._own = []

    def estimate(self, epoch: int) -> Record:
        if epoch > self._n_epochs_learning:
            return {}
        self.end_epoch()
        if self._n_seen:
            self._update_average()
        if not self._average:
            return {}
        try:
            leaves = self.approximation.put(self._average, self._steps_hyperparameters)
        except torch.linalg.LinAlgError as error:
            self._average, self._cotangents = [], []
            self._guard.skip("priors", str(error))
            return {}
        self._maximise_priors(self.approximation, roughly=True)
        evidence = self._evidence(self.approximation)
        if torch.isfinite(evidence):
            self.margliks.append(-evidence.item())
        if self._steps_hyperparameters and torch.isfinite(evidence):
            self._cotangents = self.approximation.cotangents(evidence, leaves)
        return self._describe(evidence)

    def _update_average(self) -> None:
        """Average what was accumulated, scaled to the size of the data, with what was known."""
        weight = self.approximation.n_data / self._n_seen
        fresh = [weight * tensor for tensor in self._sum]
        if self._average:
            pairs = zip(self._average, fresh, strict=True)
            fresh = [_averaged(old, new, self._decay) for old, new in pairs]
        self._average = fresh
        self._sum, self._n_seen = [], 0

    def state_dict(self) -> dict[str, Any]:
        decompositions = self.approximation.decompositions
        return super().state_dict() | {
            "decompositions": None if decompositions is None else decompositions.state_dict(),
            "step": self._step,
            "sum": self._sum,
            "n_seen": self._n_seen,
            "average": self._average,
            "cotangents": self._cotangents,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.approximation.decompositions is not None:
            self.approximation.decompositions.load_state_dict(state["decompositions"])
        self._step = state["step"]
        self._sum = state["sum"]
        self._n_seen = state["n_seen"]
        self._average = state["average"]
        self._cotangents = state["cotangents"]


def _largest_interval(settings: Settings) -> int:
    """Return the interval between minibatches at which an estimate sees enough examples."""
    n_data, n_batches = settings.data.n_data, len(settings.data.train_loader)
    batch_size = math.ceil(n_data / n_batches)
    n_needed = math.ceil(min(n_data, LEAST_EXAMPLES) / batch_size)
    return max(1, n_batches * settings.schedule.marglik_frequency // n_needed)


def _averaged(old: Tensor, new: Tensor, decay: float) -> Tensor:
    """Return the mean of an old curvature, at the scale of the new one, and the new one.

    Curvature shrinks while weights are fitted. At its old scale it would make the complexity too
    large and, by it, the prior precisions. The loss, a number, is the new one.
    """
    if not new.ndim:
        return new
    before, now = _trace(old), _trace(new)
    if not before > 0:
        return new
    return (decay * now / before) * old + (1 - decay) * new


def _trace(curvature: Tensor) -> Tensor:
    """Return the trace of a matrix, of the blocks ``[q, d, d]`` of one, or of a diagonal."""
    if curvature.ndim == 1:
        return curvature.sum()
    return curvature.diagonal(dim1=-2, dim2=-1).sum()
