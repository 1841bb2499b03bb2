"""Train a network, its priors and its invariances together: weights by the loss, all else by the evidence."""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tqdm
from laplace.baselaplace import BaseLaplace
from laplace.curvature.curvature import CurvatureInterface
from torch import Tensor, nn
from torch.utils.data import DataLoader

from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.hyper import named_hyperparameters
from laplace_invariance.marglik.checkpoints import Journal, RandomStates
from laplace_invariance.marglik.evidence import Curvature
from laplace_invariance.marglik.objectives import Evidence, Objective
from laplace_invariance.marglik.priors import Priors
from laplace_invariance.marglik.trainer import Record, Run, Schedule

__all__ = ["Result", "marglik_training"]

Callback = Callable[[Record, nn.Module], object]


@dataclass(repr=False)
class Result:
    """What training found; unpacks to ``la, model, margliks, losses`` as that of ``laplace.marglik_training``.

    Attributes:
        la: the Laplace approximation at the best evidence.
        model: the model, with the weights and hyperparameters of the best evidence.
        margliks: negative log marginal likelihoods, one per step on prior precisions, or per estimate if there are none.
        losses: mean training loss of every epoch, with the prior's term.
        history: one record per epoch: ``epoch``, ``loss``; where the evidence was estimated (else None) it and its terms,
            ``log_likelihood - 0.5 * (log_det_ratio + scatter)``; ``prior_precision``, ``prior_precisions`` (None if more
            than 200), ``sigma_noise``, ``hyperparameters`` and ``ranges`` (magnitudes) that it is the evidence of;
            ``valid``, ``skipped`` (steps that were not finite, so far), ``seconds``.
        hyperparameters: those of the best evidence, by name.
        prior_precision: that of the best evidence, as laplace takes it: one, or one per tensor or parameter.
        prior_precisions: the same by name of what shares it: ``"all"``, a tensor, a path, or ``"pattern (what it captured)"``;
            empty for ``"diag"``.
        sigma_noise: that of the best evidence; None for classification.
        best_epoch: its epoch, the last one if no evidence was estimated.
        skipped: number of steps that were skipped because something was not finite, by kind.
    """

    la: BaseLaplace
    model: nn.Module
    margliks: list[float]
    losses: list[float]
    history: list[Record]
    hyperparameters: dict[str, Tensor]
    prior_precision: Tensor
    prior_precisions: dict[str, float]
    sigma_noise: Tensor | None
    best_epoch: int
    skipped: dict[str, int]

    def __repr__(self) -> str:
        evidence = max(
            (r["evidence"] for r in self.history if r["evidence"] is not None), default=None
        )
        return f"Result(epochs={len(self.history)}, best_epoch={self.best_epoch}, evidence={evidence}, skipped={self.skipped})"

    def __iter__(self) -> Iterator[Any]:
        return iter((self.la, self.model, self.margliks, self.losses))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int | slice) -> Any:
        return (self.la, self.model, self.margliks, self.losses)[index]


def _check_loader(name: str, loader: DataLoader) -> DataLoader:
    try:
        n_data, n_batches = len(loader.dataset), len(loader)
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"{name} must be a DataLoader with a length and a dataset with a length: {error}"
        ) from error
    if n_data == 0 or n_batches == 0:
        raise ValueError(f"{name} is empty: {n_data} examples in {n_batches} batches")
    return loader


def _check_numbers(
    values: dict[str, float | None], least: float | None = None, whole: bool = False
) -> None:
    """Refuse what is not above zero, or below ``least``; and fractions, if numbers must be whole."""
    for name, value in values.items():
        if value is None:
            continue
        enough = value > 0 if least is None else value >= least
        if not enough or not math.isfinite(value) or (whole and value != int(value)):
            wanted = "positive and finite" if least is None else f"finite and at least {least}"
            raise ValueError(f"{name} must be {wanted}{' and whole' if whole else ''}, got {value}")


def _evidence_loader(loader: DataLoader, batch_size: int | None) -> DataLoader:
    """Return batches that have every example, for the evidence is that of all of them."""
    sampler = getattr(loader, "sampler", None)
    if sampler is not None and hasattr(sampler, "__len__") and len(sampler) != len(loader.dataset):
        raise ValueError(
            f"the sampler yields {len(sampler)} of {len(loader.dataset)} examples, but the evidence is that of the whole data "
            "set; wrap the examples to train on in torch.utils.data.Subset"
        )
    if batch_size is None and not getattr(loader, "drop_last", False):
        return loader
    size = loader.batch_size if batch_size is None else batch_size
    return DataLoader(
        loader.dataset, size, collate_fn=loader.collate_fn, num_workers=loader.num_workers
    )


def marglik_training(
    model: nn.Module,
    train_loader: DataLoader,
    likelihood: str = "classification",
    hessian_structure: str = "kron",
    backend: type[CurvatureInterface] = AugmentedGGN,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.Adam,
    optimizer_kwargs: dict[str, Any] | None = None,
    scheduler_cls: type[torch.optim.lr_scheduler.LRScheduler] | None = None,
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
    backend_kwargs: dict[str, Any] | None = None,
    objective: Objective | None = None,
    lr_aug: float = 0.3,
    lr_aug_min: float | None = None,
    marglik_loader: DataLoader | None = None,
    marglik_batch_size: int | None = None,
    n_hypersteps_prior: int | None = None,
    n_hyper_batches: int | None = None,
    valid_loader: DataLoader | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | Path | None = None,
    resume: bool = False,
    history: str | Path | None = None,
    generator: torch.Generator | None = None,
    max_bad_steps: int = 10,
) -> Result:
    """Train weights by the loss, and prior precisions, noise and hyperparameters of the model by the evidence.

    Every positional argument is that of ``laplace.marglik_training`` and means the same; on a model without hyperparameters the
    two take the same steps. Hyperparameters (those of :func:`~laplace_invariance.named_hyperparameters` that require grad) take
    one step by Adam whenever the evidence is estimated, after the prior precisions and the noise, which take ``n_hypersteps`` on
    the same decomposition. The result has weights, hyperparameters and priors of the best evidence.

    A step whose objective or gradient is not finite is skipped, counted and logged.

    Args:
        model: network with outputs ``[batch, outputs]``, such as an ``InvariantModel``.
        train_loader: has ``.dataset`` with a length.
        likelihood, hessian_structure, backend, optimizer_cls, optimizer_kwargs, scheduler_cls, scheduler_kwargs, n_epochs,
            lr_hyp, n_epochs_burnin, n_hypersteps, marglik_frequency, sigma_noise_init, temperature, fix_sigma_noise,
            progress_bar, enable_backprop, dict_key_x, dict_key_y: as in laplace.
        prior_prec_init: initial prior precision, of all, or by regular expression as in ``prior_structure`` and 1 for the rest:
            ``{r".*\\.f_fc\\..*": 1e3}`` starts with free paths nearly switched off.
        prior_structure: what shares a prior precision. As in laplace, ``"scalar"`` is one for all, ``"layerwise"`` one per
            tensor, ``"diag"`` one per parameter. ``"path"`` is one per path of every
            :class:`~laplace_invariance.layers.ResidualPathway` (of the innermost, if they are nested) and one per tensor
            elsewhere. A list of regular expressions is one for all tensors whose whole name, as in
            ``model.named_parameters()``, the same pattern matches, the first that does, with the same captured texts; tensors
            that none matches have their own. ``[r".*bias"]`` is one for all biases, ``[r"(.*)\\.f_fc\\..*"]`` one for every
            module ``f_fc``.
        backend_kwargs: options of the backend, such as ``{"output_rank": 3}``.
        objective: what hyperparameters are learnt by; None is :class:`~laplace_invariance.marglik.Evidence`.
        lr_aug: step size of hyperparameters in the first epoch. Large, so that ranges open before the weights have settled for
            narrow ones: with small steps all rotations of digits are found only if one starts there.
        lr_aug_min: where half a cosine over the epochs takes the step size to; None is a tenth of ``lr_aug``.
        marglik_loader: batches for the evidence, of as many examples; None is the training loader.
        marglik_batch_size: size of these batches, instead of a loader; larger is faster, memory permitting.
        n_hypersteps_prior: if given, an estimate consists of ``n_hypersteps`` rounds, each of which fits the curvature, takes so
            many steps on priors and noise, and one on hyperparameters; None is one round with ``n_hypersteps`` steps on priors.
        n_hyper_batches: differentiate hyperparameters in so many batches, drawn at random for every estimate; the gradient is
            scaled to be unbiased. None is all.
        valid_loader: data on which loss and accuracy are reported whenever the evidence is estimated; chooses nothing.
        callbacks: called after every epoch as ``callback(record, model)``, with the record that goes into the history.
        checkpoint: file that is rewritten, atomically, after every epoch. It must not exist unless ``resume``.
        resume: go on from ``checkpoint`` if it exists, else start. The result is that of a run which was never interrupted, bit
            for bit, if model, loaders and arguments are made as before; a larger ``n_epochs`` trains for longer.
        history: file to which every record is appended as a line of JSON. It must not exist unless ``resume``.
        generator: source of the choice of ``n_hyper_batches``; None is torch's default generator.
        max_bad_steps: so many skipped steps of one kind in a row raise ``FloatingPointError``.
    """
    likelihood = str(getattr(likelihood, "value", likelihood))  # laplace has enumerations, too
    hessian_structure = str(getattr(hessian_structure, "value", hessian_structure))
    if likelihood not in ("classification", "regression"):
        raise ValueError(f"likelihood must be 'classification' or 'regression', got {likelihood!r}")
    _check_numbers(
        {
            "lr_hyp": lr_hyp,
            "lr_aug": lr_aug,
            "prior_prec_init": None if isinstance(prior_prec_init, Mapping) else prior_prec_init,
            "sigma_noise_init": sigma_noise_init,
            "temperature": temperature,
        }
    )
    _check_numbers({"lr_aug_min": lr_aug_min}, least=0)
    counts = {
        "n_epochs": n_epochs,
        "marglik_frequency": marglik_frequency,
        "max_bad_steps": max_bad_steps,
    }
    counts |= {"marglik_batch_size": marglik_batch_size, "n_hyper_batches": n_hyper_batches}
    _check_numbers(counts, whole=True)
    _check_numbers(
        {"n_hypersteps": n_hypersteps, "n_epochs_burnin": n_epochs_burnin}, least=0, whole=True
    )
    _check_numbers({"n_hypersteps_prior": n_hypersteps_prior}, least=0, whole=True)
    if n_hypersteps_prior is not None and n_hypersteps == 0:
        raise ValueError(
            "with n_hypersteps_prior, n_hypersteps is the number of rounds and must be positive, got 0"
        )
    objective = Evidence() if objective is None else objective
    if not isinstance(objective, Objective):
        raise TypeError(
            f"objective must be an instance of laplace_invariance.marglik.Objective, got {objective!r}"
        )
    if callable(callbacks) or not all(callable(callback) for callback in callbacks):
        raise TypeError(
            "callbacks must be a list of functions, each called as callback(record, model)"
        )
    schedule = Schedule(
        n_epochs,
        n_epochs_burnin,
        marglik_frequency,
        rounds=1 if n_hypersteps_prior is None else n_hypersteps,
        prior_steps=n_hypersteps if n_hypersteps_prior is None else n_hypersteps_prior,
        lr_aug=lr_aug,
        lr_aug_min=lr_aug / 10 if lr_aug_min is None else lr_aug_min,
    )
    if objective.estimates and not any(schedule.due(epoch) for epoch in range(1, n_epochs + 1)):
        warnings.warn(
            f"the evidence is never estimated in {n_epochs} epochs, with n_epochs_burnin={n_epochs_burnin} and "
            f"marglik_frequency={marglik_frequency}; nothing but weights is learnt",
            stacklevel=2,
        )
    if issubclass(optimizer_cls, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss several times per step, which is not supported; choose another optimizer_cls"
        )
    _check_loader("train_loader", train_loader)
    if valid_loader is not None:
        _check_loader("valid_loader", valid_loader)
    if marglik_loader is not None and marglik_batch_size is not None:
        raise ValueError("give marglik_loader or marglik_batch_size, not both")
    marglik_loader = _evidence_loader(
        train_loader if marglik_loader is None else marglik_loader, marglik_batch_size
    )
    if checkpoint is not None and any(
        getattr(loader, "persistent_workers", False) for loader in (train_loader, marglik_loader)
    ):
        raise ValueError(
            "persistent_workers=True cannot be resumed: what workers have drawn is not known here; leave it out"
        )
    if len(_check_loader("marglik_loader", marglik_loader).dataset) != len(train_loader.dataset):
        raise ValueError(
            f"marglik_loader has {len(marglik_loader.dataset)} examples and train_loader {len(train_loader.dataset)}: the "
            "evidence is that of the training data; n_hyper_batches saves time"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no parameter that requires grad")
    for name, tensor in named_hyperparameters(model):
        if not torch.isfinite(tensor).all():
            raise ValueError(f"hyperparameter {name} is not finite at the start: {tensor.tolist()}")
    optimizer_kwargs = dict(optimizer_kwargs or {})
    if optimizer_kwargs.get("weight_decay"):
        warnings.warn("the prior replaces weight decay, which is set to 0", stacklevel=2)
    if "weight_decay" in inspect.signature(optimizer_cls).parameters:
        optimizer_kwargs["weight_decay"] = 0.0

    regression = likelihood == "regression"
    optimizer = optimizer_cls(model.parameters(), **optimizer_kwargs)
    run = Run(
        model,
        train_loader,
        marglik_loader,
        objective=objective,
        curvature=Curvature(
            likelihood,
            hessian_structure,
            backend,
            backend_kwargs,
            temperature,
            dict_key_x,
            dict_key_y,
        ),
        schedule=schedule,
        priors=Priors(
            model,
            prior_structure,
            prior_prec_init,
            sigma_noise_init if regression else None,
            regression and not fix_sigma_noise,
            temperature,
            lr_hyp,
        ),
        optimizer=optimizer,
        scheduler=None
        if scheduler_cls is None
        else scheduler_cls(optimizer, **(scheduler_kwargs or {})),
        n_hyper_batches=n_hyper_batches,
        max_bad_steps=max_bad_steps,
        generator=generator,
        settings={
            "optimizer_kwargs": repr(optimizer_kwargs),
            "backend_kwargs": repr(backend_kwargs),
            "temperature": temperature,
            "prior_prec_init": repr(
                dict(prior_prec_init) if isinstance(prior_prec_init, Mapping) else prior_prec_init
            ),
            "sigma_noise_init": sigma_noise_init,
            "lr_hyp": lr_hyp,
            "lr_aug": (lr_aug, lr_aug_min),
            "n_hypersteps": (n_hypersteps, n_hypersteps_prior),
            "marglik_frequency": marglik_frequency,
            "n_epochs_burnin": n_epochs_burnin,
            "n_hyper_batches": n_hyper_batches,
        },
    )
    run.rehearse()
    random_states = RandomStates(model, (train_loader, marglik_loader, valid_loader), (generator,))
    journal = Journal(run, random_states, checkpoint, history, resume)
    _train(run, journal, valid_loader, callbacks, progress_bar)
    return _finish(run, enable_backprop)


def _train(
    run: Run,
    journal: Journal,
    valid_loader: DataLoader | None,
    callbacks: Sequence[Callback],
    progress_bar: bool,
) -> None:
    schedule = run.schedule
    bar = tqdm.tqdm(
        total=schedule.n_epochs, initial=run.epoch, disable=not progress_bar, unit="epoch"
    )
    with bar:
        while run.epoch < schedule.n_epochs:
            run.epoch += 1
            if run.eta_optimizer is not None:
                run.eta_optimizer.param_groups[0]["lr"] = schedule.rate(run.epoch)
            due = schedule.due(run.epoch)
            try:
                start = time.perf_counter()
                run.train()
                trained = time.perf_counter()
                estimate = run.estimate() if due and run.objective.estimates else {}
                estimated = time.perf_counter()
            except FloatingPointError as error:
                raise FloatingPointError(f"{error}; {journal.last_good()}") from None
            report = valid_loader is not None and (due or run.epoch == schedule.n_epochs)
            valid = run.validate(valid_loader) if report else None
            seconds = {"train": trained - start, "estimate": estimated - trained}
            record = run.record(estimate, valid, seconds)
            run.history.append(record)
            journal.append(record)
            for (
                callback
            ) in callbacks:  # before the checkpoint, which then has what they did to random states
                callback(record, run.model)
            journal.save()
            bar.update()
            _show(bar, run)


def _show(bar: tqdm.tqdm, run: Run) -> None:
    """Show loss, evidence, accuracy and the widest ranges, each as last known."""
    if bar.disable:
        return
    shown = {"loss": f"{run.losses[-1]:.3f}"}
    evidence = next(
        (r["evidence"] for r in reversed(run.history) if r["evidence"] is not None), None
    )
    if evidence is not None:
        shown["evidence"] = f"{evidence / run.n_data:.3f}"
    valid = next((r["valid"] for r in reversed(run.history) if r["valid"]), {})
    if "accuracy" in valid:
        shown["accuracy"] = f"{valid['accuracy']:.1%}"
    ranges = {
        name: value
        for values in run.history[-1]["ranges"].values()
        for name, value in values.items()
    }
    for name in sorted(ranges, key=ranges.get, reverse=True)[:3]:
        shown[name] = f"{ranges[name]:.2f}"
    bar.set_postfix(shown)


def _finish(run: Run, enable_backprop: bool) -> Result:
    """Go back to the best evidence and fit Laplace there."""
    if not run.best:
        run.keep(None)
    run.model.load_state_dict(run.best["model"])
    run.priors.set_values(run.best["priors"])
    la = run.curvature.laplace(run.model, run.priors, enable_backprop)
    la.fit(run.marglik_loader)
    noise = run.priors.noise
    return Result(
        la=la,
        model=run.model,
        margliks=run.margliks,
        losses=run.losses,
        history=run.history,
        hyperparameters={name: tensor.detach().clone() for name, tensor in run.named.items()},
        prior_precision=run.priors.precision.detach(),
        prior_precisions=run.priors.named(),
        sigma_noise=None if noise is None else noise.detach(),
        best_epoch=run.best["epoch"],
        skipped=dict(run.steps.skipped),
    )
