"""The evidence along one range: is the learnt value a maximum, and how flat is it?"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import tqdm
from torch import nn
from torch.utils.data import DataLoader

from laplace_invariance.augmentations.base import Augmentation
from laplace_invariance.files import read_json, write_json
from laplace_invariance.invariant import averaging_over
from laplace_invariance.marglik.approximation import constant, learnt_hyperparameters
from laplace_invariance.marglik.checkpoints import RandomStates
from laplace_invariance.marglik.estimators.base import finite
from laplace_invariance.marglik.evidence import settings_of_evidence
from laplace_invariance.marglik.hyperparameters import outermost_augmentations
from laplace_invariance.marglik.loop import Trainer
from laplace_invariance.marglik.settings import Settings, check_numbers
from laplace_invariance.tables import table

__all__ = ["Profile", "profile", "profile_of"]

FORMAT = 1
OVERSAMPLING = 2  # samples in estimates, as a multiple of the model's, as in training
SAME = 0.005  # nats per example that are not told apart
MARGIN = 0.02  # nats per example below the best that still count as flat

# Values around the learnt one, by default.
FACTORS = (0.25, 0.5, 0.8, 1.25, 1.6, 2.5)
N_VALUES = 9
LEAST_OPEN = 0.1  # width below which a range is closed,
OPEN = 0.25  # and whose factors are tried then
CLOSE = 0.01  # distance, as a share of all, below which two values are one


@dataclass(frozen=True)
class Profile:
    """Log evidence along one range; prints as a table with its conclusion.

    Attributes:
        name: Name of the range.
        values: Widths of the range, increasing, with the learnt one among them.
        repeats: Log evidence per example, of each repetition a tuple with one for each value.
        learnt: The learnt width.
        limit: Largest possible width, or infinity.
        in_words: Function that says a width in words and units.
    """

    name: str
    values: tuple[float, ...]
    repeats: tuple[tuple[float, ...], ...]
    learnt: float
    limit: float = math.inf
    in_words: Callable[[float], str] = field(default="±{:.3f}".format, repr=False, compare=False)

    @property
    def evidences(self) -> list[float]:
        """Log evidence per example at each value, the mean over repetitions."""
        return [statistics.fmean(found) for found in zip(*self.repeats, strict=True)]

    @property
    def errors(self) -> list[float] | None:
        """Standard error of each evidence beside the others; None of a single repetition.

        All values of a repetition have the same batches and draws. What these add to all of them
        does not change the curve, and does not count.
        """
        if len(self.repeats) == 1:
            return None
        centred = [[one - statistics.fmean(found) for one in found] for found in self.repeats]
        return [_standard_error(found) for found in zip(*centred, strict=True)]

    @property
    def best(self) -> float:
        """Value with the highest evidence."""
        return self.values[self._best]

    @property
    def loss(self) -> float:
        """By how much the evidence at the learnt value is below the best, per example."""
        evidences = self.evidences
        return evidences[self._best] - evidences[self._learnt]

    @property
    def loss_error(self) -> float:
        """Standard error of the loss; 0 of a single repetition, of which it is not known."""
        if len(self.repeats) == 1:
            return 0.0
        return _standard_error([found[self._best] - found[self._learnt] for found in self.repeats])

    @property
    def is_maximum(self) -> bool:
        """Whether the loss is within its standard error, or 0.005 nats per example."""
        return self.loss <= max(SAME, self.loss_error)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the evidence, between values a line, is within 0.02 nats of the best around it."""
        narrower = range(self._best, -1, -1)
        wider = range(self._best, len(self.values))
        return self._reach(narrower), self._reach(wider)

    @property
    def width(self) -> float:
        """Length of the interval: how flat the maximum is."""
        low, high = self.interval
        return high - low

    @property
    def _best(self) -> int:
        evidences = self.evidences
        return max(range(len(evidences)), key=lambda i: evidences[i])

    @property
    def _learnt(self) -> int:
        return self.values.index(self.learnt)

    def _reach(self, indices: Sequence[int]) -> float:
        """Return how far one can go from the best value through others before it is too low."""
        evidences = self.evidences
        lowest = evidences[self._best] - MARGIN
        for near, far in itertools.pairwise(indices):
            if evidences[far] < lowest:
                share = (evidences[near] - lowest) / (evidences[near] - evidences[far])
                return self.values[near] + share * (self.values[far] - self.values[near])
        return self.values[indices[-1]]

    def __str__(self) -> str:
        evidences, errors = self.evidences, self.errors
        rows = [[self.name, "log evidence", "below the best", ""]]
        for i, value in enumerate(self.values):
            below = f"{evidences[self._best] - evidences[i]:.3f}"
            if errors is not None:
                below += f" ± {errors[i]:.3f}"
            rows.append([self.in_words(value), f"{evidences[i]:.3f}", below, self._mark(i)])
        return f"{table(rows, right=(1, 2))}\n{self.conclusion()}"

    def _mark(self, index: int) -> str:
        marks = []
        if index == self._learnt:
            marks.append("learnt")
        if index == self._best:
            marks.append("best")
        return ", ".join(marks)

    def conclusion(self) -> str:
        """Say in one line whether the learnt value is a maximum, and how flat."""
        learnt, best = self.in_words(self.learnt), self.in_words(self.best)
        low, high = map(self.in_words, self.interval)
        words = f"{self.name} {learnt} is a maximum"
        if not self.is_maximum:
            words = f"{self.name} {learnt} is not a maximum: {best} is better by {self.loss:.3f}"
        words += f"; within {MARGIN} nats per example of the best from {low} to {high}"
        if self.best == self.values[-1] < self.limit:
            words += ", and nothing wider was tried"
        return words

    def summary(self) -> dict[str, Any]:
        """Return everything that is known, for JSON."""
        return {
            "name": self.name,
            "learnt": self.learnt,
            "limit": finite(self.limit),
            "values": list(self.values),
            "repeats": [[finite(one) for one in found] for found in self.repeats],
            "evidences": [finite(one) for one in self.evidences],
            "errors": None if self.errors is None else [finite(one) for one in self.errors],
            "best": self.best,
            "is_maximum": self.is_maximum,
            "interval": list(self.interval),
        }


def profile_of(summary: Mapping[str, Any], in_words: Callable[[float], str]) -> Profile:
    """Return the profile of which :meth:`Profile.summary` returned the summary.

    Args:
        summary: Summary, as read from JSON.
        in_words: Function that says a width in words and units.
    """
    repeats = [[_or_else(one, -math.inf) for one in found] for found in summary["repeats"]]
    return Profile(
        summary["name"],
        tuple(summary["values"]),
        tuple(map(tuple, repeats)),
        summary["learnt"],
        _or_else(summary["limit"], math.inf),
        in_words,
    )


def _or_else(value: float | None, infinite: float) -> float:
    return infinite if value is None else value


def _standard_error(values: Sequence[float]) -> float:
    if not all(map(math.isfinite, values)):
        return math.inf
    return statistics.stdev(values) / math.sqrt(len(values))


def profile(
    model: nn.Module,
    loader: DataLoader,
    name: str,
    values: Sequence[float] | None = None,
    likelihood: str = "classification",
    *,
    n_steps: int = 100,
    n_samples: int | None = None,
    n_repeats: int = 2,
    optimizer_kwargs: dict[str, Any] | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    progress_bar: bool = False,
    **options: Any,
) -> Profile:
    """Return the log evidence of a trained network along one of its ranges.

    At each value a copy of the network, with the range fixed there and all other ranges as they
    were learnt, trains its weights for a while, from those that it has, with a step size that falls
    to zero. Priors then go to their optimum, and the evidence is estimated. The learnt value is
    treated like all others, and all have the same batches and draws. The model stays as it is, and
    so do random states.

    Weights that were trained with the learnt range suit it: after a few steps a curve has its
    maximum there rather than where a network trained from scratch would have it. With more steps
    that matters less; with none, the weights as they are decide alone.

    Args:
        model: Trained network with an augmentation, such as an ``InvariantModel``.
        loader: Loader of the data that it was trained on.
        name: Name of the range, such as ``"rotation"``, preceded by that of the module if several
            have ranges to learn: ``"net.augmentation.rotation"``.
        values: Widths of the range in the units of ``augmentation.widths()``; the learnt one is
            added. None is about nine: zero, narrower and wider ones, and the limit if there is one.
        likelihood: Either ``"classification"`` or ``"regression"``.
        n_steps: Number of steps on the weights at each value.
        n_samples: Number of samples that outputs are averaged over in estimates; None is twice that
            of the model, as in training.
        n_repeats: Number of repetitions, with other batches and draws, from which standard errors
            are estimated.
        optimizer_kwargs: Arguments of Adam, such as ``{"lr": 1e-3}``.
        checkpoint: File of JSON that gets every evidence as soon as it is known. It must not exist
            unless ``resume``.
        resume: Whether to take known evidences from ``checkpoint`` if it exists. The result is the
            same, bit for bit, as without an interruption, if model, loader and arguments are made
            as before; there may be other values and more repetitions.
        progress_bar: Whether to show a progress bar.
        **options: ``hessian_structure``, ``backend``, ``backend_kwargs``, ``prior_structure``,
            ``subset_of_weights``, ``optimizer_cls`` and ``dict_key_x``, ``dict_key_y``, as for
            :func:`~laplace_invariance.marglik_training`.

    Returns:
        Values, evidences with standard errors, and what follows: whether the learnt value is a
        maximum, and how flat.

    Raises:
        ValueError: If there is no such range to learn, a value is outside of its limits, all
            targets are the same, or the checkpoint is of something else.
        FileExistsError: If ``checkpoint`` exists and is not resumed from.
    """
    settings = settings_of_evidence(
        loader, likelihood, optimizer_kwargs=optimizer_kwargs, progress_bar=progress_bar, **options
    )
    amounts = _Amounts(n_steps, n_samples, n_repeats)
    random_states = RandomStates(model, (loader,))
    before = random_states.state_dict()
    try:
        retuning = _Retuning(model, settings, name, amounts)
        points = retuning.range.points(values)
        known = _Known(checkpoint, resume, retuning.signature)
        return _profile(retuning, points, known, progress_bar)
    finally:
        random_states.load_state_dict(before)


@dataclass(frozen=True)
class _Amounts:
    """Numbers of steps, samples and repetitions, as of :func:`profile`."""

    n_steps: int
    n_samples: int | None
    n_repeats: int

    def __post_init__(self) -> None:
        check_numbers(self, "n_steps", least=0, whole=True)
        check_numbers(self, "n_samples", "n_repeats", whole=True)


def _profile(
    retuning: _Retuning, points: tuple[float, ...], known: _Known, progress_bar: bool
) -> Profile:
    n_repeats = retuning.amounts.n_repeats
    bar = tqdm.tqdm(
        total=n_repeats * len(points),
        disable=not progress_bar,
        unit="point",
        desc=f"profile of {retuning.range.name}",
    )
    repeats = []
    with bar:
        for repeat in range(n_repeats):
            found = []
            for value in points:
                if (value, repeat) not in known:
                    known.add(value, repeat, retuning.evidence(value, repeat))
                found.append(known[value, repeat])
                bar.update()
                bar.set_postfix_str(f"{retuning.range.in_words(value)}: {found[-1]:.3f}")
            repeats.append(tuple(found))
    place = retuning.range
    return Profile(place.name, points, tuple(repeats), place.learnt, place.limit, place.in_words)


class _Range:
    """One range of a model that can be learnt.

    Args:
        model: Model with augmentations.
        name: Name of the range.

    Attributes:
        name: The same.
        learnt: Present width.
        limit: Largest width, or infinity.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        found = _learnt_ranges(model)
        if not found:
            raise ValueError(
                "there is no range to profile: the model has no augmentation whose hyperparameters "
                "require grad; wrap the network in InvariantModel(net, augmentation)"
            )
        if name not in found:
            raise ValueError(
                f"there is no range {name!r} to profile; choose from {', '.join(found)}"
            )
        self.name = name
        self._augmentation, self._own_name = found[name]
        self.learnt = self._augmentation.widths()[self._own_name]
        self.limit = self._augmentation.largest(self._own_name)

    def points(self, values: Sequence[float] | None) -> tuple[float, ...]:
        """Return the values to try, with the learnt one, each once and in order.

        Args:
            values: Values that are wanted; None chooses some.

        Raises:
            ValueError: If a value is outside of its limits, or there is none but the learnt one.
        """
        if values is None:
            return _around(self.learnt, self.limit)
        for value in values:
            if not 0 <= value <= self.limit or not math.isfinite(value):
                raise ValueError(
                    f"{self.name} must be finite and between 0 and {self.limit:.4g}, its limit, "
                    f"got {value}"
                )
        found = tuple(sorted({float(value) for value in values} | {self.learnt}))
        if len(found) == 1:
            raise ValueError(
                f"there is nothing to compare the learnt {self.name} with: give other values, or "
                "None"
            )
        return found

    def put(self, value: float) -> None:
        """Set the range of the model, and no other."""
        self._augmentation.resize_(self._own_name, value)

    def in_words(self, value: float) -> str:
        """Return a width in words and units."""
        return self._augmentation.in_words(self._own_name, value)


def _learnt_ranges(model: nn.Module) -> dict[str, tuple[Augmentation, str]]:
    """Return augmentation and name there of all ranges that can be learnt, by public name."""
    found = outermost_augmentations(model)
    owners = {place: module for place, module in found.items() if module.widths()}
    names: dict[str, tuple[Augmentation, str]] = {}
    for place, module in owners.items():
        for own in module.widths():
            public = own if len(owners) == 1 else f"{place}.{own}"
            names[public] = (module, own)
    return names


def _around(learnt: float, limit: float) -> tuple[float, ...]:
    """Return zero, the learnt value, narrower and wider ones, and the limit if there is one."""
    base = learnt if learnt >= LEAST_OPEN else OPEN
    wanted = [0.0, *([limit] if math.isfinite(limit) else [])]
    wanted += [factor * base for factor in FACTORS if factor * base < limit]
    top = max([*wanted, learnt])
    points = [learnt]
    for value in wanted:
        if all(abs(value - other) > CLOSE * top for other in points):
            points.append(value)
    points.sort()
    while len(points) < N_VALUES:
        low, high = max(itertools.pairwise(points), key=lambda pair: pair[1] - pair[0])
        points = sorted([*points, (low + high) / 2])
    return tuple(points)


class _Retuning:
    """A copy of a model that trains for a while with one range fixed, always from the same start.

    Args:
        model: Trained model, which is copied.
        settings: Settings of the evidence and of the optimiser.
        name: Name of the range.
        amounts: Numbers of steps and samples.

    Attributes:
        range: The range, of the copy.
        amounts: The same.
        signature: What must agree between two runs that share evidences.
    """

    def __init__(self, model: nn.Module, settings: Settings, name: str, amounts: _Amounts) -> None:
        self._model = deepcopy(model)
        self.range = _Range(self._model, name)
        self.amounts = amounts
        self._settings = settings
        self._hyperparameters = learnt_hyperparameters(self._model)
        self._random_states = RandomStates(self._model, (settings.data.train_loader,))
        self._before = self._random_states.state_dict()
        with constant(self._hyperparameters):
            self._trainer = Trainer(self._model, settings)
            self._trainer.estimator.rehearse()
        self._check_targets()
        self.signature = {
            **self._trainer.signature(),
            "name of the range": name,
            "number of steps": amounts.n_steps,
            "number of samples": amounts.n_samples,
            "checksum of the model": _checksum(self._model),
        }

    def _check_targets(self) -> None:
        """Raise if all targets are the same."""
        first = None
        for data in self._settings.data.ordered_loader:
            _, y = self._trainer.estimator.approximation.batch(data)
            first = y[:1] if first is None else first
            if (y != first).any():
                return
        raise ValueError(
            "all examples have the same target, whatever transforms them, so that the evidence "
            "says nothing about a range; give data of at least two classes"
        )

    @cached_property
    def _start(self) -> dict[str, Any]:
        """State with the weights as they are, and the best priors for them."""
        with constant(self._hyperparameters):
            self._assess(0)
        return deepcopy(self._trainer.state_dict())

    def evidence(self, value: float, repeat: int) -> float:
        """Return the evidence per example with the range at a value, after some training.

        Args:
            value: Width of the range.
            repeat: Number of the repetition, which is the seed of batches and draws.
        """
        self._trainer.load_state_dict(deepcopy(self._start))
        self.range.put(value)
        self._random_states.load_state_dict(self._before)
        torch.manual_seed(repeat)  # whoever calls puts back all random states
        with constant(self._hyperparameters):
            self._train()
            return self._assess(repeat)

    def _train(self) -> None:
        """Step the weights, with a step size that falls to zero, so that they come to rest."""
        n_steps = self.amounts.n_steps
        if n_steps:
            self._trainer.restart_rate(n_steps)
            self._trainer.train_on(itertools.islice(self._batches(), n_steps))

    def _batches(self) -> Iterator[Any]:
        loaders = itertools.repeat(self._settings.data.train_loader)
        return itertools.chain.from_iterable(loaders)

    def _assess(self, seed: int) -> float:
        """Take the priors to their optimum, and return the evidence per example."""
        data = self._settings.data

        def more(present: int) -> int:
            return self.amounts.n_samples or OVERSAMPLING * present

        with averaging_over(self._model, more):
            found = self._trainer.estimator.assess(data.ordered_loader, seed)
        return found / data.n_data


def _checksum(model: nn.Module) -> int:
    """Return a number that differs between models with different weights or ranges."""
    found = 0
    for tensor in model.state_dict().values():
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        found = zlib.crc32(content.numpy().tobytes(), found)
    return found


class _Known:
    """Evidences by value and repetition, each written to a file as soon as it is known.

    Args:
        path: The file; None keeps nothing.
        resume: Whether to read what the file has.
        signature: What must agree with the run that wrote it.
    """

    def __init__(self, path: str | Path | None, resume: bool, signature: dict[str, Any]) -> None:
        if resume and path is None:
            raise ValueError("resume=True needs to know the checkpoint=")
        self._path = None if path is None else Path(path)
        self._signature = json.loads(json.dumps(signature))  # with lists, as it will be read
        self._found: dict[tuple[float, int], float] = {}
        if self._path is None or not self._path.exists():
            return
        if not resume:
            raise FileExistsError(
                f"{path} exists; resume=True resumes from it, another name starts from scratch"
            )
        self._read(self._path)

    def _read(self, path: Path) -> None:
        saved = read_json(path)
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            raise ValueError(f"{path} is not of a profile in format {FORMAT}; nothing was changed")
        theirs = saved["signature"]
        different = [key for key, value in self._signature.items() if theirs.get(key) != value]
        if different:
            raise ValueError(
                f"{path} is of another profile: it differs in {', '.join(different)}; name another "
                "file to start from scratch; nothing was changed"
            )
        for value, repeat, evidence in saved["found"]:
            self._found[value, repeat] = _or_else(evidence, -math.inf)

    def __contains__(self, key: tuple[float, int]) -> bool:
        return key in self._found

    def __getitem__(self, key: tuple[float, int]) -> float:
        return self._found[key]

    def add(self, value: float, repeat: int, evidence: float) -> None:
        """Keep an evidence."""
        self._found[value, repeat] = evidence
        if self._path is None:
            return
        found = [[*key, finite(one)] for key, one in self._found.items()]
        write_json(self._path, {"format": FORMAT, "signature": self._signature, "found": found})
