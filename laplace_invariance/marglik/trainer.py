"""The state of a training run, and the two things that an epoch does: train the weights, and estimate the evidence."""

from __future__ import annotations

import logging
import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from laplace.baselaplace import BaseLaplace
from torch import Tensor, nn
from torch.utils.data import DataLoader

from laplace_invariance.augmentations.base import Augmentation
from laplace_invariance.hyper import Hyperparameterised, named_hyperparameters
from laplace_invariance.marglik.evidence import Curvature, OneBatch, PartlyDifferentiable
from laplace_invariance.marglik.objectives import Objective
from laplace_invariance.marglik.priors import Priors

__all__ = ["Record", "Run", "Schedule", "Steps"]

logger = logging.getLogger(__name__)

Record = dict[str, Any]
MAX_NAMED = 200  # prior precisions that a record has by name
TERMS = ("log_likelihood", "log_det_ratio", "scatter")


@dataclass(frozen=True)
class Schedule:
    """When hyperparameters are stepped, how often, and how far."""

    n_epochs: int
    burn_in: int
    every: int
    rounds: int
    prior_steps: int
    lr_aug: float
    lr_aug_min: float

    def due(self, epoch: int) -> bool:
        return epoch % self.every == 0 and epoch >= self.burn_in

    def rate(self, epoch: int) -> float:
        """Return the step size of hyperparameters, a half cosine over the epochs."""
        share = (1 + math.cos(math.pi * (epoch - 1) / self.n_epochs)) / 2
        return self.lr_aug_min + (self.lr_aug - self.lr_aug_min) * share


@dataclass
class Steps:
    """Counts steps that had to be skipped, and gives up after too many of one kind in a row."""

    max_bad: int
    skipped: dict[str, int] = field(
        default_factory=lambda: {"weights": 0, "priors": 0, "hyperparameters": 0}
    )
    in_a_row: dict[str, int] = field(
        default_factory=lambda: {"weights": 0, "priors": 0, "hyperparameters": 0}
    )

    def good(self, kind: str) -> bool:
        self.in_a_row[kind] = 0
        return True

    def bad(self, kind: str, cause: str) -> bool:
        self.skipped[kind] += 1
        self.in_a_row[kind] += 1
        logger.warning("step of %s skipped: %s (%d so far)", kind, cause, self.skipped[kind])
        if self.in_a_row[kind] >= self.max_bad:
            raise FloatingPointError(
                f"{self.in_a_row[kind]} steps of {kind} in a row were skipped, the last one: {cause}"
            )
        return False

    def check(self, kind: str, value: Tensor, tensors: Sequence[Tensor]) -> bool:
        """Tell whether a step may be made: value and the tensors' gradients are finite."""
        if not torch.isfinite(value).all():
            return self.bad(kind, "the objective is not finite")
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        if not all(torch.isfinite(gradient).all() for gradient in gradients):
            return self.bad(kind, "a gradient is not finite")
        return self.good(kind)


class Run:
    """The state of a training run and the two things that an epoch does: train, and estimate."""

    def __init__(
        self,
        model: nn.Module,
        train_loader: DataLoader,
        marglik_loader: DataLoader,
        objective: Objective,
        curvature: Curvature,
        schedule: Schedule,
        priors: Priors,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        n_hyper_batches: int | None,
        max_bad_steps: int,
        generator: torch.Generator | None,
        settings: dict[str, Any],
    ) -> None:
        self.settings = settings
        self.model, self.train_loader, self.marglik_loader = model, train_loader, marglik_loader
        self.objective, self.curvature, self.schedule, self.priors = (
            objective,
            curvature,
            schedule,
            priors,
        )
        self.optimizer, self.scheduler = optimizer, scheduler
        self.n_hyper_batches, self.generator = n_hyper_batches, generator
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.named = {
            name: tensor for name, tensor in named_hyperparameters(model) if tensor.requires_grad
        }
        self.etas = list(self.named.values())
        known = {id(tensor) for _, tensor in named_hyperparameters(model)}
        self.statistics = [
            buffer for buffer in model.buffers() if id(buffer) not in known
        ]  # such as of batch norm
        self.by_evidence = (
            bool(self.etas) and objective.estimates and not objective.steps_in_training
        )
        self.eta_optimizer = torch.optim.Adam(self.etas, lr=schedule.lr_aug) if self.etas else None
        self.criterion = (
            nn.CrossEntropyLoss() if curvature.likelihood == "classification" else nn.MSELoss()
        )
        self.steps = Steps(max_bad_steps)
        self.n_data = len(train_loader.dataset)
        self.epoch = 0
        self.best: dict[str, Any] = {}
        self.losses: list[float] = []
        self.margliks: list[float] = []
        self.history: list[Record] = []

    # Training of the weights.

    def train(self) -> None:
        """Pass once over the data, stepping the weights."""
        self.model.train()
        total, count = 0.0, 0
        for data in self.train_loader:
            x, y = self.batch(data)
            self._zero(self.optimizer, self.eta_optimizer)
            statistics = [buffer.clone() for buffer in self.statistics]
            loss = self.objective.training_loss(
                self.model, self.criterion, x, y
            ) + self.priors.penalty(self.n_data)
            in_training = self.etas if self.objective.steps_in_training else []
            if torch.isfinite(loss):
                loss.backward()
            if self.steps.check("weights", loss.detach(), [*self.weights, *in_training]):
                self.optimizer.step()
                if in_training:
                    self._step_hyperparameters()
                total, count = total + loss.item() * len(y), count + len(y)
            else:
                for buffer, kept in zip(self.statistics, statistics, strict=True):
                    buffer.copy_(kept)
            if self.scheduler is not None:
                self.scheduler.step()
        self._zero(self.optimizer, self.eta_optimizer)
        self.losses.append(total / count if count else math.nan)

    def batch(self, data: Any) -> tuple[Any, Tensor]:
        device = self.weights[0].device
        if isinstance(data, MutableMapping):
            return data, data[self.curvature.dict_key_y].to(device, non_blocking=True)
        x, y = data
        return x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    @staticmethod
    def _zero(*optimizers: torch.optim.Optimizer | None) -> None:
        for optimizer in optimizers:
            if optimizer is not None:
                optimizer.zero_grad()

    def _step_hyperparameters(self) -> None:
        self.eta_optimizer.step()
        for module in self.model.modules():
            if isinstance(module, Hyperparameterised):
                module.project_()

    # Evidence.

    def rehearse(self) -> None:
        """Estimate the evidence of two examples, so that what cannot work fails before hours of training."""
        with torch.random.fork_rng(devices=[]):
            data = next(iter(self.marglik_loader))
            few = data if isinstance(data, MutableMapping) else [part[:2] for part in data]
            la = self.curvature.laplace(self.model, self.priors)
            la.fit(OneBatch(few))
            evidence = la.log_marginal_likelihood(self.priors.precision.detach())
        if self.by_evidence and not evidence.requires_grad:
            raise ValueError(
                f"the evidence of backend {self.curvature.backend.__name__} has no gradient with respect to "
                f"{', '.join(self.named)}; use backend=AugmentedGGN, or requires_grad_(False) for what is not to be learnt"
            )

    def estimate(self) -> Record:
        """Estimate the evidence; step priors and noise on one decomposition, then hyperparameters by a pass of their own."""
        record: Record = {}
        for _ in range(self.schedule.rounds):
            try:
                la, share = self._fit()
            except torch.linalg.LinAlgError as error:
                self.steps.bad("priors", str(error))
                continue
            curvature, loss = la.H, la.loss
            if self.by_evidence:
                la.H, la.loss = curvature.detach(), loss.detach()
            for _ in range(self.schedule.prior_steps):
                if not self._step_priors(la):
                    break  # the other steps would see the same
            la.H, la.loss = curvature, loss
            precision, noise = self.priors.precision.detach(), self.priors.noise
            evidence = la.log_marginal_likelihood(
                precision, None if noise is None else noise.detach()
            )
            record = self._describe(la, evidence) | self._hyperparameters()
            if not self.schedule.prior_steps and torch.isfinite(evidence):
                self.margliks.append(-evidence.item())
            self._keep_best(evidence.item())
            if self.by_evidence:
                self._zero(self.eta_optimizer)
                if torch.isfinite(evidence):
                    (-evidence).backward()
                    for eta in self.etas:
                        eta.grad = eta.grad / share if eta.grad is not None else None
                if self.steps.check("hyperparameters", evidence.detach(), self.etas):
                    self._step_hyperparameters()
                self._zero(self.eta_optimizer)
        return record

    def _fit(self) -> tuple[BaseLaplace, float]:
        """Fit Laplace and return it with the share of batches that hyperparameters will be differentiated in."""
        la = self.curvature.laplace(self.model, self.priors)
        n_batches = len(self.marglik_loader)
        if not self.by_evidence:
            chosen = set()
        elif self.n_hyper_batches is None or self.n_hyper_batches >= n_batches:
            chosen = set(range(n_batches))
        else:
            device = None if self.generator is None else self.generator.device
            order = torch.randperm(n_batches, generator=self.generator, device=device)
            chosen = set(order[: self.n_hyper_batches].tolist())
        try:
            la.fit(PartlyDifferentiable(self.marglik_loader, self.etas, chosen))
        finally:
            for eta in self.etas:
                eta.requires_grad_()
        return la, len(chosen) / n_batches

    def _step_priors(self, la: BaseLaplace) -> bool:
        self._zero(self.priors.optimizer)
        objective = -la.log_marginal_likelihood(self.priors.precision, self.priors.noise)
        if torch.isfinite(objective):
            objective.backward()
        good = self.steps.check("priors", objective.detach(), self.priors.learnt)
        if good:
            self.priors.optimizer.step()
            self.margliks.append(objective.item())
        return good

    def _describe(self, la: BaseLaplace, evidence: Tensor) -> Record:
        terms = {"evidence": evidence, **{name: getattr(la, name) for name in TERMS}}
        return {name: _finite(value.item()) for name, value in terms.items()}

    def _hyperparameters(self) -> Record:
        augmentations = {n: m for n, m in self.model.named_modules() if isinstance(m, Augmentation)}
        return {
            "hyperparameters": {name: tensor.tolist() for name, tensor in self.named.items()},
            "ranges": {name: module.magnitudes() for name, module in _outermost(augmentations)},
        }

    def _keep_best(self, evidence: float) -> None:
        if math.isfinite(evidence) and evidence > self.best.get("evidence", -math.inf):
            self.keep(evidence)
            logger.info("epoch %d: log evidence %.2f, the best so far", self.epoch, evidence)

    def keep(self, evidence: float | None) -> None:
        """Remember weights, hyperparameters and priors as they are now."""
        state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.best = {
            "evidence": evidence,
            "epoch": self.epoch,
            "model": state,
            "priors": self.priors.values(),
        }

    # Reports.

    @torch.no_grad()
    def validate(self, loader: DataLoader) -> dict[str, float]:
        """Return accuracy and mean negative log likelihood, or the mean squared error, on other data.

        Even a loader that does not shuffle draws from torch's generator; what is only reported must not change the run.
        """
        with torch.random.fork_rng(devices=[]):
            return self._validate(loader)

    def _validate(self, loader: DataLoader) -> dict[str, float]:
        self.model.eval()
        totals: dict[str, float] = {}
        n = 0
        for data in loader:
            x, y = self.batch(data)
            outputs = self.model(x)
            values = {"loss": self.criterion(outputs, y)}
            if self.curvature.likelihood == "classification":
                values["accuracy"] = (outputs.argmax(-1) == y).double().mean()
            for name, value in values.items():
                totals[name] = totals.get(name, 0.0) + value.item() * len(y)
            n += len(y)
        return {name: total / n for name, total in totals.items()}

    def record(
        self, estimate: Record, valid: dict[str, float] | None, seconds: dict[str, float]
    ) -> Record:
        """Return what is known at the end of an epoch."""
        noise = self.priors.noise
        return {
            "epoch": self.epoch,
            "loss": _finite(self.losses[-1]),
            **dict.fromkeys(("evidence", *TERMS)),
            **self._hyperparameters(),
            **estimate,
            "prior_precision": _summary(self.priors.precision),
            "prior_precisions": self.priors.named()
            if len(self.priors.groups) <= MAX_NAMED
            else None,
            "sigma_noise": None if noise is None else noise.item(),
            "valid": None
            if valid is None
            else {name: _finite(value) for name, value in valid.items()},
            "skipped": dict(self.steps.skipped),
            "seconds": seconds,
        }

    # Checkpoints.

    def signature(self) -> dict[str, Any]:
        """Return what must agree between the run that wrote a checkpoint and the one that reads it."""
        return {
            "tensors of the model": {
                n: f"{list(v.shape)} {v.dtype}" for n, v in self.model.state_dict().items()
            },
            "learnt hyperparameters": list(self.named),
            "number of training examples": self.n_data,
            "likelihood": self.curvature.likelihood,
            "hessian_structure": self.curvature.hessian_structure,
            "backend": self.curvature.backend.__name__,
            "number of prior precisions": self.priors.log_precision.numel(),
            "groups of prior precisions": self.priors.grouping,
            "optimizer": type(self.optimizer).__name__,
            "scheduler": type(self.scheduler).__name__,
            "objective": repr(self.objective),
            **self.settings,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "signature": self.signature(),
            "epoch": self.epoch,
            "model": self.model.state_dict(),
            "priors": self.priors.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "eta_optimizer": None
            if self.eta_optimizer is None
            else self.eta_optimizer.state_dict(),
            "best": self.best,
            "losses": self.losses,
            "margliks": self.margliks,
            "history": self.history,
            "skipped": self.steps.skipped,
            "in_a_row": self.steps.in_a_row,
        }

    def check_state_dict(self, state: dict[str, Any], path: Path) -> None:
        """Refuse the state of another run, before anything is changed."""
        theirs, ours = state["signature"], self.signature()
        for key, value in ours.items():
            if theirs.get(key) != value:
                raise ValueError(
                    f"{path} was written by another run: its {key} {_difference(theirs.get(key), value)}; nothing was changed"
                )
        if state["epoch"] > self.schedule.n_epochs:
            raise ValueError(
                f"{path} is at epoch {state['epoch']}, but n_epochs is {self.schedule.n_epochs}; nothing was changed"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.priors.load_state_dict(state["priors"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.eta_optimizer is not None:
            self.eta_optimizer.load_state_dict(state["eta_optimizer"])
        self.epoch, self.best = state["epoch"], state["best"]
        self.losses, self.margliks, self.history = (
            state["losses"],
            state["margliks"],
            state["history"],
        )
        self.steps.skipped, self.steps.in_a_row = state["skipped"], state["in_a_row"]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def _summary(precision: Tensor) -> list[float]:
    """Return prior precisions; of one per weight only minimum, median and maximum."""
    values = precision.detach()
    return (
        values
        if len(values) <= 1000
        else torch.stack([values.min(), values.median(), values.max()])
    ).tolist()


def _outermost(modules: dict[str, Augmentation]) -> list[tuple[str, Augmentation]]:
    """Return those that are not parts of others, whose ranges have them."""
    return [
        (n, m)
        for n, m in modules.items()
        if not any(n != o and n.startswith(f"{o}.") for o in modules)
    ]


def _difference(theirs: Any, ours: Any) -> str:
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        return f"is {theirs!r} there and {ours!r} here"
    name = next(n for n in [*ours, *theirs] if ours.get(n) != theirs.get(n))
    return f"differ: {name} is {theirs.get(name, 'missing')} there and {ours.get(name, 'missing')} here"
