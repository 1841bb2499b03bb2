"""Settings of a training run, in groups that check themselves when they are made.

Fields have the names and the meaning of the arguments of
:func:`~laplace_invariance.marglik_training`, which describes every one of them.
"""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from laplace.curvature.curvature import CurvatureInterface
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from laplace_invariance.marglik.loaders import (
    batch_size_of,
    batches_in_words,
    check_every_example,
    check_loader,
    drops_last,
    in_order,
    n_examples,
)
from laplace_invariance.marglik.objectives import Objective
from laplace_invariance.marglik.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from laplace_invariance.marglik.estimators import Estimator
    from laplace_invariance.marglik.search import Search

__all__ = [
    "Callback",
    "DataSettings",
    "EvidenceSettings",
    "HyperparameterSettings",
    "OptimizerSettings",
    "OutputSettings",
    "PriorSettings",
    "Record",
    "Schedule",
    "Settings",
    "check_numbers",
]

SUBSETS = ("all", "last_layer")
STRUCTURES = ("kron", "diag", "full")
LR_AUG = 0.3

Record = dict[str, Any]
Callback = Callable[[Record, nn.Module], object]


def check_numbers(
    settings: object, *names: str, least: float | None = None, whole: bool = False
) -> None:
    """Raise unless numbers are finite, and positive or at least ``least``; None passes.

    Args:
        settings: Object with the numbers.
        names: Names of its attributes to check.
        least: Smallest number that is allowed; None is any above zero.
        whole: Whether numbers must be whole.

    Raises:
        TypeError: If a value is no number.
        ValueError: If a number is none of these.
    """
    wanted = "positive and finite" if least is None else f"finite and at least {least}"
    if whole:
        wanted += " and whole"
    for name in names:
        value: Any = getattr(settings, name)
        if value is None:
            continue
        is_number: bool = isinstance(value, numbers.Real | torch.Tensor)
        if not is_number:
            raise TypeError(f"{name} must be {wanted}, got {value!r}")
        enough = value > 0 if least is None else value >= least
        if not enough or not math.isfinite(value):
            raise ValueError(f"{name} must be {wanted}, got {value}")
        if whole and not isinstance(value, numbers.Integral):
            raise ValueError(f"{name} must be {wanted}, an integer, got {value}")


def _text(value: object) -> str:
    """Return the text of a value without addresses, which differ from process to process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


@dataclass(frozen=True)
class DataSettings:
    """Training data, how they are batched for the evidence, and validation data."""

    train_loader: DataLoader
    marglik_loader: DataLoader | None
    marglik_batch_size: int | None
    valid_loader: DataLoader | None
    dict_key_x: str
    dict_key_y: str

    def __post_init__(self) -> None:
        check_numbers(self, "marglik_batch_size", whole=True)
        n_train = check_loader("train_loader", self.train_loader)
        if self.valid_loader is not None:
            check_loader("valid_loader", self.valid_loader)
        if self.marglik_loader is not None and self.marglik_batch_size is not None:
            raise ValueError("give marglik_loader or marglik_batch_size, not both")
        n_evidence = check_loader("marglik_loader", self.evidence_loader)
        if n_evidence != n_train:
            raise ValueError(
                f"marglik_loader has {n_evidence} examples and train_loader {n_train}: the "
                "evidence is that of the training data; estimator='running' saves time"
            )

    def example(self) -> Any:
        """Return the inputs of the first batch; the state of torch's generator is restored."""
        with torch.random.fork_rng(devices=[]):
            data = next(iter(self.evidence_loader))
        return data if isinstance(data, MutableMapping) else data[0]

    @property
    def n_data(self) -> int:
        """Number of training examples."""
        return n_examples(self.train_loader)

    @cached_property
    def evidence_loader(self) -> DataLoader:
        """Batches with every example, as the evidence is that of all of them."""
        loader = self.train_loader if self.marglik_loader is None else self.marglik_loader
        check_every_example(loader)
        batch_size = self.marglik_batch_size
        if batch_size is None and not drops_last(loader):
            return loader
        return in_order(loader, batch_size_of(loader) if batch_size is None else batch_size)

    @property
    def ordered_loader(self) -> DataLoader:
        """The same batches in the order of the data, so that every run draws alike for an example.

        A loader without a batch size of its own is returned as it is.
        """
        loader = self.evidence_loader
        if not isinstance(loader, DataLoader) or batch_size_of(loader) is None:
            return loader
        return in_order(loader, batch_size_of(loader))


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimiser of the weights, scheduler of its step size, and limit of bad steps in a row."""

    optimizer_cls: type[torch.optim.Optimizer]
    optimizer_kwargs: dict[str, Any] | None
    scheduler_cls: type[LRScheduler] | None
    scheduler_kwargs: dict[str, Any] | None
    max_bad_steps: int

    def __post_init__(self) -> None:
        check_numbers(self, "max_bad_steps", whole=True)
        if issubclass(self.optimizer_cls, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS evaluates the loss several times per step, which is not supported; "
                "choose another optimizer_cls"
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the optimiser, without weight decay, which the prior replaces."""
        arguments = dict(self.optimizer_kwargs or {})
        if "weight_decay" in inspect.signature(self.optimizer_cls).parameters:
            arguments["weight_decay"] = 0.0
        return arguments

    def build(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
        """Make the optimiser of a model's weights, and its scheduler if there is to be one."""
        optimizer = self.optimizer_cls(model.parameters(), **self.arguments)
        if self.scheduler_cls is None:
            return optimizer, None
        return optimizer, self.scheduler_cls(optimizer, **(self.scheduler_kwargs or {}))


@dataclass(frozen=True)
class EvidenceSettings:
    """Likelihood, Laplace approximation and estimator of its evidence."""

    likelihood: str
    estimator: Estimator
    subset_of_weights: str
    hessian_structure: str
    backend: type[CurvatureInterface]
    backend_kwargs: dict[str, Any] | None
    temperature: float
    enable_backprop: bool

    def __post_init__(self) -> None:
        if self.likelihood not in ("classification", "regression"):
            raise ValueError(
                f"likelihood must be 'classification' or 'regression', got {self.likelihood!r}"
            )
        for name, choices in {
            "subset_of_weights": SUBSETS,
            "hessian_structure": STRUCTURES,
        }.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        check_numbers(self, "temperature")

    @property
    def is_regression(self) -> bool:
        """Whether outputs are compared with targets by the squared error, with learnt noise."""
        return self.likelihood == "regression"


@dataclass(frozen=True)
class PriorSettings:
    """Prior precisions and observation noise, and the step size with which they are learnt."""

    prior_structure: str | Sequence[str]
    prior_prec_init: float | Mapping[str, float]
    sigma_noise_init: float
    fix_sigma_noise: bool
    lr_hyp: float

    def __post_init__(self) -> None:
        check_numbers(self, "sigma_noise_init", "lr_hyp")
        if not isinstance(self.prior_prec_init, Mapping):  # priors check those by pattern
            check_numbers(self, "prior_prec_init")


@dataclass(frozen=True)
class HyperparameterSettings:
    """By what hyperparameters are learnt, with which step size, and from where."""

    objective: Objective
    lr_aug: float | None
    lr_aug_min: float | None
    search: Search | None

    def __post_init__(self) -> None:
        check_numbers(self, "lr_aug")
        check_numbers(self, "lr_aug_min", least=0)
        by_evidence = self.objective.estimates and not self.objective.steps_in_training
        if self.search is not None and not by_evidence:
            raise ValueError(
                f"a search compares evidences, by which {self.objective!r} learns nothing; "
                "leave out search="
            )

    @property
    def first_rate(self) -> float:
        """Step size in the first epoch."""
        if self.lr_aug is not None:
            return self.lr_aug
        return LR_AUG

    def rate(self, epoch: int, n_epochs: int) -> float:
        """Return the step size in an epoch, from 1: half a cosine over all epochs."""
        first = self.first_rate
        lowest = first / 100 if self.lr_aug_min is None else self.lr_aug_min
        share = (1 + math.cos(math.pi * (epoch - 1) / n_epochs)) / 2
        return lowest + (first - lowest) * share


@dataclass(frozen=True)
class Schedule:
    """Number of epochs, when the evidence is estimated, and how many steps an estimate takes."""

    n_epochs: int
    n_epochs_burnin: int
    marglik_frequency: int
    n_hypersteps: int
    n_hypersteps_prior: int | None

    def __post_init__(self) -> None:
        check_numbers(self, "n_epochs", "marglik_frequency", whole=True)
        not_negative = ("n_epochs_burnin", "n_hypersteps", "n_hypersteps_prior")
        check_numbers(self, *not_negative, least=0, whole=True)
        if self.n_hypersteps_prior is not None and self.n_hypersteps == 0:
            raise ValueError(
                "with n_hypersteps_prior, n_hypersteps is the number of rounds "
                "and must be positive, got 0"
            )

    def due(self, epoch: int) -> bool:
        """Return whether the evidence is estimated after an epoch, which count from 1."""
        return epoch % self.marglik_frequency == 0 and epoch >= self.n_epochs_burnin

    @property
    def rounds(self) -> int:
        """Number of fits of the curvature per estimate."""
        return 1 if self.n_hypersteps_prior is None else self.n_hypersteps

    @property
    def prior_steps(self) -> int:
        """Number of steps on priors and noise per fit of the curvature."""
        return self.n_hypersteps if self.n_hypersteps_prior is None else self.n_hypersteps_prior


@dataclass(frozen=True)
class OutputSettings:
    """What is written, called and shown while training."""

    checkpoint: str | Path | None
    resume: bool
    history: str | Path | None
    callbacks: Sequence[Callback]
    progress_bar: bool

    def __post_init__(self) -> None:
        if self.resume and self.checkpoint is None:
            raise ValueError("resume=True needs to know the checkpoint=")
        files = [Path(name) for name in (self.checkpoint, self.history) if name is not None]
        if len(set(files)) < len(files):
            raise ValueError(f"checkpoint and history cannot both be {self.checkpoint}")
        if callable(self.callbacks) or not all(map(callable, self.callbacks)):
            raise TypeError(
                "callbacks must be a list of functions, each called as callback(record, model)"
            )


@dataclass(frozen=True)
class Settings:
    """All settings of a run; those that must agree with one another are checked here."""

    data: DataSettings
    optimizer: OptimizerSettings
    evidence: EvidenceSettings
    priors: PriorSettings
    hyperparameters: HyperparameterSettings
    schedule: Schedule
    output: OutputSettings
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        if self.evidence.estimator.sees_training:
            check_every_example(self.data.train_loader)
        loaders = (self.data.train_loader, self.data.evidence_loader)
        persistent = any(getattr(loader, "persistent_workers", False) for loader in loaders)
        if self.output.checkpoint is not None and persistent:
            raise ValueError(
                "persistent_workers=True cannot be resumed: what workers have drawn is not known "
                "here; leave it out"
            )

    def without_effect(self) -> Iterator[str]:
        """Yield a message, for a warning, about every setting that will have no effect."""
        if (self.optimizer.optimizer_kwargs or {}).get("weight_decay"):
            yield "the prior replaces weight decay, which is set to 0"
        schedule = self.schedule
        epochs = range(1, schedule.n_epochs + 1)
        if self.hyperparameters.objective.estimates and not any(map(schedule.due, epochs)):
            yield (
                f"the evidence is never estimated in {schedule.n_epochs} epochs, with "
                f"n_epochs_burnin={schedule.n_epochs_burnin} and marglik_frequency="
                f"{schedule.marglik_frequency}; nothing but weights is learnt"
            )

    def signature(self) -> dict[str, Any]:
        """Return what must agree between a run that wrote a checkpoint and one that resumes it."""
        precision = self.priors.prior_prec_init
        if isinstance(precision, Mapping):
            precision = dict(precision)
        return {
            "likelihood": self.evidence.likelihood,
            "hessian_structure": self.evidence.hessian_structure,
            "backend": self.evidence.backend.__name__,
            "objective": repr(self.hyperparameters.objective),
            "optimizer_kwargs": repr(self.optimizer.arguments),
            "scheduler_kwargs": _text(self.optimizer.scheduler_kwargs),
            "batches of training": batches_in_words(self.data.train_loader),
            "batches of the evidence": batches_in_words(self.data.evidence_loader),
            "backend_kwargs": repr(self.evidence.backend_kwargs),
            "temperature": self.evidence.temperature,
            "prior_prec_init": repr(precision),
            "sigma_noise_init": self.priors.sigma_noise_init,
            "fix_sigma_noise": bool(self.priors.fix_sigma_noise),
            "lr_hyp": self.priors.lr_hyp,
            "lr_aug": (self.hyperparameters.first_rate, self.hyperparameters.lr_aug_min),
            "search": repr(self.hyperparameters.search),
            "n_hypersteps": (self.schedule.n_hypersteps, self.schedule.n_hypersteps_prior),
            "marglik_frequency": self.schedule.marglik_frequency,
            "n_epochs_burnin": self.schedule.n_epochs_burnin,
            "estimator": repr(self.evidence.estimator),
            "subset_of_weights": self.evidence.subset_of_weights,
        }
