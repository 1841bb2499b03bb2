"""What a plan says: a table of options, a recommendation, and one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from laplace_invariance.marglik.plans.simulate import Footprint
from laplace_invariance.tables import table

__all__ = ["Choice", "Plan", "in_bytes", "in_seconds"]

# Operations per second of a product of matrices, of one core of a present processor.
RATE = 6e10

MUCH = 1.5  # times the peak, from which on that of Laplace.fit is said


@dataclass(frozen=True)
class Choice:
    """One way to compute curvature, and what it takes.

    Attributes:
        name: What it is, in words.
        hessian_structure: As for :func:`~laplace_invariance.marglik_training`.
        subset_of_weights: As for :func:`~laplace_invariance.marglik_training`.
        backend_kwargs: Options of the backend.
        footprint: Memory and work of its parts.
        peak: Most bytes that an estimate in training takes, curvature and the gradient of the
            evidence, beyond model and data.
        peak_of_fit: The same of ``Laplace.fit``, which starts from dense zeros for every parameter.
        work: Work of a batch, in training steps on the weights on the same batch.
    """

    name: str
    hessian_structure: str
    subset_of_weights: str
    backend_kwargs: Mapping[str, Any]
    footprint: Footprint
    peak: int
    peak_of_fit: int
    work: float

    @property
    def seconds(self) -> float:
        """About how long the decomposition takes on one core."""
        return self.footprint.decomposition_work / RATE


@dataclass(frozen=True, repr=False)
class Plan:
    """What :func:`~laplace_invariance.plan` found; a table as a string.

    Attributes:
        choices: Options, the one that training would use first.
        training_step: Bytes of a training step on the weights, without those of the optimiser.
        memory: Budget in bytes; None if it is not known.
        recommendation: Which options fit into the budget, and how to make one fit.
        recommended: The option that is recommended, with ``chunk_size`` if it needs one; None if
            none fits.
    """

    choices: tuple[Choice, ...]
    training_step: int
    memory: int | None
    recommendation: str
    recommended: Choice | None

    @property
    def default(self) -> Choice:
        """The option that training would use."""
        return self.choices[0]

    def __getitem__(self, name: str) -> Choice:
        for choice in self.choices:
            if choice.name == name:
                return choice
        raise KeyError(f"no option {name!r}; there are {', '.join(c.name for c in self.choices)}")

    def summary(self) -> str:
        """Return one line on the option that training would use."""
        choice = self.default
        parts = [
            f"{choice.name}: {in_bytes(choice.footprint.factors)} of factors",
            f"peak about {in_bytes(choice.peak)}",
            f"a batch costs about {choice.work:.1f} training steps",
        ]
        if choice.seconds >= 1:
            parts.append(f"a decomposition about {in_seconds(choice.seconds)}")
        return ", ".join(parts)

    def __str__(self) -> str:
        header = ("option", "factors", "chunk", "decomposition", "peak", "batch", "time")
        cells: list[tuple[str, ...]] = [header]
        for choice in self.choices:
            own = choice.footprint
            sizes = (own.factors, own.chunk, own.decomposition, choice.peak)
            steps, time = f"{choice.work:.1f} steps", in_seconds(choice.seconds)
            cells.append((choice.name, *map(in_bytes, sizes), steps, time))
        lines = [table(cells, right=range(1, len(header)))]
        lines.append(f"a training step on the weights takes {in_bytes(self.training_step)}")
        default = self.default
        if default.peak_of_fit > MUCH * default.peak:
            lines.append(
                f"Laplace.fit alone, with {default.name}, would take "
                f"{in_bytes(default.peak_of_fit)}: it starts from dense zeros"
            )
        return "\n".join([*lines, self.recommendation])

    __repr__ = __str__


def in_bytes(n: int) -> str:
    """Return a number of bytes in words."""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}"
        n = n / 1000  # type: ignore[assignment]
    return f"{n:.1f} GB"


def in_seconds(seconds: float) -> str:
    """Return a time in words, to about a factor of two."""
    if seconds < 1:
        return "below 1 s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
