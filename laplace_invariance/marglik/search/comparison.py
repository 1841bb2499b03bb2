"""Training with the ranges that a search found, held, beside training in which they are learnt.

A gradient step of ranges takes the weights as they are. Where weights that adapt would undo what it
gains, learnt ranges drift away from better ones, and weights that have adapted to them hide it. So
a second network is trained from the same start with ranges held, for a part of all epochs, and
training goes on with the one whose evidence is higher.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from laplace_invariance.marglik.checkpoints import Journal
from laplace_invariance.marglik.loop import Trainer
from laplace_invariance.marglik.randomness import RandomStates
from laplace_invariance.marglik.search.pilots import Pilots

__all__ = ["Comparison", "epochs_to_compare", "train_and_compare"]

logger = logging.getLogger(__name__)

STEPS = 60  # in which the weights come to rest before their evidence is estimated
OVERSAMPLING = 4
N_EXAMPLES = 1000
HELD, LEARNT = "held", "learnt"
PARTS = (0.6, 1.0)  # of the epochs until it is decided, after which the two are compared
# By how much the evidence with held ranges must be higher, as learnt ones are still on their way,
VERY_CLEARLY = 0.03  # to be decided for at once
CLEARLY = 0.01  # to be decided for in the end


@dataclass(frozen=True)
class Comparison:
    """Evidences of held and of learnt ranges.

    Attributes:
        epoch: Epoch after which they were compared.
        held: Log evidence per example with the ranges that the search found.
        learnt: Log evidence per example with ranges learnt from there by gradient.
        keeps_learning: Whether ranges are learnt after that, too.
    """

    epoch: int
    held: float
    learnt: float
    keeps_learning: bool

    def __str__(self) -> str:
        gain = f"{self.learnt - self.held:+.3f} nats at epoch {self.epoch}"
        if self.keeps_learning:
            return f"gradient steps: {gain}"
        return f"gradient steps: {gain}, so ranges stay as found"


def epochs_to_compare(trainer: Trainer, share: float) -> list[int]:
    """Return the epochs after which held and learnt ranges are compared; none without need or time.

    They are compared from the start on, so not in a run that went on from a shorter one.

    Args:
        trainer: Run, after its search.
        share: Share of all epochs after which it is decided at the latest.
    """
    settings = trainer.settings
    schedule = settings.schedule
    if not share or not trainer.hyperparameters.tensors:
        return []
    if trainer.epoch and trainer.search["comparison"] is None:
        return []
    n_learning = settings.evidence.estimator.n_epochs_learning(schedule.n_epochs)
    least = schedule.n_epochs_burnin + 2 * schedule.marglik_frequency  # for some steps of ranges
    wanted = [round(part * share * schedule.n_epochs) for part in PARTS]
    return [epoch for epoch in wanted if least <= epoch < n_learning]


def train_and_compare(
    trainer: Trainer, random_states: RandomStates, journal: Journal, epochs: Sequence[int]
) -> Comparison:
    """Train twice, with ranges held and learnt, until one is clearly better, and leave that one.

    The history has the records of the run at work. A run that was interrupted goes on.

    Args:
        trainer: Run, at the start that the search found, or on its way.
        random_states: All sources of randomness.
        journal: Journal of the run.
        epochs: Epochs after which the two are compared; after the last one it is decided.

    Returns:
        The evidences.
    """
    known = trainer.search["comparison"]
    if known is None:
        start = _state(trainer, random_states)
        states = {HELD: start | {"run": start["run"] | {"holds": True}}, LEARNT: start}
        known = {"states": states, "evidences": {}, "at_work": LEARNT}
        trainer.search["comparison"] = known
    for epoch in epochs:
        for name in (HELD, LEARNT):
            _advance(name, epoch, trainer, random_states, journal)
        held, learnt = (known["evidences"][name, epoch] for name in (HELD, LEARNT))
        if learnt >= held or held - learnt > VERY_CLEARLY:
            break
    keeps_learning = learnt > held - CLEARLY
    winner = LEARNT if keeps_learning else HELD
    _put(known["states"][winner], trainer, random_states)
    trainer.search["comparison"] = None
    found = Comparison(epoch, held, learnt, keeps_learning)
    logger.info("%s", found)
    return found


def _advance(
    name: str, epoch: int, trainer: Trainer, random_states: RandomStates, journal: Journal
) -> None:
    """Train one of the two until an epoch, and keep its state and its evidence there."""
    known = trainer.search["comparison"]
    if (name, epoch) in known["evidences"]:
        return
    if known["at_work"] != name:
        _put(known["states"][name], trainer, random_states)
        known["at_work"] = name
        journal.rewrite()
    trainer.train(journal, random_states, epoch, callbacks=None if name == LEARNT else ())
    known["states"][name] = _state(trainer, random_states)
    random_states.load_state_dict(known["states"][HELD]["random"])  # for common draws
    known["evidences"][name, epoch] = _evidence(trainer, random_states)
    _put(known["states"][name], trainer, random_states)
    journal.save()


def _evidence(trainer: Trainer, random_states: RandomStates) -> float:
    """Return the evidence per example of the weights at rest."""
    pilots = Pilots(trainer.model, trainer.settings, random_states, STEPS, OVERSAMPLING, N_EXAMPLES)
    return pilots.at_rest(trainer.priors)


def _state(trainer: Trainer, random_states: RandomStates) -> dict[str, Any]:
    """Return a copy of everything but what belongs to the search."""
    run = {name: part for name, part in trainer.state_dict().items() if name != "search"}
    return deepcopy({"run": run, "random": random_states.state_dict()})


def _put(state: dict[str, Any], trainer: Trainer, random_states: RandomStates) -> None:
    trainer.load_state_dict(deepcopy(state["run"]) | {"search": trainer.search})
    random_states.load_state_dict(state["random"])
