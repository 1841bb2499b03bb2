"""A search for a start: candidates by short trainings, most dropped early."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tqdm
from torch import nn

from laplace_invariance.marglik.priors import Priors
from laplace_invariance.marglik.randomness import RandomStates
from laplace_invariance.marglik.ranks import Ranks
from laplace_invariance.marglik.search.candidates import MOST_OPENED
from laplace_invariance.marglik.search.comparison import Comparison
from laplace_invariance.marglik.search.pilots import Pilot, Pilots, n_units
from laplace_invariance.marglik.search.spaces import AnyCandidate, AnySpace, described
from laplace_invariance.marglik.settings import Settings, check_numbers
from laplace_invariance.tables import table

__all__ = ["Search", "SearchResult", "Trial"]

logger = logging.getLogger(__name__)

CLEARLY = 0.15  # share of the entropy of the classes that the best must have removed
N_GROWN = 2  # candidates beside which one more unit is opened
N_FINALISTS = 2
N_NEAR = 3  # neighbours of a candidate, about, for the time that is left
RIVALS = 0.05  # nats per example in which another explanation of the data is not dropped early


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
        comparison: Whether gradient steps of the ranges were worth it; None if that was not tried.
    """

    best: Trial
    trials: list[Trial]
    chance: float
    comparison: Comparison | None = None

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
        text = table([header, *rows], right=(1, 2, 3))
        return text if self.comparison is None else f"{text}\n{self.comparison}"

    def state_dict(self) -> dict[str, Any]:
        """Return everything as numbers and strings in lists and dictionaries."""
        return {
            "best": vars(self.best),
            "trials": [vars(trial) for trial in self.trials],
            "chance": self.chance,
            "comparison": None if self.comparison is None else vars(self.comparison),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> SearchResult:
        """Return what :meth:`state_dict` describes."""
        trials = [Trial(**trial) for trial in state["trials"]]
        compared = state["comparison"]
        comparison = None if compared is None else Comparison(**compared)
        return cls(Trial(**state["best"]), trials, state["chance"], comparison)


@dataclass(frozen=True)
class Search:
    """Try ranges in short trainings, and start from those with the highest evidence.

    The gradient of the evidence leads to the next optimum, and there are several. A search compares
    evidences at finite ranges instead, in stages that are each as long as all before: nothing,
    ranges alone and all together; then the best of them, with one more open; then neighbours of the
    best, until none is better; then the last two. All pilots share initial weights, batches and
    draws, and the priors are at their optimum for each. Where none is much better than guessing,
    all are trained for longer before any is dropped.

    Where there are no ranges but layers that are sums of paths (``ResidualPathway``), candidates
    are how far free paths are open at the start: off, closed, half open, open, in all layers or in
    the last. The initial weights of free paths are rescaled and their prior precisions set, however
    the model was built, so that the choice does not depend on that.

    Attributes:
        n_steps: Number of steps on the weights before the first estimate of a candidate. None is
            40 for ranges, and those of ten epochs, but at most 400, for free paths.
        keep: Number of candidates that stay after the first comparison.
        n_rounds: Number of times that neighbours of the best are tried, at most.
        oversampling: Number of samples in estimates, as a multiple of that in training.
        n_examples: Number of examples that an evidence is estimated from, at most.
        margin: Gain in evidence per example that a further open range, or layer, must bring.
        held: Share of all epochs for which, at most, a second network is trained with the ranges
            that were found, held. If its evidence is clearly higher, training goes on with it. 0
            leaves it out, as do runs that are too short.
    """

    n_steps: int | None = None
    keep: int = 4
    n_rounds: int = 2
    oversampling: int = 2
    n_examples: int = 500
    margin: float = 0.005
    held: float = 0.5

    def __post_init__(self) -> None:
        numbers = ("keep", "n_rounds", "oversampling", "n_examples")
        for name in (*numbers, "margin", "held"):
            if getattr(self, name) is None:
                raise TypeError(f"{name} must be a number, got None")
        check_numbers(self, "n_steps", *numbers, whole=True)
        check_numbers(self, "margin", "held", least=0)
        if self.held >= 1:
            raise ValueError(f"held must be at least 0 and below 1, got {self.held}")

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
        shown = settings.output.progress_bar and settings.ranks.is_first
        bar = tqdm.tqdm(disable=not shown, unit="pilot", desc="search", leave=True)
        with bar:
            return _Searching(self, pilots, trials, save, bar, settings.ranks).run(priors)


class _Searching:
    """A search at work."""

    def __init__(
        self,
        options: Search,
        pilots: Pilots,
        trials: list[dict[str, Any]],
        save: Callable[[], None],
        bar: tqdm.tqdm,
        ranks: Ranks,
    ) -> None:
        self._options = options
        self._ranks = ranks
        self._pilots = pilots
        self._space = pilots.space
        self._trials = trials
        self._save = save
        self._bar = bar
        self._known = {_pilot(trial, self._space): trial["evidence"] for trial in trials}
        self._asked: list[Pilot] = []
        self._n_later = 0  # pilots that come after this stage, about

    def run(self, priors: Priors) -> SearchResult:
        n_near = N_NEAR * self._options.n_rounds + N_FINALISTS
        self._stage("search: first", self._options.keep + N_GROWN * MOST_OPENED + n_near)
        pool = self._screen()
        if self._space.continues:
            self._stage("search: one more open", n_near)
            pool = self._grow(pool)
        self._stage("search: neighbours", n_near - N_NEAR)
        pool = self._improve(pool, pool)
        pool = self._improve(pool, self._rivals(pool))
        self._stage("search: last two", 0)
        last = dict.fromkeys([*pool[:N_FINALISTS], *self._rivals(pool)[:1]])
        best, *_ = self._compared([_longer(pilot) for pilot in last])
        self._space.put(best[-1], priors)
        return self._result(best)

    def _stage(self, words: str, n_later: int) -> None:
        """Say in the progress bar what is tried, and how many pilots come after that, about."""
        self._bar.set_description(words)
        self._n_later = n_later

    def _screen(self) -> list[Pilot]:
        """Train all until one is clearly better than guessing; return them, best first."""
        enough = (1 - CLEARLY) * self._pilots.chance()
        pool: list[Pilot] = [(candidate,) for candidate in self._space.first()]
        while True:
            pool = self._compared(pool)
            units = n_units(pool[0])
            if self._known[pool[0]] > enough or 2 * units > self._pilots.most_units:
                return pool
            logger.info("no candidate is much better than guessing after %d units", units)
            pool = [_longer(pilot) for pilot in pool]

    def _grow(self, pool: Sequence[Pilot]) -> list[Pilot]:
        """Train the best for longer, and the two best of them with one more unit open."""
        others = [pilot[-1] for pilot in pool]
        longer = [_longer(pilot) for pilot in pool[: self._options.keep]]
        for pilot in pool[:N_GROWN]:
            grown = self._space.grown(pilot[-1], others)
            longer += [(*pilot, candidate) for candidate in grown]
        return self._compared(self._new(longer))

    def _improve(self, pool: list[Pilot], best: Sequence[Pilot]) -> list[Pilot]:
        """Try neighbours of the best until none is better; return all, best first.

        Args:
            pool: Pilots of equal length.
            best: Those of them that are improved, best first.
        """
        for _ in range(self._options.n_rounds if best else 0):
            near = [self._instead(best[0], c) for c in self._space.neighbours(best[0][-1])]
            new = self._new(near, pool)
            pool = self._compared([*pool, *new])
            before = best[0]
            best = [pilot for pilot in pool if pilot in best or pilot in new]
            if best[0] == before:
                break
        return pool

    def _rivals(self, pool: Sequence[Pilot]) -> list[Pilot]:
        """Return pilots that open other ranges than the best, and are not far behind, best first.

        After a few steps a shift may be ahead of the rotation that explains more, and where one
        is open, gradients do not open the other.
        """
        best, *others = pool
        least = self._known[best] - RIVALS
        return [
            pilot
            for pilot in others
            if self._known[pilot] >= least and pilot[-1].is_rival(best[-1])
        ]

    def _instead(self, pilot: Pilot, candidate: AnyCandidate) -> Pilot:
        """Return a pilot of another candidate, which goes on from the weights of one if it can."""
        if self._space.continues:
            return (*pilot[:-1], candidate)
        return (candidate,) * len(pilot)

    def _new(self, pilots: Sequence[Pilot], known: Sequence[Pilot] = ()) -> list[Pilot]:
        """Return pilots, without those whose ranges nearly repeat another one's."""
        found = [pilot[-1] for pilot in known]
        new = []
        for pilot in pilots:
            if not any(pilot[-1].is_near(candidate) for candidate in found):
                found.append(pilot[-1])
                new.append(pilot)
        return new

    def _compared(self, pilots: Sequence[Pilot]) -> list[Pilot]:
        """Return pilots of equal length by evidence; within the margin, with fewer open ranges."""
        n_new = sum(pilot not in self._asked for pilot in pilots)
        self._bar.total = len(self._asked) + n_new + self._n_later
        self._try(pilots)

        def score(pilot: Pilot) -> float:
            return self._known[pilot] - self._options.margin * pilot[-1].n_open

        order = sorted(pilots, key=score, reverse=True)
        self._pilots.forget(order[: self._options.keep])
        return order

    def _try(self, pilots: Sequence[Pilot]) -> None:
        """Find the evidences of pilots that are not known, as many at a time as there are ranks."""
        new = [pilot for pilot in pilots if pilot not in self._known]
        for start in range(0, len(new), self._ranks.size):
            together = new[start : start + self._ranks.size]
            for pilot, evidence in zip(together, self._evidences(together), strict=True):
                self._known[pilot] = evidence
                stages = [candidate.as_dict() for candidate in pilot]
                self._trials.append({"stages": stages, "evidence": evidence})
                self._show(pilot)
            self._save()
        for pilot in pilots:
            self._show(pilot)

    def _evidences(self, pilots: Sequence[Pilot]) -> list[float]:
        """Return the evidences of at most one pilot per rank."""
        found = None
        if self._ranks.rank < len(pilots):
            own = pilots[self._ranks.rank]
            found = (self._pilots.evidence(own), self._pilots.state_of(own))
        gathered = self._ranks.gather(found)[: len(pilots)]
        for pilot, (_, state) in zip(pilots, gathered, strict=True):
            self._pilots.know(pilot, state)
        return [evidence for evidence, _ in gathered]

    def _show(self, pilot: Pilot) -> None:
        """Count a pilot in the progress bar, once."""
        if pilot not in self._asked:
            self._asked.append(pilot)
            self._bar.update()
            self._bar.set_postfix_str(f"{pilot[-1]}: {self._known[pilot]:.3f}")

    def _result(self, best: Pilot) -> SearchResult:
        last = {pilot[-1]: pilot for pilot in sorted(self._asked, key=len)}
        highest: dict[int, float] = {}
        for pilot in self._asked:
            highest[len(pilot)] = max(self._known[pilot], highest.get(len(pilot), -math.inf))
        highest[len(best)] = self._known[best]
        trials = {}
        for candidate, pilot in last.items():
            evidence = self._known[pilot]
            n_steps = n_units(pilot) * self._pilots.n_steps
            loss = highest[len(pilot)] - evidence
            trials[candidate] = Trial(candidate.as_dict(), n_steps, evidence, loss)
        order = sorted(trials.values(), key=lambda trial: (-trial.n_steps, trial.loss))
        return SearchResult(trials[best[-1]], order, self._pilots.chance())


def _longer(pilot: Pilot) -> Pilot:
    """Return a pilot that goes on with the same ranges."""
    return (*pilot, pilot[-1])


def _pilot(trial: Mapping[str, Any], space: AnySpace) -> Pilot:
    return tuple(space.known(stage) for stage in trial["stages"])
