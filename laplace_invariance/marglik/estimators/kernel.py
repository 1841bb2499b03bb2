"""Lower bounds of the evidence from the tangent kernel of a minibatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from laplace_invariance.curvature.ntk import BoundEstimate, TangentKernelBound
from laplace_invariance.draws import Share
from laplace_invariance.marglik.approximation import fresh_seed, replayable
from laplace_invariance.marglik.estimators.base import (
    TERMS,
    Context,
    Estimator,
    RunningEstimator,
    finite,
)
from laplace_invariance.marglik.settings import Record, check_numbers

__all__ = ["KernelBound"]


@dataclass(frozen=True)
class KernelBound(Estimator):
    """Learn by a lower bound of the exact linearised evidence, unbiased on every minibatch.

    The log determinant over all data is bounded by the sum of those of blocks, each of which is
    computed from the tangent kernel of a minibatch
    (:class:`~laplace_invariance.curvature.TangentKernelBound`). There are no Kronecker factors, and
    nothing is decomposed or kept between minibatches; but the bound is loose for small minibatches,
    and its gradient accordingly too large. Before every ``every``-th minibatch, hyperparameters,
    priors and noise take one step each.

    Attributes:
        kind: Blocks of the kernel: ``"full"`` has all outputs of a minibatch together, the tightest
            and most expensive; ``"output"`` one block per output; ``"single"`` one random output.
        every: Number of minibatches from one that is looked at to the next.
    """

    sees_training = True

    kind: Literal["full", "output", "single"] = "single"
    every: int = 8

    def __post_init__(self) -> None:
        check_numbers(self, "every", whole=True)
        if self.kind not in ("full", "output", "single"):
            raise ValueError(f"kind must be one of full, output, single, got {self.kind!r}")

    def start(self, context: Context) -> RunningEstimator:
        return _Bounding(context, self)


class _Bounding(RunningEstimator):
    """Steps everything by the bound of a minibatch; an estimate is the mean of these bounds."""

    def __init__(self, context: Context, settings: KernelBound) -> None:
        super().__init__(context)
        evidence, data = context.settings.evidence, context.settings.data
        if evidence.subset_of_weights != "all":
            raise ValueError("the kernel bound is that of all weights, not of the last layer")
        if context.settings.ranks.size > 1:
            raise ValueError(
                "the kernel bound is that of whole minibatches, which several processes share out; "
                "choose estimator 'running' or 'refit', or train in one process"
            )
        self._every = settings.every
        self._batch_size = min(data.train_loader.batch_size or 0, data.n_data)
        self._bound = TangentKernelBound(
            context.model, evidence.likelihood, settings.kind, dict_key_x=data.dict_key_x
        )
        self._step = 0  # minibatches seen since the first that counts
        self._terms: list[list[float]] = []  # evidence and terms of those since the last estimate

    def _rehearse(self, x: Any, y: Tensor) -> None:
        super()._rehearse(x, y)
        self._estimate(x, y)

    def _estimate(self, x: Any, y: Tensor) -> BoundEstimate:
        noise = self._priors.noise
        return self._bound.estimate(
            x,
            y,
            self.approximation.n_data,
            self._priors.precision.detach(),
            None if noise is None else noise.detach(),
            self._settings.evidence.temperature,
        )

    def observe(self, x: Any, y: Tensor, epoch: int, share: Share | None = None) -> None:
        if epoch <= self._settings.schedule.n_epochs_burnin:
            return
        if len(y) < self._batch_size:
            return  # the last, smaller minibatch of an epoch would make the estimate biased
        self._step += 1
        if (self._step - 1) % self._every:
            return
        with replayable(fresh_seed(self._step)):
            try:
                found = self._estimate(x, y)
            except torch.linalg.LinAlgError as error:
                self._guard.skip("priors", str(error))
                return
        if self._steps_hyperparameters:
            self._step_hyperparameters(found.hyperparameter_gradients, found.evidence)
        self._step_priors_by(found)
        values = (found.evidence, found.log_likelihood, found.log_det_ratio, found.scatter)
        self._terms.append([float(value) for value in values])

    def _step_priors_by(self, found: BoundEstimate) -> None:
        """Step prior precisions and noise along the gradients of a bound."""
        optimizer = self._priors.optimizer
        optimizer.zero_grad()
        self._priors.precision.backward(-found.precision_gradient)
        noise = self._priors.noise
        if noise is not None and noise.requires_grad and found.noise_gradient is not None:
            noise.backward(-found.noise_gradient.reshape(noise.shape))
        if self._guard.allows("priors", self._priors.learnt, torch.as_tensor(found.evidence)):
            optimizer.step()
            self.margliks.append(-float(found.evidence))

    def estimate(self, epoch: int) -> Record:
        if not self._terms:
            return {}
        means = torch.tensor(self._terms, dtype=torch.float64).mean(0).tolist()
        self._terms = []
        record = dict(zip(("evidence", *TERMS), map(finite, means), strict=True))
        return record | self._hyperparameters.describe()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"step": self._step, "terms": self._terms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._step = state["step"]
        self._terms = state["terms"]
