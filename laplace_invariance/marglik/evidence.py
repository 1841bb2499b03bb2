"""The evidence: how it is estimated, and the steps that are taken by it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader

from laplace_invariance.curvature.constant import constant_curvature
from laplace_invariance.hyper import StepGuard
from laplace_invariance.marglik.hyperparameters import Hyperparameters
from laplace_invariance.marglik.priors import Priors
from laplace_invariance.marglik.settings import Record, Settings

__all__ = ["TERMS", "EvidenceEstimator", "PartlyDifferentiable", "finite"]

logger = logging.getLogger(__name__)

TERMS = ("log_likelihood", "log_det_ratio", "scatter")


class EvidenceEstimator:
    """Estimates the evidence of a model, and steps priors, noise and hyperparameters by it.

    The evidence is that of the Laplace approximation,
    ``log_likelihood - 0.5 * (log_det_ratio + scatter)``. One fit of the curvature serves all steps
    on priors and noise, for which it is constant. Hyperparameters, on which it depends, take one
    step per fit, whose gradient takes one more pass through the data.

    Args:
        model: Model that is trained.
        settings: Settings of the run.
        priors: Prior precisions and noise.
        hyperparameters: Hyperparameters of the model.
        guard: Guard that counts skipped steps of kinds ``"priors"`` and ``"hyperparameters"``.

    Attributes:
        margliks: Negative log evidence at every step on priors, or at every fit if there are none.
        best: Model and priors at the best evidence so far, with this and its epoch; or empty.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        priors: Priors,
        hyperparameters: Hyperparameters,
        guard: StepGuard,
    ) -> None:
        self._model = model
        self._settings = settings
        self._schedule = settings.schedule
        self._loader = settings.data.evidence_loader
        self._priors = priors
        self._hyperparameters = hyperparameters
        self._guard = guard
        objective = settings.hyperparameters.objective
        by_evidence = objective.estimates and not objective.steps_in_training
        self._steps_hyperparameters = by_evidence and bool(hyperparameters.tensors)
        self.margliks: list[float] = []
        self.best: dict[str, Any] = {}

    def laplace(self, enable_backprop: bool = False) -> Any:
        """Return a Laplace approximation of the model with the present priors, not fitted yet.

        Args:
            enable_backprop: Whether predictions are to be differentiable with respect to inputs.
        """
        settings = self._settings.evidence
        noise = self._priors.noise
        return Laplace(
            self._model,
            settings.likelihood,
            subset_of_weights="all",
            hessian_structure=settings.hessian_structure,
            sigma_noise=1.0 if noise is None else noise.detach(),
            prior_precision=self._priors.precision.detach(),
            temperature=settings.temperature,
            enable_backprop=enable_backprop,
            backend=settings.backend,
            backend_kwargs=settings.backend_kwargs,
            dict_key_x=self._settings.data.dict_key_x,
            dict_key_y=self._settings.data.dict_key_y,
        )

    def rehearse(self) -> None:
        """Estimate the evidence of two examples, so that what cannot work fails before training.

        Raises:
            ValueError: If hyperparameters are to be learnt by the evidence of a backend that
                cannot differentiate them.
        """
        with torch.random.fork_rng(devices=[]):
            batch = next(iter(self._loader))
            if not isinstance(batch, MutableMapping):
                batch = [part[:2] for part in batch]
            la = self.laplace()
            la.fit(_OneBatch(batch))
            evidence = la.log_marginal_likelihood(self._priors.precision.detach())
        if self._steps_hyperparameters and not evidence.requires_grad:
            names = ", ".join(self._hyperparameters.named)
            raise ValueError(
                f"the evidence of backend {self._settings.evidence.backend.__name__} has no "
                f"gradient with respect to {names}; use backend=AugmentedGGN, or "
                "requires_grad_(False) for what is not to be learnt"
            )

    def estimate(self, epoch: int) -> Record:
        """Estimate the evidence, and step priors, noise and hyperparameters by it.

        Args:
            epoch: Present epoch, to be remembered if the evidence is the best so far.

        Returns:
            The evidence of the last round with its terms, and the hyperparameters that it is the
            evidence of; empty if the curvature was never finite.

        Raises:
            FloatingPointError: If too many steps in a row were not finite.
        """
        record: Record = {}
        for _ in range(self._schedule.rounds):
            try:
                la, share = self._fit()
            except torch.linalg.LinAlgError as error:
                self._guard.skip("priors", str(error))
                continue
            self._step_priors(la)
            evidence = self._evidence(la)
            record = {"evidence": finite(evidence.item())}
            record |= {name: finite(getattr(la, name).item()) for name in TERMS}
            record |= self._hyperparameters.describe()
            if evidence.isfinite() and evidence.item() > self.best.get("evidence", -math.inf):
                self._keep(epoch, evidence.item())
                logger.info("epoch %d: log evidence %.2f, the best so far", epoch, evidence.item())
            if self._steps_hyperparameters:
                self._step_hyperparameters(evidence, share)
        return record

    def _fit(self) -> tuple[Any, float]:
        """Fit Laplace; return it with the share of batches in which hyperparameters are stepped."""
        la = self.laplace()
        chosen = self._choose_batches()
        tensors = self._hyperparameters.tensors
        try:
            la.fit(PartlyDifferentiable(self._loader, tensors, chosen))
        finally:
            for tensor in tensors:
                tensor.requires_grad_()
        return la, len(chosen) / len(self._loader)

    def _choose_batches(self) -> set[int]:
        """Return the indices of the batches in which hyperparameters are differentiated."""
        if not self._steps_hyperparameters:
            return set()
        n_batches = len(self._loader)
        n_chosen = self._settings.hyperparameters.n_hyper_batches
        if n_chosen is None or n_chosen >= n_batches:
            return set(range(n_batches))
        generator = self._settings.hyperparameters.generator
        device = None if generator is None else generator.device
        order = torch.randperm(n_batches, generator=generator, device=device)
        return set(order[:n_chosen].tolist())

    def _step_priors(self, la: Any) -> None:
        """Step prior precisions and noise on one decomposition of the curvature."""
        optimizer = self._priors.optimizer
        with constant_curvature(la):
            for _ in range(self._schedule.prior_steps):
                optimizer.zero_grad()
                objective = -la.log_marginal_likelihood(self._priors.precision, self._priors.noise)
                if torch.isfinite(objective):
                    objective.backward()
                if not self._guard.allows("priors", self._priors.learnt, objective.detach()):
                    break  # the other steps would see the same
                optimizer.step()
                self.margliks.append(objective.item())

    def _evidence(self, la: Any) -> Tensor:
        """Return the evidence with the stepped priors, differentiable in hyperparameters only."""
        noise = self._priors.noise
        if noise is not None:
            noise = noise.detach()
        evidence = la.log_marginal_likelihood(self._priors.precision.detach(), noise)
        if not self._schedule.prior_steps and torch.isfinite(evidence):
            self.margliks.append(-evidence.item())
        return evidence

    def _step_hyperparameters(self, evidence: Tensor, share: float) -> None:
        """Step hyperparameters by a gradient that is scaled to be unbiased over all batches."""
        tensors = self._hyperparameters.tensors
        self._hyperparameters.zero_grad()
        if torch.isfinite(evidence):
            (-evidence).backward()
        for tensor in tensors:
            if tensor.grad is not None:
                tensor.grad = tensor.grad / share
        if self._guard.allows("hyperparameters", tensors, evidence.detach()):
            self._hyperparameters.step()
        self._hyperparameters.zero_grad()

    def _keep(self, epoch: int, evidence: float | None) -> None:
        state = self._model.state_dict()
        self.best = {
            "evidence": evidence,
            "epoch": epoch,
            "model": {name: value.detach().clone() for name, value in state.items()},
            "priors": self._priors.values(),
        }

    def fit_best(self, epoch: int) -> Any:
        """Return to the best evidence, and fit a Laplace approximation there.

        Args:
            epoch: Present epoch, the best one if the evidence was never estimated.

        Returns:
            The fitted Laplace approximation; model and priors have the values that it is fitted at.
        """
        if not self.best:
            self._keep(epoch, None)
        self._model.load_state_dict(self.best["model"])
        self._priors.set_values(self.best["priors"])
        la = self.laplace(self._settings.evidence.enable_backprop)
        la.fit(self._loader)
        return la

    def state_dict(self) -> dict[str, Any]:
        """Return the best state and the evidence at every step."""
        return {"best": self.best, "margliks": self.margliks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back a state that :meth:`state_dict` returned."""
        self.best = state["best"]
        self.margliks = state["margliks"]


def finite(value: float) -> float | None:
    """Return the value, or None if it is not finite, as JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None


class PartlyDifferentiable:
    """A loader that lets hyperparameters require grad in some of its batches only.

    Args:
        loader: Loader of all batches.
        hyperparameters: Tensors whose ``requires_grad`` is set before every batch.
        chosen: Indices of the batches in which they require grad.
    """

    def __init__(
        self, loader: DataLoader, hyperparameters: Sequence[Tensor], chosen: set[int]
    ) -> None:
        self._loader = loader
        self._hyperparameters = hyperparameters
        self._chosen = chosen
        self.dataset = loader.dataset

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self._loader):
            for tensor in self._hyperparameters:
                tensor.requires_grad_(index in self._chosen)
            yield batch


class _OneBatch:
    """A loader with one batch, whose examples are its data set."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        parts = list(batch.values()) if isinstance(batch, MutableMapping) else batch
        self.dataset = parts[0]

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        yield self._batch
