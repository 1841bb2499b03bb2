"""Which augmentations would raise the evidence of a network that is trained already."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import tqdm
from torch import nn
from torch.utils.data import DataLoader

from laplace_invariance.augmentations.base import Augmentation, Shape
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.marglik.evidence import settings_of_evidence
from laplace_invariance.marglik.guessing import guessing
from laplace_invariance.marglik.randomness import RandomStates
from laplace_invariance.marglik.search.candidates import Candidate, Space
from laplace_invariance.marglik.search.pilots import Pilots
from laplace_invariance.marglik.settings import Settings
from laplace_invariance.marglik.suggestions.checks import (
    check_candidates,
    check_data,
    check_optimizer,
    inputs_of,
)
from laplace_invariance.marglik.suggestions.data import shuffled
from laplace_invariance.marglik.suggestions.given import (
    Comparison,
    Ranges,
    candidates_of,
    check_options,
    chosen_augmentation,
    copied,
    like,
    signature,
)
from laplace_invariance.marglik.suggestions.known import KnownEvidences
from laplace_invariance.marglik.suggestions.results import Suggestion, Suggestions
from laplace_invariance.precision import without_autocast

__all__ = ["suggest"]

LR = 2e-3  # of the MLP that it was tried on, 5e-3 first disturbed the network alone


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
    finite ranges. Without further training, a network that never saw transformed inputs loses by
    any augmentation. Training starts from the given weights, and not from fresh ones, because
    short trainings from scratch favour augmentations: where both were tried, for an MLP on upright
    digits, moderate ranges were far ahead of none at first, and less and less so later. From
    trained weights the network alone has a head start instead. Either way gains change with the
    number of steps, up for that MLP and down for a CNN on the same digits, so a gain whose sign
    would not last if it went on changing is called not clear. An augmentation that helps little may
    be missed.

    A candidate whose training diverges has an evidence of minus infinity, with a warning.

    Errors are those of batches, draws and examples. They do not contain what other weights or other
    data of the same kind would change.

    Args:
        model: Network with outputs ``[batch, outputs]`` that was trained on the data.
        loader: Loader of the training data with every example once, in any order; pilots shuffle
            them, in batches of its size.
        augmentation: Augmentation whose ranges are tried, all from zero: with all of them closed it
            must leave inputs as they are. None is ``AffineImage()``, for images.
        likelihood: Either ``"classification"`` or ``"regression"``.
        n_samples: Number of samples that outputs are averaged over.
        ranges: Widths to try, one or several, by name of a range, or by several names that are
            opened together, such as ``{"rotation": (0.5, 1.5), ("x_scale", "y_scale"): 0.3}``. None
            is every range of the augmentation at its usual widths.
        n_steps: Number of steps on the weights, even; gains after more of them depend less on where
            training starts.
        n_repeats: Number of repeats with other batches and draws, at least two.
        n_examples: Number of examples that an evidence is estimated from, at most.
        margin: Gain in log evidence per example that is too small to matter.
        optimizer_kwargs: Arguments of the optimiser, such as ``{"lr": 1e-3}``; None is a step size
            of 2e-3.
        checkpoint: File of JSON that evidences are written to as they come. It must not exist
            unless ``resume``.
        resume: Whether to go on from ``checkpoint`` if it exists; evidences that it has are not
            computed again. The network, the data, which are gone through twice for their checksum,
            and what evidences depend on must be those that it was written with; there may be other
            ranges, and more or fewer repeats.
        progress_bar: Whether to show progress.
        **options: ``optimizer_cls``, ``hessian_structure``, ``backend``, ``backend_kwargs``,
            ``prior_structure``, ``subset_of_weights`` and ``dict_key_x``, ``dict_key_y``, as for
            :func:`~laplace_invariance.marglik_training`.

    Returns:
        Gains of all candidates with their errors, best first, and what is clear.

    Raises:
        TypeError: If the augmentation is not one, or the loader cannot be shuffled.
        ValueError: If there is nothing to try or to tell: no range to learn, a width outside of its
            limits, targets that are all the same, a network that averages already; or if the loader
            leaves out or repeats examples.
        FileExistsError: If ``checkpoint`` exists and is not resumed from.
        FloatingPointError: If the evidence of the network alone is not finite.
    """
    comparison = Comparison(n_steps, n_repeats, n_examples, margin)
    check_options(options, optimizer_kwargs)
    net = copied(model)
    own = shuffled(loader)
    random_states = RandomStates(model, [loader])
    before = random_states.state_dict()
    try:
        settings = settings_of_evidence(
            own,
            likelihood,
            optimizer_kwargs=dict(optimizer_kwargs or {"lr": LR}),
            progress_bar=progress_bar,
            **options,
        )
        inputs = inputs_of(settings)
        chosen = chosen_augmentation(augmentation, inputs).to(*like(net))
        averaged = InvariantModel(net, chosen, n_samples, dict_key_x=settings.data.dict_key_x)
        candidates = candidates_of(averaged, ranges)
        check_data(averaged, settings)
        check_optimizer(averaged, settings)
        check_candidates(averaged, candidates, inputs)
        signed = signature(averaged, settings, comparison) if checkpoint is not None else {}
        known = KnownEvidences(checkpoint, resume, signed)
        return _Suggesting(averaged, settings, comparison, known, inputs.shape[1:]).run(candidates)
    finally:
        random_states.load_state_dict(before)


class _Suggesting:
    """A comparison at work."""

    def __init__(
        self,
        model: InvariantModel,
        settings: Settings,
        comparison: Comparison,
        known: KnownEvidences,
        shape: Shape,
    ) -> None:
        self._model = model
        self._settings = settings
        self._comparison = comparison
        self._known = known
        self._shape = shape  # of one input
        self._space = Space(model)
        self._random_states = RandomStates(model, [settings.data.train_loader])
        self._chances: dict[int, float] = {}  # by repeat

    @without_autocast()
    def run(self, candidates: list[Candidate]) -> Suggestions:
        self._compare(candidates)
        found = self._result(candidates)
        if found.best is not None:
            near = self._space.resized(self._space.candidate(found.best.ranges))
            reached = dict.fromkeys(map(self._space.reached, near))
            further = [one for one in reached if not any(map(one.is_near, candidates))]
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
                    evidence = self._settings.evidence
                    self._chances[repeat] = guessing(pilots.targets(), evidence)
                    for candidate in candidates:
                        self._try(pilots, candidate, repeat)
                        gain = self._gain(candidate, repeat)[1]
                        bar.update()
                        bar.set_postfix_str(f"{candidate}: {gain:+.3f}")

    @contextmanager
    def _pilots(self, repeat: int) -> Iterator[Pilots]:
        """Return the pilots of a repeat, with batches and draws of its own."""
        before = self._random_states.state_dict()
        self._random_states.seed(repeat)
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
        half = whole = -math.inf
        cause = None
        try:
            half = pilots.evidence((candidate,))
            whole = pilots.evidence((candidate, candidate))
        except (FloatingPointError, torch.linalg.LinAlgError) as error:
            cause = error
        finally:
            pilots.forget([])
        if cause is not None or not math.isfinite(half) or not math.isfinite(whole):
            half = whole = -math.inf
            self._diverged(candidate, cause)
        self._known.add(candidate, repeat, half, whole)

    def _diverged(self, candidate: Candidate, cause: Exception | None) -> None:
        """Warn that the evidence of a candidate is not finite; raise if it is the network alone."""
        reason = f" ({' '.join(str(cause).split())})" if cause is not None else ""
        if not candidate.widths:
            raise FloatingPointError(
                "the evidence of the network alone is not finite after "
                f"{self._comparison.n_steps} steps{reason}; choose a smaller step size by "
                "optimizer_kwargs={'lr': ...}"
            ) from cause
        warnings.warn(
            f"training with {candidate} diverged{reason}, so that its evidence counts as minus "
            "infinity",
            stacklevel=7,  # that of suggest
        )

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
            chance=statistics.fmean(self._chances.values()),
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
            self._space.can_widen(candidate),
        )

    def _in_words(self, candidate: Candidate) -> str:
        """Return ranges with their units, each set of ranges of equal width together."""
        self._space.put(candidate)
        words = self._model.augmentation.ranges(self._shape)
        named: dict[str, list[str]] = {}
        for name, width in candidate.widths:
            named.setdefault(words.get(name, f"{width:.3f}"), []).append(name)
        return ", ".join(f"{_listed(names)} {text}" for text, names in named.items())


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
