"""A search for a start: candidates by short trainings, most dropped early."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tqdm
from torch import nn

from laplace_invariance.marglik.checkpoints import RandomStates
from laplace_invariance.marglik.priors import Priors
from laplace_invariance.marglik.search.pilots import Pilots
from laplace_invariance.marglik.search.spaces import AnyCandidate, described
from laplace_invariance.marglik.settings import Settings, check_numbers
from laplace_invariance.tables import table

__all__ = ["Search", "SearchResult", "Trial"]

logger = logging.getLogger(__name__)

CLEARLY = 0.1  # share of the entropy of the classes that the best must have removed


@dataclass(frozen=True)
class Trial:
    """One estimate of a search.

    Attributes:
        ranges: Widths of the ranges that were open, by name; or, for layers that are sums of
            paths, levels at which free paths started (``layers.START_LEVELS``), by place.
        n_steps: Number of steps on the weights before the estimate.
        evidence: Log evidence per example.
        loss: By how much it is below that of the best candidate after as many steps.
    """

    ranges: dict[str, Any]
    n_steps: int
    evidence: float
    loss: float

    def __str__(self) -> str:
        return described(self.ranges)


@dataclass(frozen=True)
class SearchResult:
    """What a search tried; prints as a table, best first.

    Attributes:
        best: Trial whose ranges training starts from.
        trials: The last trial of every candidate, those that were trained longest first, and the
            best of them before others.
        chance: Log evidence per example of guessing by the frequencies of classes.
    """

    best: Trial
    trials: list[Trial]
    chance: float

    @property
    def is_clear(self) -> bool:
        """Whether the best candidate is better than guessing."""
        return self.best.evidence > self.chance

    def __str__(self) -> str:
        rows = [
            [str(trial), f"{trial.evidence:.3f}", f"{trial.loss:.3f}", str(trial.n_steps)]
            for trial in self.trials
        ]
        is_of_paths = any(isinstance(value, str) for value in self.best.ranges.values())
        what = "free paths" if is_of_paths else "ranges"
        header = [what, "log evidence", "lost by", "steps"]
        return table([header, *rows], right=(1, 2, 3))

    def state_dict(self) -> dict[str, Any]:
        """Return everything as numbers and strings in lists and dictionaries."""
        return {
            "best": vars(self.best),
            "trials": [vars(trial) for trial in self.trials],
            "chance": self.chance,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> SearchResult:
        """Return what :meth:`state_dict` describes."""
        trials = [Trial(**trial) for trial in state["trials"]]
        return cls(Trial(**state["best"]), trials, state["chance"])


@dataclass(frozen=True)
class Search:
    """Try ranges in short trainings, and start from those with the highest evidence.

    The gradient of the evidence leads to the next optimum, and there are several. A search compares
    evidences at finite ranges instead: nothing, ranges alone and in pairs, all together; then
    neighbours of the best, until none is better. All pilots share initial weights, batches and
    draws, and the priors are at their optimum for each. Where none is much better than guessing,
    all are trained for longer before any is dropped.

    Where there are no ranges but layers that are sums of paths (``ResidualPathway``), candidates
    are how far free paths are open at the start: off, closed, half open, open, in all layers or in
    the last. The initial weights of free paths are rescaled and their prior precisions set, however
    the model was built, so that the choice does not depend on that.

    Attributes:
        n_steps: Number of steps on the weights before the first estimate of a candidate. None is
            40 for ranges, and ten epochs for free paths.
        keep: Number of candidates that stay after each comparison.
        n_rounds: Number of times that neighbours of the best are tried, at most.
        oversampling: Number of samples in estimates, as a multiple of that in training.
        n_examples: Number of examples that an evidence is estimated from, at most.
        margin: Gain in evidence per example that a further open range, or layer, must bring.
    """

    n_steps: int | None = None
    keep: int = 3
    n_rounds: int = 3
    oversampling: int = 2
    n_examples: int = 1000
    margin: float = 0.003

    def __post_init__(self) -> None:
        numbers = ("n_steps", "keep", "n_rounds", "oversampling", "n_examples")
        check_numbers(self, *numbers, whole=True)
        check_numbers(self, "margin", least=0)

    def run(
        self,
        model: nn.Module,
        settings: Settings,
        random_states: RandomStates,
        trials: list[dict[str, Any]],
        save: Callable[[], None],
        priors: Priors,
    ) -> SearchResult:
        """Search, and leave the model at the best start.

        Args:
            model: Model as training will start with it.
            settings: Settings of the training.
            random_states: All sources of randomness; they are left as they are.
            trials: Estimates that are known, from an interrupted search; new ones are appended.
            save: Called after every new estimate.
            priors: Prior precisions of the training, which start as the best candidate has them.
        """
        pilots = Pilots(
            model, settings, random_states, self.n_steps, self.oversampling, self.n_examples
        )
        bar = tqdm.tqdm(
            disable=not settings.output.progress_bar, unit="pilot", desc="search", leave=True
        )
        with bar:
            return _Searching(self, pilots, trials, save, bar).run(priors)


class _Searching:
    """A search at work."""

    def __init__(
        self,
        options: Search,
        pilots: Pilots,
        trials: list[dict[str, Any]],
        save: Callable[[], None],
        bar: tqdm.tqdm,
    ) -> None:
        self._options = options
        self._pilots = pilots
        self._trials = trials
        self._save = save
        self._bar = bar
        # evidence by candidate and by units of training
        self._known = {
            (pilots.space.known(trial["ranges"]), trial["length"]): trial["evidence"]
            for trial in trials
        }
        self._last: dict[AnyCandidate, int] = {}  # units of training of each candidate

    def run(self, priors: Priors) -> SearchResult:
        first = self._pilots.space.first()
        length = self._compare_first(first)
        first = self._best_first(first, length)
        # longer, unless hard data have had that already
        length = max(self._pilots.space.second_length, length)
        pool = self._continue(first, length)
        pool = self._improve(pool, length, first)
        pool = self._continue(pool, 2 * length)
        self._pilots.space.put(pool[0], priors)
        return self._result(pool[0])

    def _continue(self, pool: Sequence[AnyCandidate], length: int) -> list[AnyCandidate]:
        """Train the best candidates for longer, and return them, best first."""
        kept = list(pool[: self._options.keep])
        self._pilots.forget(kept)
        for candidate in kept:
            self._try(candidate, length)
        return self._best_first(kept, length)

    def _improve(
        self, pool: list[AnyCandidate], length: int, first: Sequence[AnyCandidate]
    ) -> list[AnyCandidate]:
        """Try neighbours of the best candidate until none is better; return all, best first."""
        for _ in range(self._options.n_rounds):
            best = pool[0]
            near = self._pilots.space.neighbours(best, first)
            near = [candidate for candidate in near if candidate not in pool]
            for candidate in near:
                self._try(candidate, length)
            pool = self._best_first([*pool, *near], length)
            self._pilots.forget(pool[: self._options.keep])
            if pool[0] == best:
                break
        return pool

    def _compare_first(self, pool: Sequence[AnyCandidate]) -> int:
        """Train all until one is clearly better than guessing; return how long, in units."""
        enough = (1 - CLEARLY) * self._pilots.chance()
        length = 1
        while True:
            found = [self._try(candidate, length) for candidate in pool]
            if max(found) > enough or 2 * length > self._pilots.most_units:
                return length
            logger.info("no candidate is much better than guessing after %d units", length)
            length *= 2

    def _try(self, candidate: AnyCandidate, length: int) -> float:
        """Return the evidence of a candidate after so many units of training."""
        if (candidate, length) not in self._known:
            found = self._pilots.evidences(candidate, length)
            for units, evidence in found.items():
                self._known[candidate, units] = evidence
                trial = {"length": units, "evidence": evidence}
                self._trials.append({"ranges": candidate.as_dict(), **trial})
            self._save()
        self._last[candidate] = max(length, self._last.get(candidate, 0))
        evidence = self._known[candidate, length]
        self._bar.update()
        self._bar.set_postfix_str(f"{candidate}: {evidence:.3f}")
        return evidence

    def _best_first(self, candidates: Sequence[AnyCandidate], length: int) -> list[AnyCandidate]:
        """Sort by evidence; what opens fewer ranges is preferred within the margin."""

        def score(candidate: AnyCandidate) -> float:
            penalty = self._options.margin * candidate.n_open
            return self._known[candidate, length] - penalty

        return sorted(candidates, key=score, reverse=True)

    def _result(self, best: AnyCandidate) -> SearchResult:
        trials = {}
        for candidate, length in self._last.items():
            evidence = self._known[candidate, length]
            loss = self._known[best, length] - evidence
            n_steps = length * self._pilots.n_steps
            trials[candidate] = Trial(candidate.as_dict(), n_steps, evidence, loss)
        order = sorted(trials.values(), key=lambda trial: (-trial.n_steps, trial.loss))
        return SearchResult(trials[best], order, self._pilots.chance())
