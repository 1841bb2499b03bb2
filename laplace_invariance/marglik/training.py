"""Train a network, its priors and its invariances together, in one call."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from laplace.baselaplace import BaseLaplace
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.curvature.names import AnyBackend, find_backend
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.marglik.checkpoints import Journal
from laplace_invariance.marglik.checks import check_data, check_search
from laplace_invariance.marglik.estimators import Estimator, chosen_estimator
from laplace_invariance.marglik.loop import Trainer
from laplace_invariance.marglik.objectives import Objective, evidence_unless_given
from laplace_invariance.marglik.randomness import RandomStates
from laplace_invariance.marglik.ranks import present_ranks, unwrapped, whole_loader
from laplace_invariance.marglik.search import (
    Search,
    SearchResult,
    epochs_to_compare,
    train_and_compare,
)
from laplace_invariance.marglik.settings import (
    Callback,
    DataSettings,
    EvidenceSettings,
    HyperparameterSettings,
    OptimizerSettings,
    OutputSettings,
    PriorSettings,
    Record,
    Schedule,
    Settings,
)
from laplace_invariance.precision import without_autocast

__all__ = ["Result", "marglik_training"]

FAR_FROM_A_MODE = 0.1  # nats per example that a Newton step would gain


@dataclass(repr=False)
class Result:
    """Result of training; unpacks to ``la, model, margliks, losses`` as that of laplace does.

    Attributes:
        la: Laplace approximation of the model, with all directions of the loss Hessian (or, of more
            than 33 classes, an estimate from 64), fitted to the training data.
        model: The model, with the weights and hyperparameters that the estimator chose: of the best
            estimate (``Refit``) or the last ones.
        evidence: Log evidence of ``la``, less its bias if directions are sampled. Its draws are the
            same in all runs, so that evidences with the same number of samples can be compared.
        evidence_error: Standard error of the evidence; 0 if it is exact.
        n_samples: Numbers of samples that outputs are averaged over, by name of the module; an
            evidence with more samples is higher.
        margliks: Negative log marginal likelihoods, one per estimate; with ``Refit``, one per step
            on prior precisions, if there are any.
        losses: Mean training loss of every epoch, with the prior's term.
        history: One record per epoch: ``epoch`` and ``loss``; ``evidence`` and its terms,
            ``log_likelihood - 0.5 * (log_det_ratio + scatter)``, and ``newton_decrement``, by how
            much a Newton step on the weights would raise their log posterior, from the gradients of
            that epoch; all None where nothing was estimated;
            ``prior_precision``, ``prior_precisions`` (None if more than 200), ``sigma_noise``,
            ``hyperparameters`` and ``ranges`` (magnitudes) that it is the evidence of; ``valid``,
            ``skipped`` (steps so far that were not finite) and ``seconds``.
        hyperparameters: Hyperparameters of the model, by name.
        prior_precision: Prior precision, as laplace takes it: one, or one per tensor or
            parameter.
        prior_precisions: The same by name of what shares it: ``"all"``, a tensor, a path, or
            ``"pattern (captured texts)"``; empty for ``"diag"``.
        sigma_noise: Observation noise; None for classification.
        best_epoch: Epoch that the model is of.
        skipped: Number of steps that were skipped because something was not finite, by kind.
        newton_decrement: By how much a Newton step on the weights would raise their log posterior,
            which a Laplace approximation takes for a mode, where it is zero.
        search: What a search tried, and by how much it lost; None without a search.
    """

    la: BaseLaplace
    model: nn.Module
    evidence: float
    evidence_error: float
    n_samples: dict[str, int]
    margliks: list[float]
    losses: list[float]
    history: list[Record]
    hyperparameters: dict[str, Tensor]
    prior_precision: Tensor
    prior_precisions: dict[str, float]
    sigma_noise: Tensor | None
    best_epoch: int
    skipped: dict[str, int]
    newton_decrement: float
    search: SearchResult | None = None

    def __repr__(self) -> str:
        return (
            f"Result(epochs={len(self.history)}, best_epoch={self.best_epoch}, "
            f"evidence={self.evidence}, skipped={self.skipped})"
        )

    def __iter__(self) -> Iterator[Any]:
        return iter((self.la, self.model, self.margliks, self.losses))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int | slice) -> Any:
        return (self.la, self.model, self.margliks, self.losses)[index]


def marglik_training(
    model: nn.Module,
    train_loader: DataLoader,
    likelihood: str = "classification",
    hessian_structure: str = "kron",
    backend: AnyBackend = AugmentedGGN,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.Adam,
    optimizer_kwargs: dict[str, Any] | None = None,
    scheduler_cls: type[LRScheduler] | None = None,
    scheduler_kwargs: dict[str, Any] | None = None,
    n_epochs: int = 300,
    lr_hyp: float = 1e-1,
    prior_structure: str | Sequence[str] = "layerwise",
    n_epochs_burnin: int = 0,
    n_hypersteps: int = 10,
    marglik_frequency: int = 1,
    prior_prec_init: float | Mapping[str, float] = 1.0,
    sigma_noise_init: float = 1.0,
    temperature: float = 1.0,
    fix_sigma_noise: bool = False,
    progress_bar: bool = False,
    enable_backprop: bool = False,
    dict_key_x: str = "input_ids",
    dict_key_y: str = "labels",
    *,
    estimator: str | Estimator | None = None,
    subset_of_weights: str = "all",
    backend_kwargs: dict[str, Any] | None = None,
    objective: Objective | None = None,
    search: bool | Search | None = None,
    lr_aug: float | None = None,
    lr_aug_min: float | None = None,
    marglik_loader: DataLoader | None = None,
    marglik_batch_size: int | None = None,
    n_hypersteps_prior: int | None = None,
    valid_loader: DataLoader | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | Path | None = None,
    resume: bool = False,
    history: str | Path | None = None,
    max_bad_steps: int = 10,
) -> Result:
    """Train weights by the loss, and priors, noise and hyperparameters by the evidence.

    Every positional argument is that of ``laplace.marglik_training`` and has the same meaning; on a
    model without hyperparameters the two take the same steps. Hyperparameters (those of
    :func:`~laplace_invariance.named_hyperparameters` that require grad) take steps by Adam, when
    and from what depends on the ``estimator``. Whenever the evidence is estimated, prior precisions
    and noise go to their optimum on that decomposition of the curvature, or take ``n_hypersteps``
    towards it, as in laplace, with ``Refit``. A step whose
    objective or gradient is not finite is skipped, counted and logged. Inside of ``torch.autocast``
    the training loss is computed with it, and everything else without.

    Args:
        model: Network with outputs ``[batch, outputs]``, such as an ``InvariantModel``.
        train_loader: Loader of the training data, whose ``.dataset`` has a length.
        likelihood: Either ``"classification"`` or ``"regression"``.
        hessian_structure: Structure of the curvature: ``"kron"``, ``"diag"`` or ``"full"``.
        backend: Class of a curvature backend, or the name of one of ours: ``"ggn"``, ``"ef"``,
            ``"backpack-ggn"``, ``"backpack-ef"``, ``"asdl-ggn"`` or ``"asdl-ef"``. Hyperparameters
            need one of :mod:`laplace_invariance.curvature`.
        optimizer_cls: Optimiser of the weights, any class of ``torch.optim`` but ``LBFGS``.
        optimizer_kwargs: Arguments of the optimiser, such as ``{"lr": 1e-3}``. Weight decay is set
            to 0, because the prior replaces it.
        scheduler_cls: Scheduler of the optimiser's step size, stepped after every batch.
        scheduler_kwargs: Arguments of the scheduler.
        n_epochs: Number of epochs.
        lr_hyp: Step size of these steps, by Adam, in log prior precisions and log noise.
        prior_structure: What shares a prior precision. As in laplace, ``"scalar"`` is one for all,
            ``"layerwise"`` one per tensor, ``"diag"`` one per parameter. ``"path"`` is one per path
            of every :class:`~laplace_invariance.layers.ResidualPathway` (of the innermost, if they
            are nested) and one per tensor elsewhere. A list of regular expressions is one for all
            tensors whose whole name, as in ``model.named_parameters()``, is matched by the same
            pattern, the first that does, with the same captured texts; tensors that none matches
            have their own. ``[r".*bias"]`` is one for all biases, ``[r"(.*)\\.f_fc\\..*"]`` one for
            every module ``f_fc``.
        n_epochs_burnin: Epoch before which the evidence is not estimated.
        n_hypersteps: Number of steps on prior precisions and noise per estimate of ``Refit``; with
            ``n_hypersteps_prior``, the number of rounds. With 0, priors keep their initial values
            whatever estimates.
        marglik_frequency: Number of epochs from one estimate of the evidence to the next.
        prior_prec_init: Initial prior precision of all, or by regular expression as in
            ``prior_structure`` and 1 for the rest: ``{r".*\\.f_fc\\..*": 1e3}`` starts with free
            paths nearly switched off.
        sigma_noise_init: Initial standard deviation of the observation noise of a regression.
        temperature: Factor of the log likelihood in the evidence.
        fix_sigma_noise: Whether the noise keeps its initial value.
        progress_bar: Whether to show a progress bar.
        enable_backprop: Whether the predictions of the returned Laplace approximation can be
            differentiated.
        dict_key_x: Key of the inputs, if the loader yields mappings.
        dict_key_y: Key of the targets, if the loader yields mappings.
        estimator: How the evidence is estimated: ``"running"``, ``"refit"`` or ``"kernel"``, or an
            object of :mod:`laplace_invariance.marglik.estimators` with other options. None is
            ``"running"``, the cheapest, where hyperparameters are learnt by the evidence, and
            ``"refit"``, as in laplace, elsewhere.
        subset_of_weights: Weights that the Laplace approximation is of: ``"all"`` or
            ``"last_layer"``. The prior of other weights keeps its initial precision then.
        backend_kwargs: Options of the backend, such as ``{"stochastic": True}``, for estimates
            during training; for the returned approximation see :class:`Result`.
        objective: Objective by which hyperparameters are learnt; None is
            :class:`~laplace_invariance.marglik.Evidence`.
        search: Where ranges start: None or False is where the model has them; True, or an object
            :class:`~laplace_invariance.marglik.Search` with other options, tries many in short
            trainings first, and starts from those with the highest evidence.
            Its cost is about that of 1,600 steps on the weights, for six ranges. Of a model without
            ranges it tries how far the free paths of its layers (``ResidualPathway``) are open at
            the start.
        lr_aug: Step size of hyperparameters in the first epoch. None is 0.3, large, so that ranges
            open before the weights have settled for narrow ones.
        lr_aug_min: Step size at which half a cosine over the epochs ends; None is a hundredth of
            ``lr_aug``.
        marglik_loader: Batches for the evidence, with the same examples; None is the training
            loader.
        marglik_batch_size: Size of these batches, instead of a loader; larger is faster, memory
            permitting.
        n_hypersteps_prior: If given, an estimate of ``Refit`` consists of ``n_hypersteps`` rounds,
            each of which fits the curvature, takes this number of steps on priors and noise, and
            one on hyperparameters. None is one round with ``n_hypersteps`` steps on priors.
        valid_loader: Data on which loss and accuracy are reported whenever the evidence is
            estimated. It is only reported: nothing is chosen by it.
        callbacks: Functions called after every epoch as ``callback(record, model)``, with the
            record that is added to the history. After a search they are called with learnt ranges
            until it is decided whether these stay; if not, the history gets other records.
        checkpoint: File that is rewritten, atomically, after every epoch, or after several where
            writing would take more than 2 % of the time. It must not exist unless ``resume``.
        resume: Whether to resume from ``checkpoint`` if it exists. The result is that of a run
            which was never interrupted, bit for bit, if model, loaders and arguments are made as
            before; a larger ``n_epochs`` trains for longer.
        history: File to which every record is appended as a line of JSON. It must not exist unless
            ``resume``.
        max_bad_steps: Number of skipped steps of one kind in a row after which training ends.

    Returns:
        Weights, hyperparameters, priors and Laplace approximation with its evidence, and the
        history of the run.

    Raises:
        TypeError: If an argument is of the wrong kind; nothing was trained or written then.
        ValueError: If arguments make no sense, alone or together; nothing was trained or written.
        BlockingIOError: If another run uses ``checkpoint`` or ``history``.
        FileExistsError: If ``checkpoint`` or ``history`` exists and is not resumed from.
        FloatingPointError: If ``max_bad_steps`` steps in a row were not finite, or the evidence of
            the result is not.
        RuntimeError: If ``torch.no_grad()`` or ``torch.inference_mode()`` is around the call.
    """
    ranks = present_ranks()
    model = unwrapped(model)
    ranks.equal([*model.parameters(), *model.buffers()])
    loaders = [
        whole_loader(loader, ranks) for loader in (train_loader, marglik_loader, valid_loader)
    ]
    learnt_by = evidence_unless_given(objective)
    chosen = chosen_estimator(estimator, model, learnt_by)
    settings = Settings(
        DataSettings(
            loaders[0], loaders[1], marglik_batch_size, loaders[2], dict_key_x, dict_key_y
        ),
        OptimizerSettings(
            optimizer_cls, optimizer_kwargs, scheduler_cls, scheduler_kwargs, max_bad_steps
        ),
        EvidenceSettings(
            likelihood,
            chosen,
            subset_of_weights,
            hessian_structure,
            find_backend(backend),
            backend_kwargs,
            temperature,
            enable_backprop,
        ),
        PriorSettings(prior_structure, prior_prec_init, sigma_noise_init, fix_sigma_noise, lr_hyp),
        HyperparameterSettings(learnt_by, lr_aug, lr_aug_min, _chosen_search(search)),
        Schedule(n_epochs, n_epochs_burnin, marglik_frequency, n_hypersteps, n_hypersteps_prior),
        OutputSettings(checkpoint, resume, history, callbacks, progress_bar),
        ranks,
    )
    for message in settings.without_effect():
        warnings.warn(message, stacklevel=2)
    with without_autocast():
        trainer = Trainer(model, settings)
        chosen_search = settings.hyperparameters.search
        if chosen_search is not None:
            check_search(model, settings)
        check_data(model, settings)
        trainer.estimator.rehearse()
        loaders.append(settings.data.evidence_loader)
        random_states = RandomStates(model, loaders, [getattr(chosen, "generator", None)])
        with Journal(trainer, random_states, settings.output, ranks) as journal:
            if chosen_search is not None:
                _search(chosen_search, trainer, random_states, journal)
            trainer.train(journal, random_states)
        return _finite_result(trainer)


def _chosen_search(search: bool | Search | None) -> Search | None:
    if search is None or isinstance(search, Search):
        return search
    if not isinstance(search, bool):
        raise TypeError(f"search must be True, False, None or a Search, got {search!r}")
    return Search() if search else None


def _search(
    search: Search, trainer: Trainer, random_states: RandomStates, journal: Journal
) -> None:
    """Search for a start, and compare it with what gradient steps make of it, unless known."""
    if trainer.search["result"] is None:
        found = _found(search, trainer, random_states, journal)
        trainer.search["result"] = found.state_dict()
        journal.save()
    epochs = epochs_to_compare(trainer, search.held)
    found = trainer.search["result"]
    if epochs and found["comparison"] is None:
        compared = train_and_compare(trainer, random_states, journal, epochs)
        found["comparison"] = vars(compared)
        journal.rewrite()


def _found(
    search: Search, trainer: Trainer, random_states: RandomStates, journal: Journal
) -> SearchResult:
    """Search for a start, or go on with a search."""
    found = search.run(
        trainer.model,
        trainer.settings,
        random_states,
        trainer.search["trials"],
        journal.save_if_cheap,
        trainer.priors,
    )
    if not found.is_clear:
        warnings.warn(
            "no candidate of the search was better than guessing; its choice means little: train "
            "longer before candidates are compared, by Search(n_steps=...)",
            stacklevel=4,
        )
    return found


def _finite_result(trainer: Trainer) -> Result:
    """Return the result; raise FloatingPointError if its evidence is not finite."""
    try:
        result = _result(trainer)
    except (FloatingPointError, torch.linalg.LinAlgError) as error:
        reason = str(error)
    else:
        if math.isfinite(result.evidence):
            return result
        reason = f"it is {result.evidence}"
    raise FloatingPointError(
        f"training ended where the evidence is not finite: {reason}; take smaller steps, by "
        "optimizer_kwargs={'lr': ...} and lr_aug"
    )


def _result(trainer: Trainer) -> Result:
    """Return to the state that the estimator chooses, and put together what is known there."""
    final = trainer.estimator.finish(trainer.epoch)
    decrement = final.decrement / trainer.settings.data.n_data
    if decrement > FAR_FROM_A_MODE:
        warnings.warn(
            "the weights are not at a mode, of which the evidence is: judged by slope and "
            f"curvature, the log posterior could rise by {decrement:.2f} nats per example; train "
            "for longer, or let the step size fall to zero",
            stacklevel=4,
        )
    noise = trainer.priors.noise
    named = trainer.hyperparameters.named
    found = trainer.search["result"]
    return Result(
        la=final.la,
        model=trainer.model,
        evidence=final.evidence,
        evidence_error=final.error,
        n_samples=_numbers_of_samples(trainer.model),
        margliks=trainer.estimator.margliks,
        losses=trainer.losses,
        history=trainer.history,
        hyperparameters={name: tensor.detach().clone() for name, tensor in named.items()},
        prior_precision=trainer.priors.precision.detach(),
        prior_precisions=trainer.priors.named(),
        sigma_noise=None if noise is None else noise.detach(),
        best_epoch=final.epoch,
        skipped=dict(trainer.guard.skipped),
        newton_decrement=final.decrement,
        search=None if found is None else SearchResult.from_state_dict(found),
    )


def _numbers_of_samples(model: nn.Module) -> dict[str, int]:
    """Return the number of samples of every averaging model inside, by its name."""
    averages = {n: m for n, m in model.named_modules() if isinstance(m, InvariantModel)}
    return {name: m.augmentation.count(m.n_samples) for name, m in averages.items()}
