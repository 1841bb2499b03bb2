"""The epoch loop: weights are trained by the loss, everything else by estimates of the evidence."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import tqdm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from laplace_invariance.draws import Share, sharing
from laplace_invariance.hyper import StepGuard, named_hyperparameters
from laplace_invariance.marglik.checkpoints import Journal
from laplace_invariance.marglik.estimators.base import Context, finite
from laplace_invariance.marglik.hyperparameters import Hyperparameters
from laplace_invariance.marglik.priors import Priors, last_layer_of
from laplace_invariance.marglik.randomness import RandomStates
from laplace_invariance.marglik.records import progress, record_of
from laplace_invariance.marglik.settings import Callback, Record, Settings
from laplace_invariance.marglik.targets import check_labels
from laplace_invariance.precision import check_precision, with_autocast, without_autocast

__all__ = ["Trainer"]


class Trainer:
    """Trains the weights of a model epoch by epoch, has the evidence estimated, and keeps records.

    Args:
        model: Network with outputs ``[batch, outputs]``.
        settings: Settings of the run.

    Attributes:
        model: The model.
        settings: The settings.
        priors: Prior precisions and noise.
        hyperparameters: Hyperparameters of the model that are learnt.
        estimator: Estimator of the evidence.
        guard: Guard of all steps, which counts those that were skipped.
        epoch: Number of epochs done.
        losses: Mean training loss of every epoch, with the prior's term.
        history: One record per epoch.
        holds: Whether hyperparameters stay as they are.
        search: Estimates of a search so far; its result, None until it has ended; and, while
            training with the ranges that it found is compared with learning, what that needs.

    Raises:
        RuntimeError: If gradients are switched off.
        TypeError: If weights are in half precision.
        ValueError: If nothing can be trained, or a hyperparameter is not finite.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        _check_gradients()
        self.model = model
        self.settings = settings
        self._weights = [p for p in model.parameters() if p.requires_grad]
        if not self._weights:
            raise ValueError("the model has no parameter that requires grad")
        check_precision(model)
        self.hyperparameters = Hyperparameters(model, settings.hyperparameters.first_rate)
        is_regression = settings.evidence.is_regression
        temperature = settings.evidence.temperature
        last_layer = None
        if settings.evidence.subset_of_weights == "last_layer":
            last_layer = last_layer_of(model, settings.data.example())
        self.priors = Priors(
            model, settings.priors, temperature, has_noise=is_regression, last_layer=last_layer
        )
        kinds = ("weights", "priors", "hyperparameters")
        self.guard = StepGuard(kinds, settings.optimizer.max_bad_steps)
        self.estimator = settings.evidence.estimator.start(
            Context(model, settings, self.priors, self.hyperparameters, self.guard)
        )
        self._optimizer, self._scheduler = settings.optimizer.build(model)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._objective = settings.hyperparameters.objective
        self._ranks = settings.ranks
        self._criterion = nn.MSELoss() if is_regression else nn.CrossEntropyLoss()
        known = {id(tensor) for _, tensor in named_hyperparameters(model)}
        # such as those of batch normalisation
        self._statistics = [buffer for buffer in model.buffers() if id(buffer) not in known]
        self._parts: dict[str, Any] = {
            "model": model,
            "priors": self.priors,
            "hyperparameters": self.hyperparameters,
            "estimator": self.estimator,
            "guard": self.guard,
            "optimizer": self._optimizer,
        }
        if self._scheduler is not None:
            self._parts["scheduler"] = self._scheduler
        self._seconds = {"train": 0.0, "estimate": 0.0}
        self._follows = False  # whether the estimator sees the gradients of this epoch
        self.epoch = 0
        self.losses: list[float] = []
        self.history: list[Record] = []
        self.holds = False
        self.search: Record = {"trials": [], "result": None, "comparison": None}

    def train(
        self,
        journal: Journal,
        random_states: RandomStates,
        n_epochs: int | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> None:
        """Train all epochs that are left, or those until one.

        Args:
            journal: Journal, already open, that gets every record and checkpoints.
            random_states: All sources of randomness, which are kept equal on all ranks.
            n_epochs: Number of epochs after which to stop; None is all.
            callbacks: Called after every epoch with its record and the model; None is those of the
                settings.

        Raises:
            FloatingPointError: If too many steps of one kind in a row were not finite.
        """
        n_epochs = self.n_epochs if n_epochs is None else n_epochs
        output = self.settings.output
        callbacks = output.callbacks if callbacks is None else callbacks
        shown = output.progress_bar and self._ranks.is_first
        bar = tqdm.tqdm(total=n_epochs, initial=self.epoch, disable=not shown, unit="epoch")
        with bar:
            while self.epoch < n_epochs:
                bar.set_description(self._phase(self.epoch + 1))
                try:
                    record = self._run_epoch(random_states)
                except FloatingPointError as error:
                    raise FloatingPointError(f"{error}; {journal.last_good()}") from None
                self.history.append(record)
                journal.append(record)
                for callback in callbacks:
                    callback(record, self.model)
                # after callbacks, so that it has what they did to random states
                if self.epoch < n_epochs:
                    journal.save_if_cheap()
                else:
                    journal.save()
                bar.update()
                if shown:
                    bar.set_postfix(progress(self))

    def hold(self, held: bool) -> None:
        """Leave hyperparameters as they are from now on, or learn them again."""
        self.holds = held
        self.estimator.hold(held)

    @property
    def n_epochs(self) -> int:
        """Number of epochs after which training ends."""
        return self.settings.schedule.n_epochs

    def _run_epoch(self, random_states: RandomStates) -> Record:
        """Train the weights once, estimate the evidence and validate if due; return the record."""
        self.epoch += 1
        loader = self.settings.data.train_loader
        sampler: Any = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        if hasattr(sampler, "set_epoch"):  # as a DistributedSampler shuffles by it
            sampler.set_epoch(self.epoch - 1)
        self._check_what_is_learnt()
        n_learning = self.settings.evidence.estimator.n_epochs_learning(self.n_epochs)
        rate = self.settings.hyperparameters.rate(min(self.epoch, n_learning), n_learning)
        self.hyperparameters.set_rate(rate)
        due = self.settings.schedule.due(self.epoch)
        self._seconds = {"train": 0.0, "estimate": 0.0}
        self._follows = due and self._objective.estimates
        self.estimator.begin_epoch()
        with self._timed("train"):
            random_states.equal(self._ranks)
            self.losses.append(self.train_on(loader))
            self.estimator.end_epoch()
        self._seconds["train"] -= self._seconds["estimate"]
        estimate: Record = {}
        if due and self._objective.estimates:
            with self._timed("estimate"):
                random_states.equal(self._ranks)
                estimate = self.estimator.estimate(self.epoch)
        valid = None
        others = self.settings.data.valid_loader
        if others is not None and (due or self.epoch == self.n_epochs):
            valid = self._validate(others)
        return record_of(self, estimate, valid, self._seconds)

    def _phase(self, epoch: int) -> str:
        """Return in words what happens in an epoch, for the progress bar."""
        if not self._objective.estimates:
            return "training"
        if epoch < self.settings.schedule.n_epochs_burnin:
            return "burn-in"
        if epoch > self.settings.evidence.estimator.n_epochs_learning(self.n_epochs):
            return "only weights"
        return "ranges held" if self.holds else "learning"

    def _check_what_is_learnt(self) -> None:
        """Raise if a callback changed what requires grad, which optimisers would not follow."""
        tensors: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        tensors += [t for _, t in named_hyperparameters(self.model) if t.requires_grad]
        before = [*self._weights, *self.hyperparameters.tensors]
        if [id(tensor) for tensor in tensors] != [id(tensor) for tensor in before]:
            raise RuntimeError(
                "what requires grad changed while training; end the run, and start another one "
                "with the model as it is"
            )

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Add the time inside the context to that of this epoch."""
        started = time.perf_counter()
        yield
        self._seconds[what] += time.perf_counter() - started

    def train_on(self, batches: Iterable[Any]) -> float:
        """Step the weights once per batch, and return the mean loss of the steps taken.

        Args:
            batches: Inputs and targets of every step, as a loader yields them.
        """
        self.model.train()
        losses: list[Tensor] = []  # looked at in the end, as a GPU would have to be waited for
        sizes: list[int] = []
        for data, share in self._ranks.batches(batches, self.settings.data.dict_key_y):
            x, y = self._batch(data)
            self._zero_grad()
            with sharing(share):
                if self._objective.estimates:
                    with self._timed("estimate"):
                        self.estimator.observe(x, y, self.epoch, share)
                statistics = [buffer.clone() for buffer in self._statistics]
                loss = self._loss(x, y, share, statistics)
            if self._step(loss):
                if self._follows:
                    self.estimator.follow()
                losses.append(loss)
                sizes.append(share.n)
            else:
                for buffer, kept in zip(self._statistics, statistics, strict=True):
                    buffer.copy_(kept)
            if self._scheduler is not None:
                self._scheduler.step()
        self._zero_grad()
        return _mean(losses, sizes)

    def _loss(self, x: Any, y: Tensor, share: Share, statistics: Sequence[Tensor]) -> Tensor:
        """Return the loss of a batch, whose gradients are then in weights and hyperparameters.

        A rank has the part of the loss that its rows have in the mean, and as much of the prior as
        all others. Loss, gradients and changes of statistics are summed over ranks.
        """
        weight = share.n_counted / share.n
        with without_autocast(), with_autocast():  # so that torch keeps no converted weights
            loss = weight * self._objective.training_loss(self.model, self._criterion, x, y)
        loss = loss + self.priors.penalty(self.settings.data.n_data) / share.size
        loss.backward()
        loss = loss.detach()
        if share.size == 1:
            return loss
        learnt = self._stepped()
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in learnt]
        pairs = [
            (buffer, before)
            for buffer, before in zip(self._statistics, statistics, strict=True)
            if buffer.is_floating_point()
        ]
        # zero where nothing changed, such as at limits that are infinite
        changes = [weight * (new - old).where(new != old, 0.0) for new, old in pairs]
        loss, *sums = self._ranks.sum([loss, *gradients, *changes])
        for tensor in learnt:
            tensor.grad = sums.pop(0)
        for (buffer, before), change in zip(pairs, sums, strict=True):
            buffer.copy_(before + change)
        return loss

    def restart_rate(self, n_steps: int) -> None:
        """Let the step size of the weights fall from its first value to zero in so many steps."""
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = group["initial_lr"] = rate
        self._scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, n_steps)

    def _step(self, loss: Tensor) -> bool:
        """Step the weights, and hyperparameters if the loss steps these; return whether it did."""
        if not self.guard.allows("weights", self._stepped(), loss):
            return False
        self._optimizer.step()
        if self._objective.steps_in_training:
            self.hyperparameters.step()
        return True

    def _stepped(self) -> list[Tensor]:
        """Return what the training loss steps."""
        if self._objective.steps_in_training:
            return [*self._weights, *self.hyperparameters.tensors]
        return [*self._weights]

    def _zero_grad(self) -> None:
        self._optimizer.zero_grad()
        self.hyperparameters.zero_grad()

    def _batch(self, data: Any) -> tuple[Any, Tensor]:
        """Return inputs and targets on the device of the weights; a mapping stays as it is."""
        device = self._weights[0].device
        if isinstance(data, MutableMapping):
            x, y = data, data[self.settings.data.dict_key_y]
        else:
            x, y = data
            x = x.to(device, non_blocking=True)
        if not self.settings.evidence.is_regression:
            check_labels(y)
        return x, y.to(device, non_blocking=True)

    @torch.no_grad()
    def _validate(self, loader: DataLoader) -> dict[str, float | None]:
        """Return the mean loss and, of classes, the accuracy on other data.

        Even a loader that does not shuffle draws from torch's generator, and what is only reported
        must not change the run: the generator's state is restored.
        """
        self.model.eval()
        found: dict[str, list[Tensor]] = {"loss": []}
        if not self.settings.evidence.is_regression:
            found["accuracy"] = []
        sizes: list[int] = []
        with torch.random.fork_rng(devices=[]):
            for data, share in self._ranks.batches(loader, self.settings.data.dict_key_y):
                x, y = self._batch(data)
                outputs = self.model(x)
                found["loss"].append(self._criterion(outputs, y))
                if "accuracy" in found:
                    found["accuracy"].append((outputs.argmax(-1) == y).double().mean())
                sizes.append(share.n_counted)
        weights = torch.tensor(sizes, dtype=torch.float64, device=self._weights[0].device)
        sums = [(torch.stack(values).double() * weights).sum() for values in found.values()]
        total, *sums = self._ranks.sum([weights.sum(), *sums])
        means = (torch.stack(sums) / total).tolist()
        return {name: finite(mean) for name, mean in zip(found, means, strict=True)}

    def signature(self) -> dict[str, Any]:
        """Return what must agree between a run that wrote a checkpoint and one that resumes it."""
        tensors = self.model.state_dict().items()
        return {
            "tensors of the model": {n: f"{list(v.shape)} {v.dtype}" for n, v in tensors},
            "learnt weights": [n for n, p in self.model.named_parameters() if p.requires_grad],
            "learnt hyperparameters": list(self.hyperparameters.named),
            "number of training examples": self.settings.data.n_data,
            "number of prior precisions": self.priors.log_precision.numel(),
            "groups of prior precisions": self.priors.grouping,
            "optimizer": type(self._optimizer).__name__,
            "scheduler": type(self._scheduler).__name__,
            **self.settings.signature(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything but random states that the rest of the run depends on."""
        states = {name: part.state_dict() for name, part in self._parts.items()}
        return {
            "signature": self.signature(),
            "epoch": self.epoch,
            "losses": self.losses,
            "history": self.history,
            "holds": self.holds,
            "search": self.search,
            **states,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back a state that :meth:`state_dict` returned."""
        self.hold(state["holds"])
        for name, part in reversed(self._parts.items()):  # the model last, as others may refuse
            part.load_state_dict(state[name])
        self.epoch = state["epoch"]
        self.losses = state["losses"]
        self.history = state["history"]
        self.search = state["search"]


def _check_gradients() -> None:
    """Raise if torch computes no gradients here."""
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        return
    mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
    raise RuntimeError(
        f"training needs gradients, which torch.{mode}() around it switches off; call it outside"
    )


def _mean(values: Sequence[Tensor], sizes: Sequence[int]) -> float:
    """Return the mean of what batches of these sizes have on average, NaN without any."""
    if not values:
        return float("nan")
    numbers = torch.cat([value.reshape(1) for value in values]).tolist()
    return sum(number * size for number, size in zip(numbers, sizes, strict=True)) / sum(sizes)
