"""What all backends have in common: from a batch to its loss, curvature and their gradient."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, MutableMapping, Sequence
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
from laplace_invariance.curvature.trace.features import average_features
from laplace_invariance.curvature.trace.guards import check_loader_of_fit
from laplace_invariance.curvature.trace.matching import Match, match
from laplace_invariance.draws import Share, fixed_draws, sharing
from laplace_invariance.hyper import differentiable
from laplace_invariance.modes import as_written
from laplace_invariance.precision import check_precision, single

__all__ = ["AugmentedCurvature", "check_count", "target_totals"]

# Elements of gradients that a chunk holds at once unless chunk_size says otherwise: of all
# columns with respect to the layers' outputs or, where a Jacobian is formed, to the parameters;
# the forward pass counts as some more columns. benchmarks/README.md has measurements.
CHUNK_ELEMENTS = 2**26
FORWARD_TENSORS = 4
SLACK = 0.25
IGNORED = nn.CrossEntropyLoss().ignore_index  # as a target: an input without loss


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
        self._finite = True  # the inputs of the present batch
        self._cut: set[str] = set()  # names of a mapping's tensors that have a row for every input
        self._shared: set[str] = set()  # and of those that belong to all inputs
        if last_layer:
            average_features(model)

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
            _refuse_unknown(kwargs)
        loss, *found = self._sum("kron", x, y, N)
        return loss, DifferentiableKron(self._by_parameter(found))

    def diag(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return loss and exact diagonal ``[P]`` of a batch, differentiable in hyperparameters.

        It does not depend on ``N``, which laplace passes.
        """
        _refuse_unknown(kwargs, "N")
        loss, diagonal = self._sum("diag", x, y)
        return loss, diagonal

    def full(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return loss and exact curvature ``[P, P]``, differentiable in hyperparameters.

        It does not depend on ``N``, which laplace passes.
        """
        _refuse_unknown(kwargs, "N")
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
        if chunks.batch_size(x, self.dict_key_x) == 0:
            return self._no_jacobians(x)
        jacobians, outputs = [], []
        with as_written(), torch.inference_mode(False), torch.enable_grad(), fixed_draws():
            x = single(chunks.outside_of_inference(x))
            matched = self._prepare(x)
            finite = self._finite
            n = chunks.batch_size(x, self.dict_key_x) or matched.n_inputs
            for chunk in self._split(x, matched, n, explicit=True):
                run = self._trace(chunk.x, matched)
                if enable_backprop:
                    run = AutogradEngine(differentiate=True).run(self.model, chunk.x, matched)
                with run as trace:
                    output = trace.outputs
                    jacobian = self._jacobian(trace, unit_directions(output))
                if not finite:
                    _check_finite([output, jacobian])
                if not enable_backprop:
                    jacobian, output = jacobian.detach(), output.detach()
                jacobians.append(jacobian)
                outputs.append(output)
        return torch.cat(jacobians), torch.cat(outputs)

    def _no_jacobians(self, x: Any) -> tuple[Tensor, Tensor]:
        """Return the Jacobians and outputs of an empty batch."""
        with torch.no_grad():
            outputs = self.model(x)
        n_parameters = sum(parameter.numel() for parameter in self.params)
        if self.subnetwork_indices is not None:
            n_parameters = len(self.subnetwork_indices)
        return outputs.new_zeros(*outputs.shape, n_parameters), outputs

    functorch_jacobians = jacobians  # laplace's name if "asdl" is part of that of the backend

    def last_layer_jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Return Jacobians of the last layer, whose features are several per input, and outputs."""
        return self.jacobians(x, enable_backprop)

    def selected_output_jacobians(
        self, x: Any, outputs: Tensor, enable_backprop: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return Jacobians ``[batch, k, P]`` of some outputs, and all outputs ``[batch, C]``.

        Args:
            x: Inputs ``[batch, ...]``; the draws of their samples are the fixed ones.
            outputs: Indices ``[batch]`` or ``[batch, k]`` of the outputs.
            enable_backprop: Whether the results can be differentiated with respect to ``x``.
        """
        jacobians, values = self.jacobians(x, enable_backprop)
        if len(outputs) != len(values):
            raise ValueError(f"there are indices for {len(outputs)} of {len(values)} inputs")
        indices = outputs.to(values.device).long().view(len(values), -1, 1)
        return jacobians.take_along_dim(indices, dim=1), values

    def gradients(self, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient ``[batch, P]`` of each input's loss, and the summed loss.

        The draws of samples are fresh.
        """
        gradients, losses = [], []
        with as_written(), torch.inference_mode(False), torch.enable_grad():
            x, y = (single(chunks.outside_of_inference(part)) for part in (x, y))
            matched = self._prepare(x)
            for chunk in self._split(x, matched, len(y), explicit=True):
                targets = y[chunk.rows]
                with chunk.draws(), self._trace(chunk.x, matched) as trace:
                    self._check_outputs(trace.outputs, targets)
                    column = self._loss_gradient(trace.outputs, targets).detach()
                    gradients.append(self._jacobian(trace, [column]).squeeze(1).detach())
                    losses.append(self.lossfunc(trace.outputs, targets).detach())
        return torch.cat(gradients), torch.stack(losses).sum()

    # A batch: what is matched, how it is split, and the sum over its parts.

    def _prepare(self, x: Any) -> Match:
        """Check model and inputs, and match parameters with layers on the first of them.

        Raises:
            ValueError: Inputs are not finite, nor are outputs; or what belongs to all inputs of a
                mapping may have a row for each.
        """
        check_precision(self.model)
        matched = self._last_match
        self._finite = chunks.are_finite(x, first=matched is None)
        if not self._finite:
            with torch.no_grad():
                _check_finite([self.model(x)])
        if isinstance(x, MutableMapping):
            self._find_rows(x)
        # one input does not show whether the first axis is that of the batch
        n = chunks.batch_size(x, self.dict_key_x)
        if matched is None or (n is not None and matched.n_inputs < min(2, n)):
            two = chunks.part_of(x, slice(2), self.dict_key_x, self._shared)
            with sharing(Share(0, 1, 2)):  # all of them are here
                matched = match(self._model, self.params, self.model, two)
            self._last_match = matched
        return matched

    def _find_rows(self, x: MutableMapping[str, Any]) -> None:
        """Find out what of a mapping has a row for every input.

        What once had another number of entries than the batch belongs to all inputs. Where numbers
        agree, outputs of half of the batch must be the same as in the batch.
        """
        key = self.dict_key_x
        rows = chunks.rows_of(x, key)
        self._shared |= {name for name in x if name not in rows}
        rows -= self._shared
        n = len(x[key])
        unknown = rows - self._cut - {key, self.dict_key_y}
        if n == 1 or not unknown:
            return
        half = slice((n + 1) // 2)
        with torch.no_grad(), fixed_draws():
            expected = self.model(x)[half]
            try:
                actual = self.model(chunks.part_of(x, half, key, self._shared))
            except (IndexError, RuntimeError, ValueError):
                actual = expected.new_empty(0)
        tolerance = 10 * torch.finfo(expected.dtype).eps ** 0.5
        same = actual.shape == expected.shape
        if not same or (actual - expected).abs().max() > tolerance * expected.abs().max():
            names = ", ".join(map(repr, sorted(unknown)))
            raise ValueError(
                f"outputs of some inputs differ from those in their batch, so that {names}, with "
                f"{n} entries as the batch has, may belong to all inputs; give it a first axis "
                "of 1, keep it in a buffer of the model, or use another batch size"
            )
        self._cut |= unknown

    def _split(self, x: Any, matched: Match, n: int, explicit: bool) -> list[Chunk]:
        """Split ``n`` inputs into chunks of ``chunk_size`` rows, or of bounded gradients.

        These are those of Jacobians, if explicit, or of outputs of layers.
        """
        size = self._chunk_size(matched, explicit)
        if self.chunk_size is None and size > 1:
            # equal parts, a little larger rather than one more with a few inputs
            n_chunks = max(1, math.ceil(n / size - SLACK))
            size = math.ceil(n / n_chunks)
        return chunks.split(x, size, self.dict_key_x, n, self._shared)

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
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                x, y = chunks.outside_of_inference(x), chunks.outside_of_inference(y)
                return self._sum(structure, x, y, N)
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
        finite = self._finite
        kron = structure == "kron"
        if kron and matched.objection is not None and self.on_unsupported == "error":
            raise NotImplementedError(matched.objection)
        n = chunks.batch_size(x, self.dict_key_x)
        if n not in (None, len(y)):
            raise ValueError(f"there are {len(y)} targets for {n} inputs")
        curvature = self._exact
        if kron:
            curvature = partial(self._factors, matched=matched, N=N)
        elif structure == "diag":
            curvature = partial(self._exact, product=kfac.weighted_diagonal)

        def terms(chunk: Chunk, differentiate: bool) -> list[Tensor]:
            with self._trace(chunk.x, matched, differentiate) as trace:
                outputs, targets = trace.outputs, y[chunk.rows]
                self._check_outputs(outputs, targets)
                found = [self.factor * self.lossfunc(outputs, targets), *curvature(trace, targets)]
                if not finite:
                    _check_finite(found)
                return found

        return self._split(x, matched, len(y), explicit=not kron), terms, matched

    def _check_outputs(self, outputs: Tensor, y: Tensor) -> None:
        """Raise unless targets are those of the outputs.

        Jacobians have no targets, and may be those of one output under "classification": reward
        models have two for training and one for prediction.
        """
        if len(outputs) != len(y):
            raise ValueError(f"there are {len(y)} targets for {len(outputs)} outputs")
        if self.likelihood == Likelihood.REGRESSION and y.shape != outputs.shape:
            raise ValueError(
                f"targets {list(y.shape)} must have the shape of the outputs {list(outputs.shape)}"
            )
        if self.likelihood == Likelihood.CLASSIFICATION and outputs.shape[-1] < 2:
            raise ValueError("classification needs at least two classes, the model has one output")

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
        by_autograd = differentiate or bool(matched.layers.used) or bool(matched.others)
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
        totals = target_totals(y).unsqueeze(-1)
        if not y.is_floating_point():
            y = nn.functional.one_hot(y.where(y != IGNORED, 0), outputs.shape[-1]) * totals
        return outputs.softmax(-1) * totals - y


def target_totals(y: Tensor) -> Tensor:
    """Return the total ``[batch]`` of each target of a classification.

    It is 1 for a class, 0 for an input that is ignored, and the sum of probabilities otherwise.
    """
    return y.sum(-1) if y.is_floating_point() else (y != IGNORED)


def _refuse_unknown(kwargs: dict[str, Any], *known: str) -> None:
    """Raise if there are arguments of other names."""
    names = sorted(kwargs.keys() - {*known})
    if names:
        raise TypeError(f"unknown arguments {names}; backend options go into backend_kwargs")


def _check_finite(tensors: Sequence[Tensor]) -> None:
    """Raise if what was computed from inputs that are not finite is not finite, either.

    Infinite masks, and missing values for which the model puts others, leave nothing behind.
    """
    if not all(torch.isfinite(tensor).all() for tensor in tensors):
        raise ValueError(
            "the input holds NaN or infinite values, and so do outputs or their curvature, which "
            "would make the evidence NaN as well"
        )
