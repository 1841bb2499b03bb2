"""The samples of one input, a few at a time: a trace whose memory is that of some of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from laplace_invariance.curvature.recompute import checkpointed, pull_back_through
from laplace_invariance.curvature.trace.calls import Trace
from laplace_invariance.hyper import differentiable

__all__ = ["ChunkedTrace"]

Run = Callable[..., AbstractContextManager[Trace]]  # run(create_graph=...)
Evaluate = Callable[
    [Trace, Tensor | None], dict[int, Tensor]
]  # of a part's trace and a column to backpropagate, if any


class ChunkedTrace:
    """Like :class:`Trace`, but the sum of several, each of which is run when asked and recomputed to be differentiated.

    Outputs, averaged inputs, averaged gradients and Jacobians are sums over samples. Each term is a checkpoint of its own,
    so that no more than one part's graph, of one column, is alive at a time. The price is one more forward pass per part,
    and per part and column in the backward pass.

    Args:
        parts: functions that run a part of the samples, each the context of its :class:`Trace`.
        hyper: the hyperparameters to differentiate in.
    """

    def __init__(self, parts: Sequence[Run], hyper: Sequence[Tensor]) -> None:
        self._parts = parts
        self._hyper = list(hyper)
        (self.outputs,) = self._sum(lambda trace, column: {0: trace.outputs}).values()
        self.batch = len(self.outputs)

    def averaged_inputs(self) -> dict[int, Tensor]:
        """As :meth:`Trace.averaged_inputs`."""
        return self._sum(lambda trace, column: trace.averaged_inputs())

    def averaged_gradients(self, columns: Sequence[Tensor]) -> dict[int, Tensor]:
        """As :meth:`Trace.averaged_gradients`."""
        return _join(
            [
                self._sum(lambda trace, column: trace.averaged_gradients([column]), column)
                for column in columns
            ]
        )

    def jacobian_columns(self, columns: Sequence[Tensor]) -> dict[int, Tensor]:
        """As :meth:`Trace.jacobian_columns`."""
        return _join(
            [
                self._sum(lambda trace, column: trace.jacobian_columns([column]), column)
                for column in columns
            ]
        )

    def _sum(self, evaluate: Evaluate, column: Tensor | None = None) -> dict[int, Tensor]:
        """Sum ``evaluate(trace, column)`` over the parts, differentiably in hyperparameters and column."""
        totals: dict[int, Tensor] = {}
        for part in self._parts:
            for key, term in _term(part, evaluate, self._hyper, column).items():
                totals[key] = totals[key] + term if key in totals else term
        return totals


def _term(
    part: Run, evaluate: Evaluate, hyper: list[Tensor], column: Tensor | None
) -> dict[int, Tensor]:
    keys: list[int] = []

    def forward() -> list[Tensor]:
        with part(create_graph=False) as trace:
            result = evaluate(trace, None if column is None else column.detach())
        keys[:] = result
        return list(result.values())

    def pull_back(cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        leaf = [] if column is None else [column.detach().requires_grad_(column.requires_grad)]
        with differentiable(), part(create_graph=True) as trace:
            outputs = list(evaluate(trace, *(leaf or [None])).values())
        return pull_back_through(outputs, cotangents, [*hyper, *leaf])

    inputs = [*hyper, *([] if column is None else [column])]
    terms = checkpointed(forward, pull_back, inputs)  # fills the keys
    return dict(zip(keys, terms, strict=True))


def _join(columns: list[dict[int, Tensor]]) -> dict[int, Tensor]:
    return {key: torch.cat([column[key] for column in columns], dim=1) for key in columns[0]}
