"""Autograd as the engine: a backward pass for each column, which can be differentiated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from laplace_invariance.curvature.trace.calls import Trace
from laplace_invariance.curvature.trace.matching import Match

__all__ = ["AutogradEngine"]


@dataclass(frozen=True)
class AutogradEngine:
    """Hooks on layers keep their calls, and autograd finds the gradients of their outputs.

    Attributes:
        differentiate: Whether the curvature will be differentiated.
    """

    differentiate: bool = False

    @contextmanager
    def run(self, forward: Callable[[Any], Tensor], x: Any, match: Match) -> Iterator[Trace]:
        """Run a forward pass, as :meth:`~laplace_invariance.curvature.engines.Engine.run`."""
        with match.layers.capture() as calls:
            outputs = forward(x)
        match.layers.check(calls)
        yield Trace(outputs, calls, match.parameters, match.others, self.differentiate)
