"""Memory and work of one option: a fit of the curvature, its evidence, and the gradient of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laplace_invariance.curvature import eigen, kfac
from laplace_invariance.curvature.backend import AugmentedCurvature
from laplace_invariance.curvature.kron import DifferentiableKronDecomposed
from laplace_invariance.curvature.loss_hessian import Columns
from laplace_invariance.curvature.trace.chunks import AnyTrace, Chunk, differentiate_over
from laplace_invariance.hyper import differentiable
from laplace_invariance.marglik.plans.meter import Meter, Spent, on_shapes

__all__ = ["Batch", "Footprint", "footprint", "training_step"]

MOST_COLUMNS = 3  # that are run; of more, memory and work are on the line through the last two


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of the loader, and how many there are.

    Attributes:
        x: Inputs ``[batch, ...]`` or a mapping.
        y: Targets ``[batch, ...]``.
        n_data: Number of examples in all.
        n_batches: Number of batches in all.
    """

    x: Any
    y: Tensor
    n_data: int
    n_batches: int

    def shapes(self, shape_of: Callable[[Tensor], Tensor]) -> tuple[Any, Tensor]:
        """Return inputs and targets without their numbers."""
        if isinstance(self.x, Tensor):
            return shape_of(self.x), shape_of(self.y)
        values = {}
        for name, value in self.x.items():
            values[name] = shape_of(value) if isinstance(value, Tensor) else value
        return type(self.x)(values), shape_of(self.y)

    @property
    def nbytes(self) -> int:
        """Size of inputs and targets."""
        values = [self.x] if isinstance(self.x, Tensor) else self.x.values()
        return sum(value.nbytes for value in [*values, self.y] if isinstance(value, Tensor))


@dataclass(frozen=True)
class Footprint:
    """What an option takes.

    Attributes:
        factors: Bytes of the curvature.
        values: Most bytes that the curvature of a chunk takes while it is computed.
        gradients: The same while hyperparameters are differentiated; 0 if none is learnt.
        decomposition: Most bytes that the decomposition takes, and its result.
        vectors: Bytes that stay of it.
        evidence: Most bytes that the evidence and its derivatives in the curvature take.
        sizes: Rows of the matrices that are decomposed, each once.
        n_chunks: Number of chunks of a batch.
        chunk_rows: Number of inputs of a chunk.
        work: Work of a batch, with gradients if these are wanted.
        decomposition_work: Work of the decomposition.
    """

    factors: int
    values: int
    gradients: int
    decomposition: int
    vectors: int
    evidence: int
    sizes: tuple[int, ...]
    n_chunks: int
    chunk_rows: int
    work: float
    decomposition_work: float

    @property
    def chunk(self) -> int:
        """Most bytes of activations and gradients of a chunk, without the curvature itself."""
        return max(self.values - self.factors, self.gradients)

    def peak(self, n_batches: int, kept: int, zeros: int = 0) -> int:
        """Return the most bytes that a fit and the gradient of its evidence take.

        Args:
            n_batches: Number of batches.
            kept: Bytes of inputs that a fit keeps for its backward pass.
            zeros: Bytes of a curvature to which the first batch is added.
        """
        total = max(zeros, self.factors if n_batches > 1 else 0)  # of the batches before
        # the sum over chunks, and what the last one added to it
        of_chunks = min(self.n_chunks - 1, 2) * self.factors
        adding = 2 * self.factors if self.n_chunks == 1 else 3 * self.factors
        stages = [
            total + of_chunks + self.values,
            total + adding,
            self.factors + self.decomposition,
            self.factors + self.vectors + self.evidence,
        ]
        if self.gradients:  # with derivatives in all factors
            stages.append(2 * self.factors + self.vectors + self.gradients)
        return max(stages) + kept


@dataclass(frozen=True)
class _OfChunk:
    """What the curvature of one chunk takes, and the curvature itself."""

    values: float
    gradients: float
    work: float
    found: list[Tensor]
    lengths: list[int]

    def extended(self, before: _OfChunk, n_more: int) -> _OfChunk:
        """Return this for more columns, as it grew from one column less."""

        def more(now: float, less: float) -> float:
            return now + n_more * max(0.0, now - less)

        return _OfChunk(
            more(self.values, before.values),
            more(self.gradients, before.gradients),
            more(self.work, before.work),
            self.found,
            self.lengths,
        )


def footprint(
    backend: AugmentedCurvature, structure: str, batch: Batch, differentiate: bool
) -> Footprint:
    """Return what curvature takes, by running the backend on shapes alone.

    Args:
        backend: Backend of the model, in evaluation mode.
        structure: ``"kron"``, ``"diag"`` or ``"full"``.
        batch: A batch of the loader.
        differentiate: Whether hyperparameters are differentiated.

    Raises:
        NotImplementedError: A parameter has no rule, unless ``on_unsupported="diag"``.
    """
    matched = backend._prepare(batch.x)  # with numbers, which verify the rules
    free = [*backend.model.parameters(), *backend.model.buffers()]
    n_columns = backend._n_columns(matched.n_outputs)
    with on_shapes(free) as (meter, shape_of):
        x, y = batch.shapes(shape_of)
        chunks, terms, _ = backend._parts(structure, x, y, batch.n_data)
        run = partial(_of_chunk, meter, backend, structure, chunks[0], terms, differentiate)
        n_run = min(n_columns, MOST_COLUMNS)
        of_chunk = run(n_run)
        if n_columns > n_run:
            of_chunk = of_chunk.extended(run(n_run - 1), n_columns - n_run)
        _, *factors = of_chunk.found
        decomposed = meter.spent(lambda: _decomposed(structure, factors, differentiate))
        evidence = _evidence(meter, structure, of_chunk, decomposed.result, differentiate)
        unique = {id(factor): factor for factor in factors if structure == "kron"}
        sizes = [f.shape[-1] for f in unique.values() if f.ndim > 1]
        n_rows = chunks[0].rows.stop
        return Footprint(
            factors=sum(factor.nbytes for factor in factors),
            values=round(of_chunk.values),
            gradients=round(of_chunk.gradients),
            decomposition=decomposed.peak,
            vectors=decomposed.kept,
            evidence=evidence.peak,
            sizes=tuple(sizes),
            n_chunks=len(chunks),
            chunk_rows=n_rows,
            work=of_chunk.work * chunks[-1].rows.stop / n_rows,
            decomposition_work=decomposed.work + evidence.work,
        )


def _of_chunk(
    meter: Meter,
    backend: AugmentedCurvature,
    structure: str,
    chunk: Chunk,
    terms: Callable[[Chunk, bool], list[Tensor]],
    differentiate: bool,
    n_columns: int,
) -> _OfChunk:
    """Run one chunk with so many columns."""
    own = backend._columns

    def some(trace: AnyTrace, y: Tensor) -> Columns:
        columns, weights = own(trace, y)
        if weights is not None:
            weights = weights[:, :n_columns]
        return columns[:n_columns], weights

    def values() -> list[Tensor]:
        with chunk.draws():
            found = terms(chunk, False)
            alone = {id(term): term.detach() for term in found}
            return [alone[id(term)] for term in found]

    backend._columns = some  # type: ignore[method-assign]
    try:
        spent = meter.spent(values)
        lengths = []
        if structure == "kron":
            lengths = [len(own) for own in backend._by_parameter(spent.result[1:])]
        gradients: Spent[Any] | None = None
        if differentiate:
            cotangents = [torch.empty_like(term) for term in spent.result]
            gradients = meter.spent(partial(_pull_back, backend, chunk, terms, cotangents))
    finally:
        del backend._columns
    if gradients is None:
        return _OfChunk(spent.peak, 0, spent.work, spent.result, lengths)
    work = spent.work + gradients.work
    return _OfChunk(spent.peak, gradients.peak, work, spent.result, lengths)


def _pull_back(
    backend: AugmentedCurvature,
    chunk: Chunk,
    terms: Callable[[Chunk, bool], list[Tensor]],
    cotangents: list[Tensor],
) -> None:
    cotangents = [kfac.mark_symmetric(c) if c.ndim > 1 else c for c in cotangents]
    matched = backend._last_match
    assert matched is not None
    with torch.enable_grad(), differentiable():
        differentiate_over([chunk], terms, cotangents, matched, values=False)


def _decomposed(structure: str, factors: Sequence[Tensor], vectors: bool) -> list[eigen.Pair]:
    """Decompose every factor, and those that are the same once."""
    if structure != "kron":
        return []
    unique = {id(factor): factor for factor in factors}
    pairs = dict(zip(unique, eigen.decompose(list(unique.values()), vectors), strict=True))
    return [pairs[id(factor)] for factor in factors]


def _evidence(
    meter: Meter,
    structure: str,
    of_chunk: _OfChunk,
    pairs: Sequence[eigen.Pair],
    differentiate: bool,
) -> Spent[Any]:
    """Compute the log determinant, and its derivatives in the curvature."""
    leaves = [f.detach().requires_grad_(differentiate) for f in of_chunk.found[1:]]

    def evaluate() -> Any:
        determinant = _log_determinant(structure, leaves, of_chunk.lengths, pairs)
        return torch.autograd.grad(determinant, leaves) if differentiate else determinant

    return meter.spent(evaluate)


def _log_determinant(
    structure: str, leaves: list[Tensor], lengths: list[int], pairs: Sequence[eigen.Pair]
) -> Tensor:
    if structure != "kron":
        (matrix,) = leaves
        precision = matrix.new_ones(len(matrix))
        if structure == "diag":
            return (matrix + precision).log().sum()
        return (matrix + torch.diag(precision)).logdet()  # as laplace does
    rest, decomposed = iter(leaves), iter(pairs)
    factors = [[next(rest) for _ in range(n)] for n in lengths]
    own = [[next(decomposed) for _ in range(n)] for n in lengths]
    values = [[pair[0] for pair in group] for group in own]
    vectors = [[pair[1] for pair in group] for group in own]
    deltas = values[0][0].new_ones(len(lengths))
    return DifferentiableKronDecomposed(vectors, values, factors, deltas).logdet()


def training_step(backend: AugmentedCurvature, batch: Batch) -> Spent[None]:
    """Return what a training step on the weights takes, its gradients included."""
    weights = [p for p in backend.model.parameters() if p.requires_grad]
    free = [*backend.model.parameters(), *backend.model.buffers()]
    with on_shapes(free) as (meter, shape_of):
        x, y = batch.shapes(shape_of)

        def step() -> None:
            with torch.enable_grad():
                loss = backend.lossfunc(backend.model(x), y)
                torch.autograd.grad(loss, weights, allow_unused=True)

        return meter.spent(step)
