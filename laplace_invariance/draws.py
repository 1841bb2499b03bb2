"""Where random draws come from: fresh, fixed, or a tape that a curvature pass records and its backward pass replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from torch import Tensor

__all__ = ["are_fixed", "are_taped", "fixed_draws", "recording", "replaying", "taped"]

# None, "fixed", or a function of a function that makes a fresh draw
_source: ContextVar[str | Callable[[Callable[[], Tensor]], Tensor] | None] = ContextVar(
    "laplace_invariance_draws", default=None
)


@contextmanager
def _using(source: str | Callable[[Callable[[], Tensor]], Tensor]) -> Iterator[None]:
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def fixed_draws() -> AbstractContextManager[None]:
    """Use the fixed set of draws of every augmentation, as for predictions."""
    return _using("fixed")


def recording(tape: list[Tensor]) -> AbstractContextManager[None]:
    """Draw afresh and append the draws to ``tape``, as a curvature pass does when it first sees a batch."""

    def record(fresh: Callable[[], Tensor]) -> Tensor:
        tape.append(fresh())
        return tape[-1]

    return _using(record)


def replaying(tape: list[Tensor]) -> AbstractContextManager[None]:
    """Use the draws on ``tape``, in their order, as its backward pass does when it sees the batch again."""
    draws = iter(tape)

    def replay(fresh: Callable[[], Tensor]) -> Tensor:
        draw = next(draws, None)
        if draw is None:
            raise RuntimeError(
                "the model draws more often than in the pass that was recorded, so it cannot be replayed"
            )
        return draw

    return _using(replay)


def are_fixed() -> bool:
    """Tell whether inside :func:`fixed_draws`."""
    return _source.get() == "fixed"


def are_taped() -> bool:
    """Tell whether draws are recorded or replayed."""
    return callable(_source.get())


def taped(fresh: Callable[[], Tensor]) -> Tensor:
    """Return ``fresh()``, recorded or replayed inside these contexts."""
    source = _source.get()
    return source(fresh) if callable(source) else fresh()
