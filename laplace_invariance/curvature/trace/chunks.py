"""A batch in parts that fit into memory: some inputs, or some of their samples, at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from laplace_invariance.curvature import kfac
from laplace_invariance.curvature.engines import Engine
from laplace_invariance.curvature.engines.autograd import AutogradEngine
from laplace_invariance.curvature.recompute import pull_back_through, recomputed
from laplace_invariance.curvature.trace.calls import PerParameter, Trace
from laplace_invariance.curvature.trace.keep import keep, keep_batch, trim
from laplace_invariance.curvature.trace.matching import Match
from laplace_invariance.curvature.trace.shortcuts import shortcuts
from laplace_invariance.draws import Tape
from laplace_invariance.hyper import at_values, hyperparameters, original_of
from laplace_invariance.invariant import InvariantModel, with_values
from laplace_invariance.modes import as_written, in_modes, modes_of

__all__ = [
    "AnyTrace",
    "Chunk",
    "ChunkedTrace",
    "are_finite",
    "batch_size",
    "differentiate_over",
    "kept",
    "outside_of_inference",
    "part_of",
    "rows_of",
    "split",
    "sum_over",
]

Output = TypeVar("Output", Tensor, Tensor | None)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some inputs of a batch.

    Attributes:
        x: Inputs ``[n, ...]``, a mapping with such tensors in it, or any object for a whole batch.
        rows: Their place in the batch.
        tape: Random draws of the whole batch, which the recomputation replays.
    """

    x: Any
    rows: slice
    tape: Tape

    def draws(self) -> AbstractContextManager[None]:
        """Use the draws of these inputs inside the context."""
        return self.tape.playing(self.rows)


def batch_size(x: Any, key: str) -> int | None:
    """Return the number of inputs in a tensor, or in a mapping under the given key.

    It is None for other objects, such as a batch of graphs, which cannot be cut.

    Raises:
        KeyError: A mapping has no such key.
    """
    if isinstance(x, MutableMapping):
        if key not in x:
            raise KeyError(
                f"inputs have no {key!r}, only {', '.join(map(repr, x))}; Laplace(..., "
                "dict_key_x=...) says what has a row for every input"
            )
        return len(x[key])
    return len(x) if isinstance(x, Tensor) else None


def are_finite(x: Any, first: bool = True) -> bool:
    """Return whether all numbers of the inputs are finite.

    Args:
        x: Inputs ``[n, ...]``, or a mapping with such tensors in it.
        first: Whether they are the first that a backend sees. Others are looked at on a CPU only,
            as a GPU would have to be waited for.
    """
    for tensor in x.values() if isinstance(x, MutableMapping) else [x]:
        numbers = isinstance(tensor, Tensor) and tensor.is_floating_point()
        if numbers and not first and tensor.device.type != "cpu":
            continue
        # one number that is not finite makes the sum so; finite ones may do so as well, rarely
        if numbers and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            return False
    return True


def outside_of_inference(x: Any) -> Any:
    """Return inputs that autograd can save: copies of those made in ``torch.inference_mode()``."""
    if isinstance(x, Tensor):
        return x.clone() if x.is_inference() else x
    if isinstance(x, MutableMapping):
        tensors = {name: value for name, value in x.items() if isinstance(value, Tensor)}
        if any(tensor.is_inference() for tensor in tensors.values()):
            return with_values(x, {name: outside_of_inference(t) for name, t in tensors.items()})
    return x


def rows_of(x: Any, key: str) -> set[str]:
    """Return the names of tensors and lists of a mapping that have an entry for every input."""
    n = batch_size(x, key)
    names = set()
    for name, value in x.items():
        is_tensor = isinstance(value, Tensor) and value.ndim > 0
        if (is_tensor or isinstance(value, list | tuple)) and len(value) == n:
            names.add(name)
    return names


def part_of(x: Any, rows: slice, key: str, shared: Collection[str] = ()) -> Any:
    """Return some inputs of a tensor, or of a mapping with tensors in it.

    Args:
        x: Inputs ``[n, ...]``, or a mapping.
        rows: Which of them.
        key: Key of a tensor ``[n, ...]`` of a mapping. Others of ``n`` rows are cut alike; what has
            another number of rows, or none, belongs to all inputs.
        shared: Names of what belongs to all inputs although it has ``n`` rows.

    Returns:
        The part; the inputs themselves if these are all, or an object that cannot be cut.
    """
    n = batch_size(x, key)
    if n is None or rows.indices(n) == (0, n, 1):
        return x
    if isinstance(x, Tensor):
        return x[rows]
    names = rows_of(x, key) - {*shared}
    return with_values(x, {name: x[name][rows] for name in names})


def split(x: Any, size: int, key: str, n: int, shared: Collection[str] = ()) -> list[Chunk]:
    """Split a batch of ``n`` inputs into chunks of ``size``, or of one if that is less.

    What cannot be cut is one chunk. For the other arguments, see :func:`part_of`.
    """
    size = n if batch_size(x, key) is None else size
    size = max(1, size)
    tape = Tape(n)
    places = [slice(start, min(start + size, n)) for start in range(0, n, size)]
    return [Chunk(part_of(x, rows, key, shared), rows, tape) for rows in places]


def sum_over(
    chunks: Sequence[Chunk],
    terms: Callable[[Chunk, bool], list[Tensor]],
    match: Match,
    copied: bool = False,
    inputs: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """Sum terms over the chunks of a batch, as one node of the graph that recomputes them.

    Loss and curvature are sums over inputs, so the memory of the node is that of one chunk, in
    its forward and in its backward pass, and that of the graph is the chunks' inputs and draws.

    Args:
        chunks: The parts of the batch.
        terms: Computes the terms of a chunk, and whether to do so differentiably.
        match: Layers and parameters of the model.
        copied: Whether the model is laplace's copy of that of the user, whose hyperparameters
            then get the gradient of those of the copy, too.
        inputs: What the chunks have of tensors that others may change.

    Returns:
        The sums, differentiable with respect to the hyperparameters of the model.

    Raises:
        RuntimeError: In the backward pass, if weights, buffers or inputs are no longer those of the
            forward pass, or if the loss is another one for whatever reason, such as random numbers
            of the model's own. Hyperparameters and modes of modules are put back for it.
    """
    hyper = match.hyperparameters()
    users = _originals(match, hyper) if copied else {}
    before = match.guards.fingerprints(inputs) if hyper else None
    values = [tensor.detach().clone() for tensor in hyper]
    modes = modes_of(match.model)
    walks = match.guards.walks()
    n_walks = n_pulled = 0
    loss = torch.zeros(())

    def evaluate() -> list[Tensor]:
        nonlocal loss
        totals: list[Tensor] = []
        for chunk in chunks:
            with chunk.draws():
                found = [term.detach() for term in terms(chunk, False)]
            totals = list(map(torch.add, totals, found)) if totals else found
        tape = chunks[0].tape
        tape.closed = True
        if hyper:
            tape.draws = keep(tape.draws)
        loss = totals[0]
        return totals

    def pull_back(cotangents: Sequence[Tensor | None]) -> list[Tensor]:
        nonlocal n_walks, n_pulled
        n_walks = walks.count(n_walks, [*hyper, *users.values()])
        n_pulled += 1
        assert before is not None
        factor = match.guards.check(before, inputs, first=n_pulled > walks.latest)
        walks.latest = max(walks.latest, n_pulled)
        trim()
        losses: list[Tensor] = []

        def watched(chunk: Chunk, differentiate: bool) -> list[Tensor]:
            found = terms(chunk, differentiate)
            losses.append(found[0].detach())
            return found

        with as_written(), in_modes(modes), at_values(hyper, values):
            _, gradients = differentiate_over(chunks, watched, cotangents, match, values=False)
        repeats = match.guards.check_loss(loss, torch.stack(losses).sum())
        for scale in (factor, repeats):
            if scale is not None:
                gradients = [scale * gradient for gradient in gradients]
        theirs = [gradients[i].to(tensor, copy=True) for i, tensor in users.items()]
        return [*gradients, *theirs]

    return recomputed(evaluate, pull_back, [*hyper, *users.values()])


def kept(x: Any, y: Tensor, model: nn.Module) -> tuple[Any, Tensor, list[Tensor]]:
    """Return inputs and targets, outside of the heap if a backward pass may need them.

    And those of their tensors that could not be copied, which others may change.
    """
    learnt = any(tensor.requires_grad for tensor in hyperparameters(model))
    if not learnt or not torch.is_grad_enabled():
        return x, y, []
    trim()
    before = {id(tensor) for tensor in _tensors_of(x, y)}
    x, y = keep_batch(x, y)
    return x, y, [tensor for tensor in _tensors_of(x, y) if id(tensor) in before]


def _tensors_of(x: Any, y: Tensor) -> list[Tensor]:
    """Return all tensors of inputs, also of lists in a mapping, and of targets."""
    values = dict(x.items()) if isinstance(x, MutableMapping) else x
    return [leaf for leaf in tree_leaves([values, y]) if isinstance(leaf, Tensor)]


def _originals(match: Match, hyper: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return what hyperparameters of a copied model were copied from, by index."""
    found = {}
    for i, tensor in enumerate(hyper):
        original = original_of(match.model, tensor)
        if original is not None:
            found[i] = original
    return found


def differentiate_over(
    chunks: Sequence[Chunk],
    terms: Callable[[Chunk, bool], list[Tensor]],
    cotangents: Sequence[Tensor | None],
    match: Match,
    values: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """Sum terms over the chunks of a batch, and pull given cotangents of the sums back.

    Args:
        chunks: The parts of the batch. Draws are replayed if there were any before, else fresh.
        terms: Computes the terms of a chunk, and whether to do so differentiably.
        cotangents: A weight for each sum, or None.
        match: Layers and parameters of the model.
        values: Whether the sums are wanted.

    Returns:
        The sums without graph, or an empty list, and the gradient of each learnt hyperparameter.
    """
    hyper = match.hyperparameters()
    cotangents = [None if c is None else kfac.symmetrised(c) for c in cotangents]
    # shortcuts have no gradients of parameters, which those without a rule need
    modules = [] if match.others else list(match.model.modules())
    totals: list[Tensor] = []
    gradients = [torch.zeros_like(tensor) for tensor in hyper]
    for chunk in chunks:
        with chunk.draws(), shortcuts(modules), kfac.pulling_back(values):
            found = terms(chunk, True)
            pulled = pull_back_through(found, cotangents, hyper)
        if values:
            terms_of_chunk = [term.detach() for term in found]
            totals = list(map(torch.add, totals, terms_of_chunk)) if totals else terms_of_chunk
        for i, gradient in enumerate(pulled):
            if gradient is not None:
                gradients[i] = gradients[i] + gradient
    return totals, gradients


class ChunkedTrace:
    """Like :class:`Trace`, but the sum of several, each over some of the samples.

    Outputs, averaged inputs, averaged gradients and Jacobians are sums over samples. Each term is
    a recomputed node of its own, so that no more than one part's graph, of one column, is alive
    at a time. The price is one more forward pass per part, and per part and column in the
    backward pass.

    Args:
        x: Inputs ``[batch, ...]``.
        match: Layers and parameters of the model, an :class:`InvariantModel`.
        size: Number of samples in a part.
        engine: Engine that computes values; derivatives are computed by autograd.
        differentiate: Whether the curvature will be differentiated.

    Attributes:
        outputs: The model's outputs ``[batch, C]``.
        differentiate: Whether the curvature will be differentiated.
    """

    def __init__(
        self, x: Any, match: Match, size: int, engine: Engine, differentiate: bool
    ) -> None:
        assert isinstance(match.model, InvariantModel)
        draws = match.model.draw(len(match.model.inputs(x)))
        average = partial(match.model.average, draws=draws)
        starts = range(0, draws.shape[1], size)
        self._parts = [partial(average, part=slice(start, start + size)) for start in starts]
        self._x = x
        self._match = match
        self._engine = engine
        self.differentiate = differentiate
        (self.outputs,) = self._sum(_outputs)

    def averaged_inputs(self) -> PerParameter:
        """Return what each matrix is applied to, as :meth:`Trace.averaged_inputs`."""
        return self._sum(_averaged_inputs)

    def averaged_gradients(self, columns: Sequence[Tensor]) -> PerParameter:
        """Return gradients in every parameter, as :meth:`Trace.averaged_gradients`."""
        return self._join_columns(Trace.averaged_gradients, columns)

    def jacobian_columns(self, columns: Sequence[Tensor]) -> PerParameter:
        """Return the exact gradients of each input, as :meth:`Trace.jacobian_columns`."""
        return self._join_columns(Trace.jacobian_columns, columns)

    def _join_columns(
        self, evaluate: Callable[[Trace, Sequence[Tensor]], PerParameter], columns: Sequence[Tensor]
    ) -> PerParameter:
        found = [self._sum(evaluate, [column]) for column in columns]
        joined: PerParameter = []
        for tensors in zip(*found, strict=True):
            called = [tensor for tensor in tensors if tensor is not None]
            joined.append(torch.cat(called, dim=1) if called else None)
        return joined

    def _sum(
        self,
        evaluate: Callable[[Trace, Sequence[Tensor]], list[Output]],
        columns: Sequence[Tensor] = (),
    ) -> list[Output]:
        """Sum over parts, differentiably with respect to hyperparameters and columns."""
        totals = list(self._term(self._parts[0], evaluate, columns))
        for part in self._parts[1:]:
            for i, term in enumerate(self._term(part, evaluate, columns)):
                total = totals[i]
                if total is None:
                    totals[i] = term
                elif term is not None:
                    totals[i] = total + term
        return totals

    def _term(
        self,
        part: Callable[[Any], Tensor],
        evaluate: Callable[[Trace, Sequence[Tensor]], list[Output]],
        columns: Sequence[Tensor],
    ) -> tuple[Output, ...]:
        hyper: list[Tensor] = self._match.hyperparameters()

        def forward() -> list[Output]:
            with self._engine.run(part, self._x, self._match) as trace:
                return evaluate(trace, [column.detach() for column in columns])

        def pull_back(cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
            leaves: list[Tensor] = []
            for column in columns:
                leaves.append(column.detach().requires_grad_(column.requires_grad))
            engine = AutogradEngine(differentiate=True)
            with engine.run(part, self._x, self._match) as trace:
                outputs = evaluate(trace, leaves)
            return pull_back_through(outputs, cotangents, [*hyper, *leaves])

        return recomputed(forward, pull_back, [*hyper, *columns])


def _outputs(trace: Trace, columns: Sequence[Tensor]) -> list[Tensor]:
    return [trace.outputs]


def _averaged_inputs(trace: Trace, columns: Sequence[Tensor]) -> PerParameter:
    return trace.averaged_inputs()


AnyTrace = Trace | ChunkedTrace
