"""Which augmentations would raise the evidence of a network that is trained already."""

from __future__ import annotations

import math
import random
import statistics
import zlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tqdm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from laplace_invariance.augmentations import AffineImage
from laplace_invariance.augmentations.base import Augmentation
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.marglik.checkpoints import RandomStates
from laplace_invariance.marglik.estimators.base import finite
from laplace_invariance.marglik.evidence import settings_of_evidence
from laplace_invariance.marglik.search.candidates import Candidate, Space
from laplace_invariance.marglik.search.pilots import Pilots
from laplace_invariance.marglik.settings import Settings, check_numbers
from laplace_invariance.marglik.suggestions.known import KnownEvidences
from laplace_invariance.marglik.suggestions.results import Suggestion, Suggestions

__all__ = ["Ranges", "candidates_of", "suggest"]

Ranges = Mapping[str | tuple[str, ...], float | Sequence[float]]


def suggest(
    model: nn.Module,
    loader: DataLoader,
    augmentation: Augmentation | None = None,
    likelihood: str = "classification",
    *,
    n_samples: int = 8,
    ranges: Ranges | None = None,
    n_steps: int = 200,
    n_repeats: int = 3,
    n_examples: int = 1000,
    margin: float = 0.02,
    optimizer_kwargs: Mapping[str, Any] | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    progress_bar: bool = False,
    **options: Any,
) -> Suggestions:
    """Say which augmentations, and how far, would raise the evidence of a trained network.

    The network was trained in the ordinary way; it, the augmentation and all random states stay as
    they are. For every candidate a copy of the network is averaged over the augmentation and
    trained on for a while, by the loss and with the step size falling to zero; then priors go to
    their optimum, and the evidence is estimated. The network alone is treated in the same way, and
    a gain is the difference from it: batches, draws and examples are common. All is repeated with
    others, and the spread of gains is their standard error. If the best candidate is clear, wider
    and narrower ones are tried as well.

    Gradients of the evidence at ranges of zero are mostly noise, so evidences are compared at
    finite ranges. Without training them further, networks that never saw transformed inputs always
    lose by an augmentation. Training starts from the given weights, and not from fresh ones,
    because short trainings from scratch favour augmentations, which regularise: there, every range
    looked better than none on upright digits, where longer training leaves little of that. From
    trained weights the comparison errs to the other side: the network alone has a head start, which
    goes with more steps. Hence what raises the evidence can be relied on, and a gain that is
    negative but still rising is called not clear.

    Errors are those of batches, draws and examples. They do not contain what other weights or other
    data of the same kind would change.

    Args:
        model: Network with outputs ``[batch, outputs]`` that was trained on the data.
        loader: Loader of the training data; pilots shuffle them, in batches of its size.
        augmentation: Augmentation whose ranges are tried; None is ``AffineImage(draws="sobol")``,
            for images.
        likelihood: Either ``"classification"`` or ``"regression"``.
        n_samples: Number of samples that outputs are averaged over.
        ranges: Widths to try, one or several, by name of a range, or by several names that are
            opened together, such as ``{"rotation": (0.5, 1.5), ("x_scale", "y_scale"): 0.3}``. None
            is every range of the augmentation at its usual widths.
        n_steps: Number of steps on the weights, even; more of them favour the network alone less.
        n_repeats: Number of repeats with other batches and draws, at least two.
        n_examples: Number of examples that an evidence is estimated from, at most.
        margin: Gain in log evidence per example that is too small to matter.
        optimizer_kwargs: Arguments of the optimiser, such as ``{"lr": 1e-3}``; None is a step size
            of 2e-3.
        checkpoint: File of JSON that evidences are written to as they come. It must not exist
            unless ``resume``.
        resume: Whether to go on from ``checkpoint`` if it exists; evidences that it has are not
            computed again. More repeats may be asked for.
        progress_bar: Whether to show progress.
        **options: ``optimizer_cls``, ``hessian_structure``, ``backend``, ``backend_kwargs``,
            ``prior_structure`` and ``subset_of_weights``, as for
            :func:`~laplace_invariance.marglik_training`.

    Returns:
        Gains of all candidates with their errors, best first, and what is clear.

    Raises:
        TypeError: If the augmentation is not one.
        ValueError: If there is nothing to try or to tell: no range to learn, a width outside of its
            limits, targets that are all the same, a network that averages already.
        FileExistsError: If ``checkpoint`` exists and is not resumed from.
        FloatingPointError: If the evidence of the network alone is not finite.
    """
    comparison = _Comparison(n_steps, n_repeats, n_examples, margin)
    net, first = _copied(model), _first_input(loader)
    chosen = _chosen_augmentation(augmentation, first)
    averaged = InvariantModel(net, chosen.to(*_like(net)), n_samples)
    candidates = candidates_of(averaged, ranges)
    settings = settings_of_evidence(
        _shuffled(loader, torch.Generator()),
        likelihood,
        optimizer_kwargs=dict(optimizer_kwargs or {"lr": 2e-3}),
        progress_bar=progress_bar,
        **options,
    )
    _check_targets(settings)
    known = KnownEvidences(checkpoint, resume, _signature(averaged, settings, comparison))
    return _Suggesting(averaged, settings, comparison, known).run(candidates)


def candidates_of(model: nn.Module, ranges: Ranges | None) -> list[Candidate]:
    """Return what is compared: nothing first, then ranges one after another.

    Args:
        model: Model with an augmentation, or the augmentation itself.
        ranges: Widths by names, as for :func:`suggest`.

    Raises:
        ValueError: If there is no such range, or a width is zero or outside of its limits.
    """
    space = Space(model)
    if ranges is None:
        return space.first()[:-1]  # the last one opens everything
    found = [space.candidate({})]
    for names, widths in ranges.items():
        unit = (names,) if isinstance(names, str) else tuple(names)
        for width in [widths] if isinstance(widths, int | float) else widths:
            candidate = space.candidate(dict.fromkeys(unit, width))
            if len(candidate.widths) < len(unit):
                raise ValueError(
                    f"a width of {width} closes {', '.join(unit)}, and nothing is always among the "
                    "candidates; give a width above 0.001"
                )
            found.append(candidate)
    if len(found) == 1:
        raise ValueError("ranges names nothing to try; leave it out to try everything")
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class _Comparison:
    """How candidates are compared; see :func:`suggest`."""

    n_steps: int
    n_repeats: int
    n_examples: int
    margin: float

    def __post_init__(self) -> None:
        check_numbers(self, "n_steps", "n_examples", whole=True)
        check_numbers(self, "margin", least=0)
        check_numbers(self, "n_repeats", least=2, whole=True)  # one has no standard error
        if self.n_steps % 2:
            raise ValueError(
                f"n_steps must be even, as evidences are compared after half of them, too, got "
                f"{self.n_steps}"
            )


class _Suggesting:
    """A comparison at work."""

    def __init__(
        self,
        model: InvariantModel,
        settings: Settings,
        comparison: _Comparison,
        known: KnownEvidences,
    ) -> None:
        self._model = model
        self._settings = settings
        self._comparison = comparison
        self._known = known
        self._space = Space(model)
        self._random_states = RandomStates(model, [settings.data.train_loader])
        self._chance = -math.inf

    def run(self, candidates: list[Candidate]) -> Suggestions:
        self._compare(candidates)
        found = self._result(candidates)
        if found.best is not None:
            near = self._space.neighbours(self._space.candidate(found.best.ranges), [])
            further = [candidate for candidate in near if candidate not in candidates]
            self._compare([candidates[0], *further])
            found = self._result([*candidates, *further])
        return found

    def _compare(self, candidates: list[Candidate]) -> None:
        """Estimate the evidences of candidates, in all repeats, that are not known."""
        n_repeats = self._comparison.n_repeats
        bar = tqdm.tqdm(
            total=len(candidates) * n_repeats,
            disable=not self._settings.output.progress_bar,
            unit="pilot",
            desc="suggest",
        )
        with bar:
            for repeat in range(n_repeats):
                with self._pilots(repeat) as pilots:
                    self._chance = pilots.chance()
                    for candidate in candidates:
                        self._try(pilots, candidate, repeat)
                        gain = self._gain(candidate, repeat)[1]
                        bar.update()
                        bar.set_postfix_str(f"{candidate}: {gain:+.3f}")

    @contextmanager
    def _pilots(self, repeat: int) -> Iterator[Pilots]:
        """Return the pilots of a repeat, with batches and draws of its own."""
        before = self._random_states.state_dict()
        torch.manual_seed(repeat)  # all states are restored
        np.random.seed(repeat)  # noqa: NPY002 - data sets may draw from it
        random.seed(repeat)
        settings = self._settings
        batches = settings.data.train_loader.generator
        if batches is not None:
            batches.manual_seed(repeat)
        half = self._comparison.n_steps // 2
        try:
            yield Pilots(
                self._model,
                settings,
                self._random_states,
                n_steps=half,
                n_samples=1,
                n_examples=self._comparison.n_examples,
                seed=repeat,
            )
        finally:
            self._random_states.load_state_dict(before)

    def _try(self, pilots: Pilots, candidate: Candidate, repeat: int) -> None:
        if (candidate, repeat) in self._known:
            return
        found = pilots.evidences(candidate, 2)
        pilots.forget([])
        if not candidate.widths and not math.isfinite(found[2]):
            raise FloatingPointError(
                "the evidence of the network alone is not finite after "
                f"{self._comparison.n_steps} steps; choose a smaller step size by "
                "optimizer_kwargs={'lr': ...}"
            )
        self._known.add(candidate, repeat, found[1], found[2])

    def _gain(self, candidate: Candidate, repeat: int) -> tuple[float, float]:
        """Return the gains after half of the steps and after all."""
        nothing = self._known[self._space.candidate({}), repeat]
        earlier, evidence = self._known[candidate, repeat]
        return earlier - nothing[0], evidence - nothing[1]

    def _result(self, candidates: Sequence[Candidate]) -> Suggestions:
        nothing, *others = candidates
        repeats = range(self._comparison.n_repeats)
        rows = [self._row(candidate) for candidate in others]
        return Suggestions(
            sorted(rows, key=lambda row: row.gain, reverse=True),
            evidence=statistics.fmean(self._known[nothing, repeat][1] for repeat in repeats),
            chance=finite(self._chance),
            n_samples=self._model.augmentation.count(self._model.n_samples),
            n_steps=self._comparison.n_steps,
            n_repeats=self._comparison.n_repeats,
        )

    def _row(self, candidate: Candidate) -> Suggestion:
        gains = [self._gain(candidate, r) for r in range(self._comparison.n_repeats)]
        return Suggestion(
            dict(candidate.widths),
            self._in_words(candidate),
            [after for _, after in gains],
            statistics.fmean(earlier for earlier, _ in gains),
            self._comparison.margin,
        )

    def _in_words(self, candidate: Candidate) -> str:
        """Return ranges with their units, each set of ranges of equal width together."""
        self._space.put(candidate)
        words = self._model.augmentation.ranges()
        named: dict[str, list[str]] = {}
        for name, width in candidate.widths:
            named.setdefault(words.get(name, f"{width:.3f}"), []).append(name)
        return ", ".join(f"{' and '.join(names)} {text}" for text, names in named.items())


# What is given: the network, the data, the augmentation.


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of the network; raise if it is not one without augmentation."""
    for name, module in model.named_modules():
        if isinstance(module, InvariantModel | Augmentation):
            place = f"its module {name!r}" if name else "it"
            raise ValueError(
                "suggest asks what a network without augmentation would gain, but the model has "
                f"one already: {place} is of class {type(module).__name__}; give the network "
                "inside, such as model.net, or learn ranges by marglik_training"
            )
    return deepcopy(model)


def _like(net: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return device and type of the weights, which the augmentation gets as well."""
    for weight in net.parameters():
        return weight.device, weight.dtype
    raise ValueError("the model has no parameters, so that there is no evidence to compare")


def _first_input(loader: DataLoader) -> Any:
    with torch.random.fork_rng(devices=[]):
        first: Any = loader.dataset[0]
    return first if isinstance(first, MutableMapping) else first[0]


def _chosen_augmentation(augmentation: Augmentation | None, example: Any) -> Augmentation:
    """Return a copy of the augmentation, or that of images."""
    if augmentation is not None:
        if not isinstance(augmentation, Augmentation):
            raise TypeError(
                "augmentation must be a laplace_invariance.Augmentation, "
                f"got {type(augmentation).__name__}"
            )
        return deepcopy(augmentation)
    if not isinstance(example, Tensor) or example.ndim != 3:
        kind = list(example.shape) if isinstance(example, Tensor) else type(example).__name__
        raise ValueError(
            "without augmentation= inputs must be images [channels, height, width], got "
            f"{kind}; give an augmentation, such as AffinePoints() for points in the plane"
        )
    return AffineImage(draws="sobol")


def _shuffled(loader: DataLoader, generator: torch.Generator) -> DataLoader:
    """Return a loader of the same examples in random order, by a generator that can be seeded."""
    return DataLoader(
        loader.dataset,
        loader.batch_size,
        shuffle=True,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        generator=generator,
    )


def _check_targets(settings: Settings) -> None:
    """Raise if all targets are the same, which there is nothing to learn from."""
    first: Tensor | None = None
    with torch.random.fork_rng(devices=[]):
        for targets in _targets(settings):
            first = targets[:1] if first is None else first
            if (targets != first).any():
                return
    assert first is not None
    what = "targets" if settings.evidence.is_regression else "labels"
    raise ValueError(
        f"all {what} are {first.squeeze().tolist()}: any network is right, whatever its "
        "augmentation; give data that differ in what is to be predicted"
    )


def _targets(settings: Settings) -> Iterable[Tensor]:
    for data in settings.data.ordered_loader:
        if isinstance(data, MutableMapping):
            yield data[settings.data.dict_key_y]
        else:
            yield data[1]


def _signature(
    model: InvariantModel, settings: Settings, comparison: _Comparison
) -> dict[str, Any]:
    """Return what must agree between a call that wrote evidences and one that resumes."""
    weights = b"".join(
        tensor.detach().cpu().numpy().tobytes() for tensor in model.net.state_dict().values()
    )
    with torch.random.fork_rng(devices=[]):
        targets = next(iter(_targets(settings)))
    return {
        "checksum of the weights": zlib.crc32(weights),
        "checksum of the first targets": zlib.crc32(targets.numpy().tobytes()),
        "number of training examples": settings.data.n_data,
        "batch size": settings.data.train_loader.batch_size,
        "augmentation": repr(model.augmentation),
        "n_samples": model.n_samples,
        "n_steps": comparison.n_steps,
        "n_examples": comparison.n_examples,
        "optimizer": settings.optimizer.optimizer_cls.__name__,
        "subset_of_weights": settings.evidence.subset_of_weights,
        "prior_structure": repr(settings.priors.prior_structure),
        **{
            name: settings.signature()[name]
            for name in (
                "likelihood",
                "hessian_structure",
                "backend",
                "backend_kwargs",
                "optimizer_kwargs",
            )
        },
    }
