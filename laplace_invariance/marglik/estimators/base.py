"""What all estimators of the evidence share: steps on priors, records, and the end of a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.curvature.constant import constant_curvature
from laplace_invariance.draws import Share
from laplace_invariance.hyper import StepGuard
from laplace_invariance.marglik.approximation import (
    Approximation,
    constant,
    learnt_hyperparameters,
    replayable,
)
from laplace_invariance.marglik.priors import Priors
from laplace_invariance.marglik.settings import Record, Settings

if TYPE_CHECKING:
    from laplace_invariance.marglik.hyperparameters import Hyperparameters

__all__ = [
    "TERMS",
    "Context",
    "Estimator",
    "Final",
    "RunningEstimator",
    "finite",
    "one_random_column",
]

logger = logging.getLogger(__name__)

TERMS = ("log_likelihood", "log_det_ratio", "scatter")

# The evidence of a result is that of all columns of the loss Hessian up to so many. With more it is
# estimated several times. The curvature of random columns is unbiased, but not its log determinant,
# whose bias is extrapolated from that of one estimate and of their mean.
MOST_COLUMNS = 32
MANY_COLUMNS = {"output_rank": 8, "stochastic": True, "num_samples": 8}
N_ESTIMATES = 4
SEED = 0  # of the draws with which evidences of results are computed, common to all runs


@dataclass(frozen=True, eq=False)
class Context:
    """What an estimator works on.

    Attributes:
        model: Model that is trained.
        settings: Settings of the run.
        priors: Prior precisions and noise.
        hyperparameters: Hyperparameters of the model.
        guard: Guard that counts skipped steps of kinds ``"priors"`` and ``"hyperparameters"``.
    """

    model: nn.Module
    settings: Settings
    priors: Priors
    hyperparameters: Hyperparameters
    guard: StepGuard


@dataclass(frozen=True)
class Final:
    """The end of a run.

    Attributes:
        la: Laplace approximation of the model that is returned.
        evidence: Log evidence of it.
        error: Standard error of the evidence; zero if it is exact.
        epoch: Epoch that it is of.
        decrement: By how much a Newton step on the weights would raise the log posterior.
    """

    la: Any
    evidence: float
    error: float
    epoch: int
    decrement: float


class Estimator:
    """A way to estimate the evidence while a model trains, as ``marglik_training`` takes it.

    Subclasses are frozen dataclasses whose fields are its options.

    Attributes:
        sees_training: Whether it estimates from minibatches of training, too.
    """

    sees_training = False

    def start(self, context: Context) -> RunningEstimator:
        """Return the estimator at work in one run."""
        raise NotImplementedError

    def n_epochs_learning(self, n_epochs: int) -> int:
        """Return after how many of all epochs hyperparameters stay as they are."""
        return n_epochs


class RunningEstimator:
    """An estimator at work: estimates the evidence, and steps what is learnt by it.

    The evidence is that of the Laplace approximation,
    ``log_likelihood - 0.5 * (log_det_ratio + scatter)``. One decomposition of the curvature serves
    all steps on priors and noise, for which it is constant.

    Args:
        context: Model, settings, priors and hyperparameters.
        options: Options of the backend that hold unless ``backend_kwargs`` has others.
        tolerance: Relative change of a Kronecker factor up to which it is not decomposed again.

    Attributes:
        margliks: Negative log evidence of every estimate or, with ``Refit``, at every step on
            priors.
    """

    def __init__(
        self, context: Context, options: dict[str, Any] | None = None, tolerance: float = 0.0
    ) -> None:
        self._context = context
        self._model = context.model
        self._settings = context.settings
        self._priors = context.priors
        self._hyperparameters = context.hyperparameters
        self._guard = context.guard
        self._ranks = context.settings.ranks
        self._loader = context.settings.data.evidence_loader
        self._options = (options or {}) | (context.settings.evidence.backend_kwargs or {})
        objective = context.settings.hyperparameters.objective
        by_evidence = objective.estimates and not objective.steps_in_training
        self._learns_hyperparameters = by_evidence and bool(self._hyperparameters.tensors)
        self._steps_hyperparameters = self._learns_hyperparameters
        self.approximation = self._approximate(self._options, tolerance=tolerance)
        self.margliks: list[float] = []
        # sums of the gradients of every other step in this epoch, and the number of steps
        self._gradients: list[Tensor] = []
        self._n_gradients = 0

    def _approximate(self, options: dict[str, Any], **kwargs: Any) -> Approximation:
        return Approximation(self._model, self._settings, self._priors, options, **kwargs)

    # What an estimator does in a run.

    def observe(self, x: Any, y: Tensor, epoch: int, share: Share | None = None) -> None:
        """See a minibatch before the weights are trained on it.

        Args:
            x: Inputs of the minibatch.
            y: Its targets.
            epoch: Present epoch.
            share: Which rows of the minibatch these are, if other processes have the rest.
        """

    def begin_epoch(self) -> None:
        """Forget the gradients of the last epoch."""
        self._gradients, self._n_gradients = [], 0

    def end_epoch(self) -> None:
        """Sum over ranks what was seen, as a checkpoint has what all ranks know."""

    @torch.no_grad()
    def follow(self) -> None:
        """See the gradients with which the weights were stepped."""
        gradients = [
            torch.zeros_like(weight) if weight.grad is None else weight.grad
            for weight in self._priors.weights
        ]
        gradient = torch.cat([tensor.flatten() for tensor in gradients])
        if self._n_gradients < 2:
            self._gradients.append(gradient)
        else:
            self._gradients[self._n_gradients % 2] += gradient
        self._n_gradients += 1

    def estimate(self, epoch: int) -> Record:
        """Estimate the evidence, and step priors, noise and hyperparameters by it.

        Args:
            epoch: Present epoch.

        Returns:
            The evidence with its terms, and the hyperparameters that it is the evidence of; empty
            if the curvature was not finite.

        Raises:
            FloatingPointError: If too many steps in a row were not finite.
        """
        raise NotImplementedError

    def hold(self, held: bool) -> None:
        """Leave hyperparameters as they are from now on, or step them again."""
        self._steps_hyperparameters = self._learns_hyperparameters and not held

    def choose_final(self, epoch: int) -> int:
        """Put the state that is returned into model and priors, and return its epoch."""
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later estimates depend on."""
        return {"margliks": self.margliks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back a state that :meth:`state_dict` returned."""
        self.margliks = state["margliks"]

    def assess(self, loader: Iterable[Any], seed: int = SEED) -> float:
        """Return the evidence of the present state, with priors taken to their optimum for it.

        Draws are common to all calls with the same seed, so that their evidences compare.

        Args:
            loader: Batches of all data, or of a part that stands for all.
            seed: Seed of the draws.

        Returns:
            Log evidence of all data; minus infinity if it is not finite.
        """
        with replayable(seed):
            totals, n_seen = self.approximation.total(loader)
        weight = self.approximation.n_data / n_seen
        try:
            self.approximation.put([weight * total for total in totals])
        except torch.linalg.LinAlgError:
            return -math.inf
        self._maximise_priors(self.approximation)
        evidence = self._evidence(self.approximation).item()
        return evidence if math.isfinite(evidence) else -math.inf

    # The beginning and the end.

    def rehearse(self) -> None:
        """Compute the curvature of two examples, so that what cannot work fails before training.

        Raises:
            ValueError: If hyperparameters are to be learnt by the evidence of a backend that
                cannot differentiate them.
        """
        if self._steps_hyperparameters and not self.approximation.differentiates():
            names = ", ".join(self._hyperparameters.named)
            raise ValueError(
                f"the evidence of backend {self._settings.evidence.backend.__name__} has no "
                f"gradient with respect to {names}; use backend=AugmentedGGN, or "
                "requires_grad_(False) for what is not to be learnt"
            )
        with torch.random.fork_rng(devices=[]):
            batch = next(iter(self._loader))
            if not isinstance(batch, MutableMapping):
                batch = [part[:2] for part in batch]
            self._rehearse(*self.approximation.batch(batch))

    def _rehearse(self, x: Any, y: Tensor) -> None:
        self.approximation.curvature(x, y)

    def finish(self, epoch: int) -> Final:
        """Return to the state that the run returns, and fit a Laplace approximation there.

        All columns of the loss Hessian are used, or estimates of many, and draws that are common to
        all runs, so that evidences can be compared.

        Args:
            epoch: Number of epochs done.
        """
        chosen = self.choose_final(epoch)
        self._model.eval()
        options, n_estimates = self._final_options()
        fits = [self._fit(options, signs=SEED + i) for i in range(n_estimates)]
        together = fits[-1]
        if n_estimates > 1:
            together.put_mean(fits)
        if self._steps_at_the_end():
            self._maximise_priors(together)
        evidence = self._evidence(together).item()
        decrement = self._newton_decrement(together)
        if n_estimates == 1:
            return Final(together.la, evidence, 0.0, chosen, decrement)
        alone = torch.tensor([self._evidence(fit).item() for fit in fits[:-1]])
        bias = (alone.mean().item() - evidence) / (n_estimates - 1)
        spread = alone.std().item() / math.sqrt(n_estimates)
        error = math.hypot(spread, bias)
        return Final(together.la, evidence - bias, error, chosen, decrement)

    def _newton_decrement(self, approximation: Approximation) -> float:
        """Return how far the weights are from a mode of the posterior that they are taken for."""
        frozen = constant(learnt_hyperparameters(approximation.la.model))
        with frozen, constant_curvature(approximation.la):
            return approximation.newton_decrement(self._settings.data.ordered_loader, SEED)

    def _steps_at_the_end(self) -> bool:
        """Return whether priors take their steps once more, with the exact curvature at the end."""
        return bool(self.margliks)

    def _final_options(self) -> tuple[dict[str, Any], int]:
        """Return options of the backend for the end of a run, and the number of fits."""
        columns = ("output_rank", "stochastic", "num_samples")
        options = {name: value for name, value in self._options.items() if name not in columns}
        evidence = self._settings.evidence
        many = self.approximation.n_outputs > MOST_COLUMNS + 1
        exact = evidence.is_regression or evidence.hessian_structure == "full"
        if not many or exact or not self.approximation.samples_columns():
            return options, 1
        return options | MANY_COLUMNS, N_ESTIMATES

    def _fit(self, options: dict[str, Any], signs: int) -> Approximation:
        """Return a fitted Laplace approximation that keeps nothing of the data."""
        enable_backprop = self._settings.evidence.enable_backprop
        approximation = self._approximate(options, enable_backprop=enable_backprop)
        la = approximation.la
        loader = self._settings.data.ordered_loader
        with constant(learnt_hyperparameters(la.model)), replayable(SEED, signs):
            total, _ = approximation.total(loader)
            approximation.put(total)
        return approximation

    # Steps that estimators share.

    def _step_priors(self, approximation: Approximation) -> list[float]:
        """Step priors and noise on one decomposition; return the negative evidence before each."""
        optimizer = self._priors.optimizer
        found = []
        with constant_curvature(approximation.la):
            evidence = approximation.evidence_of_priors()
            for _ in range(self._settings.schedule.prior_steps):
                optimizer.zero_grad()
                objective = -evidence(self._priors.precision, self._priors.noise)
                if torch.isfinite(objective):
                    objective.backward()
                if not self._guard.allows("priors", self._priors.learnt, objective.detach()):
                    break  # the other steps would see the same
                optimizer.step()
                found.append(objective.item())
        return found

    def _maximise_priors(self, approximation: Approximation, roughly: bool = False) -> None:
        """Take priors and noise to their optimum on one decomposition."""
        if not self._settings.schedule.prior_steps:
            return
        with constant_curvature(approximation.la):
            evidence = approximation.evidence_of_priors()
            found = self._priors.maximise(evidence, approximation.n_targets, roughly)
        if not math.isfinite(found[-1]):
            self._guard.skip("priors", "the evidence is not finite")

    def _evidence(self, approximation: Approximation) -> Tensor:
        """Return the evidence with the stepped priors, differentiable in what was put in."""
        noise = self._priors.noise
        if noise is not None:
            noise = noise.detach()
        return approximation.la.log_marginal_likelihood(self._priors.precision.detach(), noise)

    def _describe(self, evidence: Tensor) -> Record:
        la = self.approximation.la
        record: Record = {"evidence": finite(evidence.item())}
        record |= {name: finite(getattr(la, name).item()) for name in TERMS}
        record["newton_decrement"] = self._training_decrement()
        return record | self._hyperparameters.describe()

    def _training_decrement(self) -> float | None:
        """Return by how much a Newton step would raise what the weights are trained for.

        By the gradients of this epoch's steps. Those of minibatches are noisy, but not in common:
        the product of two sums, each of every other step, has the mean of that of mean gradients.
        """
        if self._n_gradients < 2:
            return None
        counts = ((self._n_gradients + 1) // 2, self._n_gradients // 2)
        scale = self.approximation.n_data * self._priors.loss_scale
        means = [scale * total / n for total, n in zip(self._gradients, counts, strict=True)]
        return finite(self.approximation.decrement_of(*means))

    def _step_hyperparameters(self, gradients: Sequence[Tensor], evidence: Tensor) -> None:
        """Step hyperparameters along gradients of the evidence."""
        tensors = self._hyperparameters.tensors
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = -gradient
        if self._guard.allows("hyperparameters", tensors, evidence.detach()):
            self._hyperparameters.step()
        self._hyperparameters.zero_grad()


def finite(value: float) -> float | None:
    """Return the value, or None if it is not finite, as JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def one_random_column(settings: Settings) -> dict[str, Any]:
    """Return options that estimate the loss Hessian by one column, unless the user chose some."""
    evidence = settings.evidence
    chosen = {"output_rank", "stochastic", "num_samples"} & set(evidence.backend_kwargs or {})
    if chosen or not issubclass(evidence.backend, AugmentedGGN):
        return {}
    if evidence.hessian_structure == "full":  # would be of a rank far too low
        return {}
    return {"stochastic": True, "num_samples": 1}
