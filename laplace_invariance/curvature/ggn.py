"""Backends for laplace-torch whose curvature knows about samples, and differentiates in hyperparameters.

``laplace.Laplace(model, ..., backend=AugmentedGGN)``. Works on any model; on one without an ``InvariantModel`` inside it is
an ordinary backend that also covers normalisation layers, grouped convolutions and embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from laplace.curvature.curvature import CurvatureInterface, EFInterface, GGNInterface
from laplace.utils import Likelihood
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from laplace_invariance.curvature import kfac
from laplace_invariance.curvature.kron import DifferentiableKron
from laplace_invariance.curvature.recompute import checkpointed, pull_back_through
from laplace_invariance.curvature.rules import Block
from laplace_invariance.curvature.trace.calls import Trace
from laplace_invariance.curvature.trace.chunks import ChunkedTrace
from laplace_invariance.curvature.trace.matching import Match, match
from laplace_invariance.curvature.trace.shortcuts import shortcuts
from laplace_invariance.draws import fixed_draws, recording, replaying, taped
from laplace_invariance.hyper import differentiable, hyperparameters, is_differentiable
from laplace_invariance.invariant import InvariantModel

__all__ = ["AugmentedEF", "AugmentedGGN"]

# Elements of gradients that a chunk holds at once unless chunk_size says otherwise: of all columns with respect to the layers'
# outputs or, where a Jacobian is formed, to the parameters. Benchmarks.md has measurements.
CHUNK_ELEMENTS = 2**26

AnyTrace = Trace | ChunkedTrace
Curvature = Callable[[AnyTrace, Tensor], list[Tensor]]


class _AugmentedCurvature(CurvatureInterface):
    """What AugmentedGGN and AugmentedEF have in common: everything but the directions that are backpropagated."""

    def _configure(
        self, kfac_approx: str, per_slot: bool, chunk_size: int | None, on_unsupported: str
    ) -> None:
        if kfac_approx not in ("expand", "reduce"):
            raise ValueError(f"kfac_approx must be 'expand' or 'reduce', got {kfac_approx!r}")
        if on_unsupported not in ("error", "diag"):
            raise ValueError(f"on_unsupported must be 'error' or 'diag', got {on_unsupported!r}")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(
                f"chunk_size must be a positive number of rows, or None; got {chunk_size}"
            )
        self.kfac_approx = kfac_approx
        self.per_slot = per_slot
        self.chunk_size = chunk_size
        self.on_unsupported = on_unsupported
        self._match: Match | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_match": None
        }  # rules are closures, which cannot be pickled; it is matched again when used

    def _columns(self, outputs: Tensor, y: Tensor) -> tuple[Sequence[Tensor], Tensor | None]:
        """Return the directions to backpropagate, each ``[batch, C]``, and their weights ``M``, None for the identity."""
        raise NotImplementedError

    def _n_columns(self, n_outputs: int) -> int:
        """Return how many directions there will be."""
        raise NotImplementedError

    # The interface of laplace.

    def kron(self, x: Any, y: Tensor, N: int, **kwargs: Any) -> tuple[Tensor, DifferentiableKron]:
        """Return loss and Kronecker factors of a batch, ``[G, A / N]`` per matrix, differentiable in hyperparameters."""
        if kwargs:
            raise TypeError(
                f"unknown arguments {sorted(kwargs)}; options of the backend go into backend_kwargs"
            )
        matched = self._matched(x)
        if matched.unsupported and self.on_unsupported == "error":
            raise NotImplementedError(matched.complaint())
        lengths: list[int] = []

        def factors(trace: AnyTrace, y: Tensor) -> list[Tensor]:
            columns, weights = self._columns(trace.outputs, y)
            inputs, gradients = trace.averaged_inputs(), trace.averaged_gradients(columns)
            blocks: list[list[Tensor]] = []
            for index in self._indices:
                twin = matched.twins.get(index)
                if (
                    twin is not None
                    and twin < index
                    and twin in gradients
                    and gradients[twin].shape[2:-1].numel() == 1
                ):
                    blocks.append(
                        [blocks[twin][0]]
                    )  # one position: the block of the bias is the factor G
                else:
                    blocks.append(
                        self._factors(index, inputs.get(index), gradients.get(index), weights, N)
                    )
            lengths[:] = [len(block) for block in blocks]
            return [factor for block in blocks for factor in block]

        loss, *flat = self._differentiable(factors, x, y)
        rest = iter(flat)
        return loss, DifferentiableKron([[next(rest) for _ in range(length)] for length in lengths])

    def diag(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return loss and exact diagonal ``[P]`` of a batch, differentiable in hyperparameters."""

        def diagonal(trace: AnyTrace, y: Tensor) -> list[Tensor]:
            columns, weights = self._columns(trace.outputs, y)
            return [kfac.weighted_diagonal(self._jacobian(trace, columns), weights)]

        return self._differentiable(diagonal, x, y, explicit=True)

    def full(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return loss and exact curvature ``[P, P]`` of a batch, differentiable in hyperparameters."""

        def dense(trace: AnyTrace, y: Tensor) -> list[Tensor]:
            columns, weights = self._columns(trace.outputs, y)
            return [kfac.gram(self._jacobian(trace, columns), weights)]

        return self._differentiable(dense, x, y, explicit=True)

    def jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Return Jacobians ``[batch, C, P]`` and outputs ``[batch, C]``, with the fixed draws of predictions."""
        self._matched(x)
        jacobians, outputs = [], []
        with torch.enable_grad(), fixed_draws():
            for chunk in self._chunks(x, explicit=True):
                run = (
                    self._run(self.model, chunk, create_graph=True)
                    if enable_backprop
                    else self._trace(chunk)
                )
                with run as trace:
                    units = torch.eye(trace.outputs.shape[-1]).to(trace.outputs)
                    jacobians.append(
                        self._jacobian(trace, [unit.expand_as(trace.outputs) for unit in units])
                    )
                    outputs.append(trace.outputs)
                if not enable_backprop:
                    jacobians[-1], outputs[-1] = jacobians[-1].detach(), outputs[-1].detach()
        return torch.cat(jacobians), torch.cat(outputs)

    functorch_jacobians = jacobians  # what laplace asks for when "asdl" is part of a backend's name

    def last_layer_jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Return Jacobians of the last layer and outputs; features alone would not do, there are several per input."""
        return self.jacobians(x, enable_backprop)

    def gradients(self, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of each input's loss, ``[batch, P]``, and the summed loss, with fresh draws."""
        self._matched(x)
        chunks = self._chunks(x, explicit=True)
        gradients, loss = [], torch.zeros(())
        with torch.enable_grad():
            for chunk, targets in zip(chunks, self._split(y, chunks), strict=True):
                with self._trace(chunk) as trace:
                    column = self._loss_gradient(trace.outputs, targets).detach()
                    gradients.append(self._jacobian(trace, [column]).squeeze(1).detach())
                    loss = loss.to(column) + self.lossfunc(trace.outputs, targets).detach()
        return torch.cat(gradients), loss

    # Curvature of one chunk.

    def _factors(
        self,
        index: int,
        inputs: Tensor | None,
        gradients: Tensor | None,
        weights: Tensor | None,
        N: int,
    ) -> list[Tensor]:
        parameter, block = self.params[index], self._match.blocks.get(index)
        if gradients is None:  # its layer was not called
            return _zeros(parameter, block, self.per_slot)
        if block is None:
            return [kfac.weighted_diagonal(gradients, weights)]
        if block.elementwise:
            return [kfac.gram(gradients, weights)]
        kinds = {"slotted_columns": block.slotted_columns, "per_slot": self.per_slot}
        outer, inner = kfac.factors(inputs, gradients, weights, N, self.kfac_approx, **kinds)
        return [inner, outer] if block.transposed else [outer, inner]

    def _jacobian(self, trace: AnyTrace, columns: Sequence[Tensor]) -> Tensor:
        """Return the derivatives ``[batch, column, P]`` in all parameters, in their order."""
        exact = trace.jacobian_columns(columns)
        shape = (trace.batch, len(columns))
        zeros = {
            i: self.params[i].new_zeros(*shape, self.params[i].numel())
            for i in self._indices
            if i not in exact
        }
        jacobian = torch.cat([exact[i] if i in exact else zeros[i] for i in self._indices], dim=-1)
        return (
            jacobian if self.subnetwork_indices is None else jacobian[..., self.subnetwork_indices]
        )

    def _loss_gradient(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the derivative of the summed loss in the outputs, differentiable in these."""
        if self.likelihood == Likelihood.REGRESSION:
            return 2 * (outputs - y)
        return outputs.softmax(-1) - nn.functional.one_hot(y, outputs.shape[-1])

    # From chunks to a batch, and into the graph.

    def _differentiable(
        self, curvature: Curvature, x: Any, y: Tensor, explicit: bool = False
    ) -> tuple[Tensor, ...]:
        """Sum loss and curvature over chunks, as one node of the graph that recomputes them with a graph of its own."""
        self._matched(x)
        chunks = self._chunks(x, explicit)
        targets = self._split(y, chunks)
        tapes: list[list[Tensor]] = [[] for _ in chunks]
        hyper = self._hyperparameters()
        weights_then = self._fingerprint()

        def outputs(chunk: Any, y: Tensor, create_graph: bool) -> list[Tensor]:
            with self._trace(chunk, create_graph) as trace:
                if self.likelihood == Likelihood.REGRESSION and y.shape != trace.outputs.shape:
                    raise ValueError(
                        f"targets {list(y.shape)} must have the shape of the outputs {list(trace.outputs.shape)}"
                    )
                return [self.factor * self.lossfunc(trace.outputs, y), *curvature(trace, y)]

        def evaluate() -> list[Tensor]:
            totals: list[Tensor] = []
            for chunk, target, tape in zip(chunks, targets, tapes, strict=True):
                with recording(tape):
                    terms = [term.detach() for term in outputs(chunk, target, create_graph=False)]
                totals = (
                    [total + term for total, term in zip(totals, terms, strict=True)]
                    if totals
                    else terms
                )
            return totals

        def pull_back(cotangents: Sequence[Tensor | None]) -> list[Tensor]:
            if not torch.allclose(self._fingerprint(), weights_then, rtol=1e-5):
                raise RuntimeError(
                    "the weights changed after fit(), so its evidence has no gradient any more; fit again"
                )
            totals = [torch.zeros_like(tensor) for tensor in hyper]
            for chunk, target, tape in zip(chunks, targets, tapes, strict=True):
                with replaying(tape), differentiable(), self._twice_differentiable():
                    terms = outputs(chunk, target, create_graph=True)
                    gradients = pull_back_through(terms, cotangents, hyper)
                totals = [t if g is None else t + g for t, g in zip(totals, gradients, strict=True)]
            return totals

        return checkpointed(evaluate, pull_back, hyper)

    @contextmanager
    def _twice_differentiable(self) -> Iterator[None]:
        """Run layers so that their backward pass can be differentiated: at all (attention), and cheaply."""
        modules = [] if self._match.others else list(self.model.modules())
        with sdpa_kernel(SDPBackend.MATH), shortcuts(modules):
            yield

    @property
    def _indices(self) -> range:
        return range(len(self.params))

    def _fingerprint(self) -> Tensor:
        """Return numbers that tell whether the weights are the same."""
        return torch.stack([parameter.detach().abs().sum() for parameter in self.params])

    def _hyperparameters(self) -> list[Tensor]:
        return [tensor for tensor in hyperparameters(self.model) if tensor.requires_grad]

    def _trace(self, x: Any, create_graph: bool = False) -> AbstractContextManager[AnyTrace]:
        """Run the model on a chunk; if even one input has more samples than a chunk has rows, in parts."""
        size = self.chunk_size
        if size is not None and self._invariant_models() == [self.model] and self._samples() > size:
            draws = self.model.draw(len(x))
            parts = [slice(start, start + size) for start in range(0, draws.shape[1], size)]
            runs = [
                partial(self._run, partial(self.model.average, draws=draws, part=part), x)
                for part in parts
            ]
            return nullcontext(ChunkedTrace(runs, self._hyperparameters()))
        return self._run(self.model, x, create_graph)

    def _run(
        self, forward: Callable[[Any], Tensor], x: Any, create_graph: bool = False
    ) -> AbstractContextManager[Trace]:
        """Run the model forward: by the engine, or by autograd to differentiate; its gradients are to be had inside."""
        if create_graph or is_differentiable():
            return self._by_autograd(forward, x, create_graph)
        return self._by_engine(forward, x)

    def _by_engine(self, forward: Callable[[Any], Tensor], x: Any) -> AbstractContextManager[Trace]:
        return self._by_autograd(forward, x, create_graph=False)

    @contextmanager
    def _by_autograd(
        self, forward: Callable[[Any], Tensor], x: Any, create_graph: bool
    ) -> Iterator[Trace]:
        layers = self._match.layers
        with layers.capture() as calls:
            outputs = forward(x)
        layers.check(calls)
        yield Trace(outputs, calls, self._match.others, create_graph)

    def _samples(self) -> int:
        """Return the number of rows that one input becomes."""
        return math.prod(
            model.augmentation.count(model.n_samples) for model in self._invariant_models()
        )

    def _invariant_models(self) -> list[InvariantModel]:
        return [module for module in self.model.modules() if isinstance(module, InvariantModel)]

    def _batch_size(self, x: Any) -> int:
        return len(x[self.dict_key_x] if isinstance(x, MutableMapping) else x)

    def _split(self, y: Tensor, chunks: Sequence[Any]) -> tuple[Tensor, ...]:
        return y.split([self._batch_size(chunk) for chunk in chunks])

    def _chunks(self, x: Any, explicit: bool) -> list[Any]:
        """Split a batch so that a part has at most ``chunk_size`` rows, and its gradients a bounded size."""
        n = self._batch_size(x)
        elements = self._match.size + (
            sum(parameter.numel() for parameter in self.params) if explicit else 0
        )
        size = CHUNK_ELEMENTS // (
            elements * (self._n_columns(self._match.n_outputs) + 4)
        )  # 4: the forward pass
        if self.chunk_size is not None:
            size = self.chunk_size // self._samples()
        if self._match.others:  # autograd sums over the batch, so there must be one input in it
            size = 1
        size = max(1, size)
        return [_part(x, start, min(start + size, n)) for start in range(0, n, size)]

    def _matched(self, x: Any) -> Match:
        """Check the input, and match parameters with layers when called first."""
        for part in x.values() if isinstance(x, MutableMapping) else [x]:
            if (
                isinstance(part, Tensor)
                and part.is_floating_point()
                and not torch.isfinite(part).all()
            ):
                raise ValueError(
                    "the input holds NaN or infinite values, which would make the evidence NaN as well"
                )
        if self._match is None or self._match.n_inputs < min(2, self._batch_size(x)):
            self._match = match(self._model, self.params, self.model, _part(x, 0, 2))
            if self.likelihood == Likelihood.CLASSIFICATION and self._match.n_outputs < 2:
                raise ValueError(
                    "classification needs an output for each of at least two classes, the model has one output"
                )
        return self._match


def _zeros(parameter: Tensor, block: Block | None, per_slot: bool) -> list[Tensor]:
    """Return Kronecker factors of no curvature at all, in the shape that others would have."""
    if block is None:
        return [parameter.new_zeros(parameter.numel())]
    if block.elementwise:
        return [parameter.new_zeros(parameter.numel(), parameter.numel())]
    rows, columns, slots = len(parameter), parameter[0].numel(), block.slots
    if block.slotted_columns:
        outer = (slots, rows, rows) if per_slot else (rows, rows)
        return [
            parameter.new_zeros(outer),
            parameter.new_zeros(slots, columns // slots, columns // slots),
        ]
    return [parameter.new_zeros(rows, rows), parameter.new_zeros(columns, columns)]


def _part(x: Any, start: int, stop: int) -> Any:
    """Return inputs ``start`` to ``stop`` of a tensor or of a mapping with tensors in it."""
    if isinstance(x, MutableMapping):
        return type(x)({k: v[start:stop] if isinstance(v, Tensor) else v for k, v in x.items()})
    return x[start:stop]


class AugmentedGGN(_AugmentedCurvature, GGNInterface):
    """Generalised Gauss-Newton of a network averaged over samples, differentiable in its hyperparameters.

    Args:
        model: any module that maps ``[batch, ...]`` to ``[batch, outputs]``; an ``InvariantModel`` averages over samples.
        likelihood: ``"classification"`` or ``"regression"``.
        last_layer, subnetwork_indices, dict_key_x, dict_key_y: as in laplace-torch.
        stochastic: estimate the loss Hessian from random directions instead of all of them.
        num_samples: how many.
        output_rank: use this many leading eigenvectors of each input's loss Hessian (classification). A trained network
            confuses few classes, so two or three often carry nearly all of it; ``discarded`` tells. The gradient holds
            the eigenvectors fixed, which is exact at full rank.
        kfac_approx: ``"expand"`` or ``"reduce"``, for weights that are shared over positions.
        per_slot: for layers whose matrix has a part for each slot (factored and sparse fully connected ones), a gradient factor
            for each slot as well, instead of their mean: closer to the curvature, at no further backward pass.
        chunk_size: rows (inputs times samples) to propagate at once; fewer need less memory and, below the number of
            samples of one input, further forward passes.
        on_unsupported: ``"error"``, or ``"diag"`` for the exact diagonal of parameters without a rule in ``kron``.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        last_layer: bool = False,
        subnetwork_indices: torch.LongTensor | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        stochastic: bool = False,
        num_samples: int = 1,
        *,
        output_rank: int | None = None,
        kfac_approx: str = "expand",
        per_slot: bool = False,
        chunk_size: int | None = None,
        on_unsupported: str = "error",
    ) -> None:
        super().__init__(
            model,
            likelihood,
            last_layer,
            subnetwork_indices,
            dict_key_x,
            dict_key_y,
            stochastic,
            num_samples,
        )
        self._configure(kfac_approx, per_slot, chunk_size, on_unsupported)
        if output_rank is not None and output_rank < 1:
            raise ValueError(f"output_rank must be positive or None, got {output_rank}")
        if output_rank is not None and likelihood == Likelihood.REGRESSION:
            raise ValueError(
                "output_rank truncates the softmax Hessian; the one of regression is the identity"
            )
        if output_rank is not None and stochastic:
            raise ValueError("choose one of output_rank and stochastic")
        if num_samples < 1:
            raise ValueError(f"num_samples must be positive, got {num_samples}")
        self.output_rank = output_rank
        self._trace_kept = self._trace_total = 0.0

    @property
    def discarded(self) -> float:
        """The share of the loss Hessian's trace that ``output_rank`` left out, over all batches so far."""
        return 1 - self._trace_kept / self._trace_total if self._trace_total else 0.0

    def _n_columns(self, n_outputs: int) -> int:
        return (
            self.num_samples if self.stochastic else min(self.output_rank or n_outputs, n_outputs)
        )

    def _columns(self, outputs: Tensor, y: Tensor) -> tuple[Sequence[Tensor], Tensor | None]:
        classes = outputs.shape[-1]
        if self.stochastic:
            shape = (self.num_samples, *outputs.shape)
            signs = taped(
                lambda: torch.randint(2, shape, device=outputs.device).to(outputs.dtype) * 2 - 1
            )
            columns = (
                signs
                if self.likelihood == Likelihood.REGRESSION
                else kfac.sampled_directions(outputs, signs)
            )
            return columns / self.num_samples**0.5, None
        if self.likelihood == Likelihood.REGRESSION:
            return [unit.expand_as(outputs) for unit in torch.eye(classes).to(outputs)], None
        hessian = kfac.softmax_hessian(outputs)
        if self.output_rank is None or self.output_rank >= classes - 1:
            directions = kfac.complement_basis(classes, outputs).expand(len(outputs), -1, -1)
        else:
            directions, kept, total = kfac.leading_directions(hessian.detach(), self.output_rank)
            if not is_differentiable():  # once per batch, not again in its backward pass
                self._trace_kept, self._trace_total = (
                    self._trace_kept + kept.item(),
                    self._trace_total + total.item(),
                )
        return directions.unbind(-1), directions.mT @ hessian @ directions


class AugmentedEF(_AugmentedCurvature, EFInterface):
    """Empirical Fisher of a network averaged over samples, differentiable in its hyperparameters.

    Scaled as in laplace-torch: ``factor * sum_n g_n g_n^T`` with ``g_n`` the gradient of ``lossfunc``.

    Args: as for :class:`AugmentedGGN`.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        last_layer: bool = False,
        subnetwork_indices: torch.LongTensor | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        *,
        kfac_approx: str = "expand",
        per_slot: bool = False,
        chunk_size: int | None = None,
        on_unsupported: str = "error",
    ) -> None:
        super().__init__(model, likelihood, last_layer, subnetwork_indices, dict_key_x, dict_key_y)
        self._configure(kfac_approx, per_slot, chunk_size, on_unsupported)

    def _n_columns(self, n_outputs: int) -> int:
        return 1

    def _columns(self, outputs: Tensor, y: Tensor) -> tuple[Sequence[Tensor], Tensor | None]:
        # the root of the factor goes into the column, so that no weights are needed
        return [self.factor**0.5 * self._loss_gradient(outputs, y)], None
