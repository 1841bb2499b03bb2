"""The evidence of a trained network as it is, with priors at their optimum."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.curvature.names import AnyBackend, find_backend
from laplace_invariance.invariant import averaging_over
from laplace_invariance.marglik.approximation import constant, learnt_hyperparameters
from laplace_invariance.marglik.estimators import Refit
from laplace_invariance.marglik.loop import Trainer
from laplace_invariance.marglik.objectives import Evidence
from laplace_invariance.marglik.settings import (
    DataSettings,
    EvidenceSettings,
    HyperparameterSettings,
    OptimizerSettings,
    OutputSettings,
    PriorSettings,
    Schedule,
    Settings,
)
from laplace_invariance.modes import evaluation
from laplace_invariance.precision import without_autocast

__all__ = ["check_options", "log_evidence", "settings_of_evidence"]


def log_evidence(
    model: nn.Module,
    loader: DataLoader,
    likelihood: str = "classification",
    *,
    n_samples: int | None = None,
    **options: Any,
) -> float:
    """Return the log evidence of a trained network, with the best priors for its weights.

    Nothing is trained, and the model stays as it is. Draws are the same in all calls, so that the
    evidences of two networks, or of one network at other ranges, can be compared at an equal number
    of samples.

    Args:
        model: Network with outputs ``[batch, outputs]``, such as an ``InvariantModel``.
        loader: Loader of the data that it was trained on.
        likelihood: Either ``"classification"`` or ``"regression"``.
        n_samples: Number of samples that outputs are averaged over; None is that of the model.
        **options: ``hessian_structure``, ``backend``, ``backend_kwargs``, ``prior_structure``,
            ``subset_of_weights`` and ``dict_key_x``, ``dict_key_y``, as for
            :func:`~laplace_invariance.marglik_training`.

    Returns:
        Log evidence of all data; minus infinity if the curvature is not finite.
    """
    settings = settings_of_evidence(loader, likelihood, **options)
    with without_autocast(), constant(learnt_hyperparameters(model)), evaluation(model):
        trainer = Trainer(model, settings)
        trainer.estimator.rehearse()
        with averaging_over(model, lambda present: n_samples or present):
            return trainer.estimator.assess(settings.data.ordered_loader)


def check_options(caller: str, options: Mapping[str, object]) -> None:
    """Raise TypeError unless options are some of those that :func:`settings_of_evidence` takes.

    Args:
        caller: Name of the function that got them.
        options: The options by name.
    """
    parameters = inspect.signature(settings_of_evidence).parameters.values()
    known = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            raise TypeError(
                f"{caller} has no option {name!r}; choose from {', '.join(sorted(known))}"
            )


def settings_of_evidence(
    loader: DataLoader,
    likelihood: str,
    *,
    hessian_structure: str = "kron",
    backend: AnyBackend = AugmentedGGN,
    backend_kwargs: dict[str, Any] | None = None,
    prior_structure: str | Sequence[str] = "layerwise",
    subset_of_weights: str = "all",
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.Adam,
    optimizer_kwargs: dict[str, Any] | None = None,
    dict_key_x: str = "input_ids",
    dict_key_y: str = "labels",
    progress_bar: bool = False,
) -> Settings:
    """Return the settings of a run that learns no hyperparameters; priors go to their optimum."""
    return Settings(
        DataSettings(loader, None, None, None, dict_key_x, dict_key_y),
        OptimizerSettings(optimizer_cls, optimizer_kwargs, None, None, max_bad_steps=10),
        EvidenceSettings(
            likelihood,
            Refit(),
            subset_of_weights,
            hessian_structure,
            find_backend(backend),
            backend_kwargs,
            temperature=1.0,
            enable_backprop=False,
        ),
        PriorSettings(prior_structure, 1.0, 1.0, fix_sigma_noise=False, lr_hyp=0.1),
        HyperparameterSettings(Evidence(), None, None, None),
        Schedule(1, 0, 1, n_hypersteps=1, n_hypersteps_prior=None),
        OutputSettings(None, False, None, (), progress_bar),
    )
