"""What all backends have in common: from a batch to its loss, curvature and their gradient."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from laplace.curvature.curvature import CurvatureInterface
from laplace.utils import FeatureExtractor, Likelihood
from torch import Tensor, nn

from laplace_invariance.curvature import kfac
from laplace_invariance.curvature.engines import Engine
from laplace_invariance.curvature.engines.autograd import AutogradEngine
from laplace_invariance.curvature.kron import DifferentiableKron
from laplace_invariance.curvature.loss_hessian import Columns, unit_directions
from laplace_invariance.curvature.rules import MatrixBlock, no_factors
from laplace_invariance.curvature.trace import chunks
from laplace_invariance.curvature.trace.calls import Trace
from laplace_invariance.curvature.trace.chunks import AnyTrace, Chunk, ChunkedTrace
from laplace_invariance.curvature.trace.guards import check_loader_of_fit
from laplace_invariance.curvature.trace.matching import Match, match
from laplace_invariance.draws import Share, fixed_draws, sharing
from laplace_invariance.hyper import differentiable
from laplace_invariance.modes import as_written
from laplace_invariance.precision import check_precision, single

__all__ = ["AugmentedCurvature", "check_count"]

# Elements of gradients that a chunk holds at once unless chunk_size says otherwise: of all
# columns with respect to the layers' outputs or, where a Jacobian is formed, to the parameters;
# the forward pass counts as some more columns. benchmarks/README.md has measurements.
CHUNK_ELEMENTS = 2**26
FORWARD_TENSORS = 4
SLACK = 0.25


def check_count(name: str, value: int | None) -> None:
    """Raise ValueError unless an option is a positive integer, or None."""
    if value is not None and (not isinstance(value, numbers.Integral) or value < 1):
        raise ValueError(f"{name} must be a positive integer or None, got {value!r}")


class AugmentedCurvature(CurvatureInterface):
    """All of AugmentedGGN and AugmentedEF but the directions that are backpropagated."""

    engine: ClassVar[Engine] = AutogradEngine()

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
        **kwargs: Any,
    ) -> None:
        keys = (dict_key_x, dict_key_y)
        super().__init__(model, likelihood, last_layer, subnetwork_indices, *keys, **kwargs)
        if kfac_approx not in ("expand", "reduce"):
            raise ValueError(f"kfac_approx must be 'expand' or 'reduce', got {kfac_approx!r}")
        if on_unsupported not in ("error", "diag"):
            raise ValueError(f"on_unsupported must be 'error' or 'diag', got {on_unsupported!r}")
        check_count("chunk_size", chunk_size)
        self.kfac_approx = kfac_approx
        self.per_slot = per_slot
        self.chunk_size = chunk_size
        self.on_unsupported = on_unsupported
        self._last_match: Match | None = None

    def __getstate__(self) -> dict[str, Any]:
        # rules are closures, which cannot be pickled; a copy matches again when it is used
        return self.__dict__ | {"_last_match": None}

    # The interface of laplace.

    def kron(self, x: Any, y: Tensor, N: int, **kwargs: Any) -> tuple[Tensor, DifferentiableKron]:
        """Return loss and Kronecker factors of a batch, differentiable in hyperparameters.

        For each matrix they are ``[G, A / N]``, for other parameters ``[H]``.

        Raises:
            NotImplementedError: A parameter has no rule, unless ``on_unsupported="diag"``.
        """
        if kwargs:
            names = sorted(kwargs)
            raise TypeError(f"unknown arguments {names}; backend options go into backend_kwargs")
        loss, *found = self._sum("kron", x, y, N)
        return loss, DifferentiableKron(self._by_parameter(found))

    def diag(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return loss and exact diagonal ``[P]`` of a batch, differentiable in hyperparameters."""
        loss, diagonal = self._sum("diag", x, y)
        return loss, diagonal

    def full(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return loss and exact curvature ``[P, P]``, differentiable in hyperparameters."""
        loss, matrix = self._sum("full", x, y)
        return loss, matrix

    def pull_back(
        self,
        structure: str,
        x: Any,
        y: Tensor,
        N: int,
        cotangents: Sequence[Tensor | None],
        values: bool = True,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return loss and curvature of a batch, and what given cotangents are in hyperparameters.

        All in one pass, for callers who know what they will differentiate: nothing is kept, and
        nothing is computed twice. Draws are fresh. Cotangents that are used for many batches are
        best passed through :func:`~laplace_invariance.curvature.kfac.symmetrised` once.

        Args:
            structure: ``"kron"``, ``"diag"`` or ``"full"``.
            x: Inputs ``[batch, ...]``.
            y: Targets ``[batch, ...]``.
            N: Size of the data set.
            cotangents: A weight of the loss, and of each tensor of the curvature; None is zero.
            values: Whether loss and curvature are wanted; without them, gradients are cheaper.

        Returns:
            Loss and tensors of the curvature, those of Kronecker factors in one list, without
            graph, or an empty list; and the gradient of each hyperparameter of the model that
            requires grad.
        """
        with as_written(), torch.enable_grad(), differentiable():
            parts, terms, matched = self._parts(structure, single(x), single(y), N)
            return chunks.differentiate_over(parts, terms, cotangents, matched, values)

    def jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Return Jacobians ``[batch, C, P]`` and outputs ``[batch, C]``, as for predictions.

        Args:
            x: Inputs ``[batch, ...]``; the draws of their samples are the fixed ones.
            enable_backprop: Whether the results can be differentiated with respect to ``x``.
        """
        x = single(x)
        jacobians, outputs = [], []
        with as_written(), torch.enable_grad(), fixed_draws():
            matched = self._prepare(x)
            for chunk in self._split(x, matched, explicit=True):
                run = self._trace(chunk.x, matched)
                if enable_backprop:
                    run = AutogradEngine(differentiate=True).run(self.model, chunk.x, matched)
                with run as trace:
                    output = trace.outputs
                    jacobian = self._jacobian(trace, unit_directions(output))
                if not enable_backprop:
                    jacobian, output = jacobian.detach(), output.detach()
                jacobians.append(jacobian)
                outputs.append(output)
        return torch.cat(jacobians), torch.cat(outputs)

    functorch_jacobians = jacobians  # laplace's name if "asdl" is part of that of the backend

    def last_layer_jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Return Jacobians of the last layer, whose features are several per input, and outputs."""
        return self.jacobians(x, enable_backprop)

    def gradients(self, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient ``[batch, P]`` of each input's loss, and the summed loss.

        The draws of samples are fresh.
        """
        x, y = single(x), single(y)
        gradients, losses = [], []
        with as_written(), torch.enable_grad():
            matched = self._prepare(x)
            for chunk in self._split(x, matched, explicit=True):
                targets = y[chunk.rows]
                with chunk.draws(), self._trace(chunk.x, matched) as trace:
                    column = self._loss_gradient(trace.outputs, targets).detach()
                    gradients.append(self._jacobian(trace, [column]).squeeze(1).detach())
                    losses.append(self.lossfunc(trace.outputs, targets).detach())
        return torch.cat(gradients), torch.stack(losses).sum()

    # A batch: what is matched, how it is split, and the sum over its parts.

    def _prepare(self, x: Any) -> Match:
        """Check model and inputs, and match parameters with layers on the first of them."""
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "curvature needs gradients, which torch.inference_mode() switches off for good; "
                "leave it, or use torch.no_grad() instead"
            )
        check_precision(self.model)
        matched = self._last_match
        chunks.check_finite(x, first=matched is None)
        # one input does not show whether the first axis is that of the batch
        if matched is None or matched.n_inputs < min(2, chunks.batch_size(x, self.dict_key_x)):
            two = chunks.part_of(x, slice(2), self.dict_key_x)
            with sharing(Share(0, 1, 2)):  # all of them are here
                matched = match(self._model, self.params, self.model, two)
            if self.likelihood == Likelihood.CLASSIFICATION and matched.n_outputs < 2:
                raise ValueError(
                    "classification needs at least two classes, the model has one output"
                )
            self._last_match = matched
        return matched

    def _split(self, x: Any, matched: Match, explicit: bool) -> list[Chunk]:
        """Split a batch into chunks of ``chunk_size`` rows, or of bounded (explicit) gradients."""
        size = self._chunk_size(matched, explicit)
        n = chunks.batch_size(x, self.dict_key_x)
        if self.chunk_size is None and size > 1:
            # equal parts, a little larger rather than one more with a few inputs
            n_chunks = max(1, math.ceil(n / size - SLACK))
            size = math.ceil(n / n_chunks)
        return chunks.split(x, size, self.dict_key_x)

    def _chunk_size(self, matched: Match, explicit: bool) -> int:
        """Return the number of inputs with ``chunk_size`` rows, or bounded (explicit) gradients."""
        if matched.others:  # autograd sums over the batch, so there must be one input in it
            return 1
        if self.chunk_size is not None:
            return self.chunk_size // matched.n_samples()
        elements = matched.size
        if explicit:
            elements += sum(parameter.numel() for parameter in matched.parameters)
        return CHUNK_ELEMENTS // (elements * (self._n_columns(matched.n_outputs) + FORWARD_TENSORS))

    def _sum(self, structure: str, x: Any, y: Tensor, N: int = 1) -> tuple[Tensor, ...]:
        """Sum loss and curvature over chunks, differentiably in hyperparameters."""
        check_loader_of_fit()
        x, y, shared = chunks.kept(single(x), single(y), self.model)
        copied = self.last_layer and isinstance(self.model, FeatureExtractor)
        with as_written():
            return chunks.sum_over(*self._parts(structure, x, y, N), copied, shared)

    def _parts(
        self, structure: str, x: Any, y: Tensor, N: int
    ) -> tuple[list[Chunk], Callable[[Chunk, bool], list[Tensor]], Match]:
        """Return the chunks of a batch, and the function that computes loss and curvature of one.

        Raises:
            NotImplementedError: A parameter has no rule, unless ``on_unsupported="diag"``.
        """
        matched = self._prepare(x)
        kron = structure == "kron"
        if kron and matched.objection is not None and self.on_unsupported == "error":
            raise NotImplementedError(matched.objection)
        if (n := chunks.batch_size(x, self.dict_key_x)) != len(y):
            raise ValueError(f"there are {len(y)} targets for {n} inputs")
        curvature = self._exact
        if kron:
            curvature = partial(self._factors, matched=matched, N=N)
        elif structure == "diag":
            curvature = partial(self._exact, product=kfac.weighted_diagonal)

        def terms(chunk: Chunk, differentiate: bool) -> list[Tensor]:
            with self._trace(chunk.x, matched, differentiate) as trace:
                outputs, targets = trace.outputs, y[chunk.rows]
                if self.likelihood == Likelihood.REGRESSION and targets.shape != outputs.shape:
                    raise ValueError(
                        f"targets {list(targets.shape)} must have the shape of the outputs "
                        f"{list(outputs.shape)}"
                    )
                return [self.factor * self.lossfunc(outputs, targets), *curvature(trace, targets)]

        return self._split(x, matched, explicit=not kron), terms, matched

    def _by_parameter(self, factors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Part a list of Kronecker factors by parameter, two for each matrix."""
        assert self._last_match is not None
        rest = iter(factors)
        found = []
        for block in self._last_match.blocks:
            n_factors = 2 if isinstance(block, MatrixBlock) else 1
            found.append([next(rest) for _ in range(n_factors)])
        return found

    # A chunk: its trace, and the curvature that is made of it.

    def _trace(
        self, x: Any, matched: Match, differentiate: bool = False
    ) -> AbstractContextManager[AnyTrace]:
        """Run the model; in parts, if one input has more samples than a chunk has rows."""
        # hooks of other packages are on modules, and do not see what is used outside of these
        by_autograd = differentiate or bool(matched.layers.used)
        engine = AutogradEngine() if by_autograd else self.engine
        size = self.chunk_size
        if size is not None and matched.is_average() and matched.n_samples() > size:
            return nullcontext(ChunkedTrace(x, matched, size, engine, differentiate))
        if differentiate:
            engine = AutogradEngine(differentiate=True)
        return engine.run(self.model, x, matched)

    def _columns(self, trace: AnyTrace, y: Tensor) -> Columns:
        """Return the directions to backpropagate, and their weights."""
        raise NotImplementedError

    def _n_columns(self, n_outputs: int) -> int:
        """Return the number of directions that will be backpropagated."""
        raise NotImplementedError

    def _factors(self, trace: AnyTrace, y: Tensor, matched: Match, N: int) -> list[Tensor]:
        """Return the Kronecker factors of all parameters, two for each matrix."""
        columns, weights = self._columns(trace, y)
        counts = self.kfac_approx == "expand" and matched.n_samples() == 1
        if counts and isinstance(trace, Trace):
            inputs = trace.averaged_inputs(counts=True)
        else:
            inputs = trace.averaged_inputs()
        gradients = trace.averaged_gradients(columns)
        factors: list[list[Tensor]] = []
        for index, parameter in enumerate(matched.parameters):
            block, a, g = matched.blocks[index], inputs[index], gradients[index]
            twin = matched.twins.get(index, index)
            weight = gradients[twin]
            if g is None:  # its layer was not called
                own = no_factors(block, parameter, self.per_slot, counts)
            elif isinstance(block, MatrixBlock) and a is not None:
                own = block.factors(a, g, weights, N, self.kfac_approx, self.per_slot)
            elif twin < index and weight is not None and weight.shape[2:-1].numel() == 1:
                own = factors[twin][:1]  # with one position, the block of a bias is the factor G
            elif block is None:
                own = [kfac.weighted_diagonal(g, weights)]
            else:
                own = [kfac.gram(g, weights)]
            factors.append(own)
        return list(chain.from_iterable(factors))

    def _exact(
        self,
        trace: AnyTrace,
        y: Tensor,
        product: Callable[[Tensor, Tensor | None], Tensor] = kfac.gram,
    ) -> list[Tensor]:
        """Return the exact curvature, or its diagonal."""
        columns, weights = self._columns(trace, y)
        return [product(self._jacobian(trace, columns), weights)]

    def _jacobian(self, trace: AnyTrace, columns: Sequence[Tensor]) -> Tensor:
        """Return the derivatives ``[batch, column, P]`` in all parameters, in their order."""
        shape = (len(trace.outputs), len(columns))
        found = []
        for parameter, exact in zip(self.params, trace.jacobian_columns(columns), strict=True):
            if exact is None:  # its layer was not called
                exact = parameter.new_zeros(*shape, parameter.numel())
            found.append(exact)
        jacobian = torch.cat(found, dim=-1)
        if self.subnetwork_indices is None:
            return jacobian
        return jacobian[..., self.subnetwork_indices]

    def _loss_gradient(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the derivative of the summed loss in the outputs, differentiable in these."""
        if self.likelihood == Likelihood.REGRESSION:
            return 2 * (outputs - y)
        return outputs.softmax(-1) - nn.functional.one_hot(y, outputs.shape[-1])
