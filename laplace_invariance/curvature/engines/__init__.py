"""How gradients reach the layers: by autograd, or by the hooks of another package."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from laplace_invariance.curvature.trace.calls import Trace
from laplace_invariance.curvature.trace.matching import Match

__all__ = ["Engine"]


class Engine(Protocol):
    """Runs a model forward so that gradients can be had at its layers."""

    def run(
        self, forward: Callable[[Any], Tensor], x: Any, match: Match
    ) -> AbstractContextManager[Trace]:
        """Run a forward pass; gradients are available inside the context.

        Args:
            forward: The model, or a part of its average over samples.
            x: Inputs ``[batch, ...]``.
            match: Layers and parameters of the model.

        Returns:
            The context of the trace.
        """
        ...
