"""Lower bounds of the evidence from tangent kernels of minibatches.

With ``psi`` the rows ``L_n^T J_n`` of all inputs n, ``L_n L_n^T`` the loss Hessian, the exact log
determinant of the linearised Laplace approximation, relative to the prior, is that of
``I + psi P0^-1 psi^T``. Leaving out entries between the blocks of any partition of the rows can
only increase it (Fischer's inequality), so that the evidence, which has it with factor -1/2, is
bounded from below by a sum over blocks. This is estimated without bias from one minibatch:

    full:    a block for each minibatch, with all columns of L
    output:  a block for each minibatch and column of L
    single:  one random column instead of all, times their number: ``output`` in expectation

A minibatch may be any random subset of B of the N inputs: by Han's inequality, ``(N / B) log det``
of its block is an upper bound in expectation also where B does not divide N, and the tighter the
larger B is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import pi, sqrt
from typing import Any

import torch
from laplace.utils import Likelihood
from torch import Tensor, nn

from laplace_invariance.curvature.backend import target_totals
from laplace_invariance.curvature.engines.autograd import AutogradEngine
from laplace_invariance.curvature.ggn import AugmentedGGN
from laplace_invariance.curvature.kernels import (
    log_determinant,
    matrix_kernel,
    softmax_root,
    vector_kernel,
)
from laplace_invariance.curvature.loss_hessian import unit_directions
from laplace_invariance.curvature.recompute import pull_back_through, recomputed
from laplace_invariance.curvature.rules import ElementwiseBlock
from laplace_invariance.curvature.trace.calls import Trace
from laplace_invariance.curvature.trace.shortcuts import shortcuts
from laplace_invariance.hyper import differentiable
from laplace_invariance.modes import as_written, evaluation
from laplace_invariance.precision import single

__all__ = ["KINDS", "BoundEstimate", "TangentKernelBound", "tangent_kernel"]

KINDS = ("full", "output", "single")

# Elements of the kernels of a minibatch, above which they are refused; a gigabyte in double
# precision. There are three such tensors at a time.
KERNEL_ELEMENTS = 2**27


@dataclass(frozen=True, eq=False)
class BoundEstimate:
    """A lower bound of the evidence, estimated from one minibatch, and its gradients.

    ``evidence = log_likelihood - 0.5 * (log_det_ratio + scatter)``, all for the whole data set.

    Attributes:
        evidence: The estimate, without graph, as are all other tensors.
        log_likelihood: Log likelihood of the data, estimated.
        log_det_ratio: Log determinant of the posterior precision over that of the prior, estimated.
        scatter: Square norm of the weights, weighted by the prior precisions.
        precision_gradient: Derivative of the evidence in the prior precisions, shaped as these.
        noise_gradient: Derivative in the noise, None without noise.
        hyperparameter_gradients: Derivative in each hyperparameter of the model that requires grad,
            in the order of :func:`~laplace_invariance.hyperparameters`.
    """

    evidence: Tensor
    log_likelihood: Tensor
    log_det_ratio: Tensor
    scatter: Tensor
    precision_gradient: Tensor
    noise_gradient: Tensor | None
    hyperparameter_gradients: list[Tensor]


class TangentKernelBound:
    """Lower bounds of the evidence of an averaged network, estimated from single minibatches.

    The curvature is the exact generalised Gauss-Newton of the average over samples, as that of
    ``hessian_structure="full"``, with which the bound agrees if one minibatch is all of the data.
    The memory is that of one minibatch with all of its backward passes, and its kernels.

    Args:
        model: Maps ``[batch, ...]`` to ``[batch, C]``; it is run in evaluation mode.
        likelihood: ``"classification"`` or ``"regression"``.
        kind: ``"full"``, ``"output"`` or ``"single"``, from tight to cheap.
        generator: Source of the columns of ``"single"``; None is torch's default generator.
        dict_key_x: Key of the inputs, for models that take a mapping.

    Raises:
        ValueError: There is no such kind of bound.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        kind: str = "full",
        *,
        generator: torch.Generator | None = None,
        dict_key_x: str = "input_ids",
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
        self._backend = AugmentedGGN(model, likelihood, dict_key_x=dict_key_x)
        self._regression = self._backend.likelihood == Likelihood.REGRESSION
        self.model = model
        self.kind = kind
        self.generator = generator

    def log_determinant(
        self,
        x: Any,
        prior_precision: Tensor,
        factor: Tensor | float = 1.0,
        column: int | None = None,
    ) -> Tensor:
        """Return the log determinant of a minibatch's blocks, relative to the prior.

        Its sum over the minibatches of a partition is an upper bound of laplace's
        ``log_det_ratio``.

        Args:
            x: Inputs ``[batch, ...]``, whose draws are fresh.
            prior_precision: One, or one for each parameter tensor.
            factor: Factor of the loss Hessian, laplace's ``_H_factor``: the inverse of temperature
                and variance of the noise.
            column: Column of the root of the loss Hessian for ``"single"``; None is a random one.

        Returns:
            Scalar, differentiable once in prior precisions, factor and hyperparameters; its
            gradients are known by then, and nothing else is kept.
        """
        if not isinstance(factor, Tensor):
            factor = prior_precision.new_full((), factor)
        factor = factor.to(prior_precision)
        given = [prior_precision, factor]

        def terms(trace: Trace, precision: Tensor, factor: Tensor) -> list[Tensor]:
            return [self._log_determinant(trace, precision, factor, column)]

        (value,), gradients, hyper = self._differentiate(x, given, terms)

        def pull_back(cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
            (cotangent,) = cotangents
            assert cotangent is not None
            return [cotangent * gradient for gradient in gradients]

        (result,) = recomputed(lambda: [value], pull_back, [*given, *hyper])
        return result

    def estimate(
        self,
        x: Any,
        y: Tensor,
        N: int,
        prior_precision: Tensor,
        noise: Tensor | None = None,
        temperature: float = 1.0,
        column: int | None = None,
    ) -> BoundEstimate:
        """Return an unbiased estimate of the bound from a minibatch, and all gradients of it.

        All in one pass with fresh draws. To step what the prior precisions were made of, use
        ``prior_precision.backward(estimate.precision_gradient)``, and so for the noise.

        Args:
            x: Inputs ``[batch, ...]``, a random subset of the data.
            y: Targets ``[batch, ...]``.
            N: Size of the data set.
            prior_precision: One, or one for each parameter tensor.
            noise: Standard deviation of the noise of a regression; None is 1, without gradient.
            temperature: Temperature of the likelihood, as in laplace.
            column: Column of the root of the loss Hessian for ``"single"``; None is a random one.

        Raises:
            NotImplementedError: A parameter has no rule, or there is a prior precision for every
                number.
            ValueError: The kernel of so many inputs would be too large, or arguments do not fit.
        """
        if noise is not None and not self._regression:
            raise ValueError("a classification has no noise")
        sigma = prior_precision.new_ones(1) if noise is None else noise

        def terms(trace: Trace, precision: Tensor, sigma: Tensor) -> list[Tensor]:
            factor = 1 / sigma.square() / temperature
            share = N / len(trace.outputs)
            log_likelihood = -factor * share * self._loss(trace.outputs, y)
            if self._regression:
                n_targets = N * trace.outputs.shape[-1]
                log_likelihood = log_likelihood - n_targets * (sigma * sqrt(2 * pi)).log()
            log_det_ratio = share * self._log_determinant(trace, precision, factor, column, y)
            scatter = self._scatter(precision)
            evidence = log_likelihood - 0.5 * (log_det_ratio + scatter)
            return [term.squeeze() for term in (evidence, log_likelihood, log_det_ratio, scatter)]

        values, gradients, _ = self._differentiate(x, [prior_precision, sigma], terms)
        evidence, log_likelihood, log_det_ratio, scatter = values
        precision_gradient, noise_gradient, *rest = gradients
        return BoundEstimate(
            evidence,
            log_likelihood,
            log_det_ratio,
            scatter,
            precision_gradient,
            noise_gradient=None if noise is None else noise_gradient,
            hyperparameter_gradients=rest,
        )

    def _differentiate(
        self, x: Any, given: Sequence[Tensor], terms: Callable[..., list[Tensor]]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Evaluate terms of a minibatch, and differentiate the first of them.

        Args:
            x: Inputs ``[batch, ...]``.
            given: Tensors that the terms depend on.
            terms: Computes the terms from the minibatch's trace and the given tensors.

        Returns:
            The terms without graph, the gradients of the first one in the given tensors and in
            hyperparameters, zero where there is none, and these hyperparameters.
        """
        x = single(x)
        with as_written(), evaluation(self.model), torch.enable_grad(), differentiable():
            matched = self._backend._prepare(x)
            if matched.objection is not None:
                raise NotImplementedError(f"tangent kernels need rules; {matched.objection}")
            hyper = matched.hyperparameters()
            leaves = [tensor.detach().requires_grad_() for tensor in given]
            engine = AutogradEngine(differentiate=bool(hyper))
            modules = list(self.model.modules()) if hyper else []
            with shortcuts(modules), engine.run(self.model, x, matched) as trace:
                values = terms(trace, *leaves)
                wanted = [*leaves, *hyper]
                pulled = pull_back_through(values[:1], [torch.ones_like(values[0])], wanted)
        gradients = []
        for tensor, gradient in zip(wanted, pulled, strict=True):
            gradients.append(torch.zeros_like(tensor) if gradient is None else gradient)
        return [value.detach() for value in values], gradients, hyper

    def _log_determinant(
        self,
        trace: Trace,
        precision: Tensor,
        factor: Tensor,
        column: int | None,
        y: Tensor | None = None,
    ) -> Tensor:
        """Return the log determinant of a minibatch's blocks, in a graph."""
        scales = self._per_tensor(factor / precision)
        if self._regression:
            columns = torch.stack(unit_directions(trace.outputs))
        else:
            columns = softmax_root(trace.outputs, reduced=self.kind == "full")
            if y is not None:
                columns = columns * target_totals(y).to(columns.dtype).sqrt().unsqueeze(-1)
        self._check_size(len(trace.outputs), len(columns))
        if self.kind != "single":
            kernels = tangent_kernel(trace, columns, scales, blocked=self.kind == "output")
            return log_determinant(kernels)
        if column is None:
            device = None if self.generator is None else self.generator.device
            drawn = torch.randint(len(columns), (), generator=self.generator, device=device)
            column = int(drawn)
        kernels = tangent_kernel(trace, columns[column : column + 1], scales)
        return len(columns) * log_determinant(kernels)

    def _check_size(self, n_inputs: int, n_outputs: int) -> None:
        """Raise if the kernels of a minibatch would be too large."""
        sizes = {
            "full": (n_inputs * n_outputs) ** 2,
            "output": n_outputs * n_inputs**2,
            "single": n_inputs**2,
        }
        if (size := sizes[self.kind]) <= KERNEL_ELEMENTS:
            return
        scale = sqrt(KERNEL_ELEMENTS / size)
        cheaper = [kind for kind, other in sizes.items() if other <= KERNEL_ELEMENTS]
        ways = [f"minibatches of at most {int(n_inputs * scale)}"]
        ways += [f"kind={kind!r}" for kind in cheaper]
        raise ValueError(
            f"the {self.kind!r} kernel of {n_inputs} inputs with {n_outputs} outputs has "
            f"{size:.1e} elements, more than {KERNEL_ELEMENTS:.1e}; use {' or '.join(ways)}"
        )

    def _per_tensor(self, values: Tensor) -> Sequence[Tensor]:
        """Return a value for each parameter tensor; raise if there are not as many, or one."""
        n = len(self._backend.params)
        if values.numel() not in (1, n):
            raise NotImplementedError(
                f"tangent kernels take one prior precision, or one for each of {n} tensors, "
                f"got {values.numel()}; use prior_structure='scalar' or 'layerwise'"
            )
        return values.flatten().expand(n).unbind()

    def _loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        if self._regression and y.shape != outputs.shape:
            raise ValueError(
                f"targets {list(y.shape)} must have the shape of the outputs {list(outputs.shape)}"
            )
        return self._backend.factor * self._backend.lossfunc(outputs, y)

    def _scatter(self, precision: Tensor) -> Tensor:
        norms = [parameter.detach().square().sum() for parameter in self._backend.params]
        return torch.stack(norms) @ torch.stack(list(self._per_tensor(precision)))


def tangent_kernel(
    trace: Trace, columns: Tensor, scales: Sequence[Tensor], blocked: bool = False
) -> Tensor:
    """Return ``sum_t scale_t psi_t psi_t^T`` over parameters t, without Jacobians of all of them.

    Args:
        trace: Forward pass of a minibatch.
        columns: Directions ``[column, batch, C]``, whose gradients of each input are ``psi``.
        scales: A scalar for each parameter.
        blocked: Whether each column is a block of its own.

    Returns:
        Kernel ``[1, column * batch, column * batch]``, or ``[column, batch, batch]`` if blocked.
    """
    matrices: dict[int, list[tuple[Tensor, Tensor]]] = {}
    vectors: dict[int, list[Tensor]] = {}
    for call, gradient in zip(trace.calls, _gradients(trace, columns), strict=True):
        for index, block in call.blocks:
            g = _per_input(block.g(gradient.flatten(0, 1)), columns.shape[:2])
            g = g.unsqueeze(1 if blocked else 0)  # [block, column, batch, r, ...]
            a = None
            if block.a is not None:
                a = _per_input(block.a(call.x), columns.shape[1:2])
            if isinstance(block, ElementwiseBlock):
                psi = g if a is None else g * a
                vectors.setdefault(index, []).append(psi.sum(3))
            elif a is not None:
                matrices.setdefault(index, []).append((a, g))
    n_blocks = len(columns) if blocked else 1
    size = columns.shape[:2].numel() // n_blocks
    kernel = columns.new_zeros(n_blocks, size, size)
    for index, terms in vectors.items():
        kernel = kernel + vector_kernel(torch.stack(terms).sum(0), scales[index])
    for index, calls in matrices.items():  # the calls of a layer are further positions
        inputs, gradients = zip(*calls, strict=True)
        kernel = kernel + matrix_kernel(_joined(inputs, 1), _joined(gradients, 3), scales[index])
    return kernel


def _gradients(trace: Trace, columns: Tensor) -> list[Tensor]:
    """Return the gradients ``[column, rows, ...]`` of each call's output."""
    by_column = [gradients for gradients, _ in trace.gradients(columns.unbind())]
    return [torch.stack(parts) for parts in zip(*by_column, strict=True)]


def _per_input(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Bring ``[rows, shared, ...]`` to ``[*shape, r, ...]``, where the last of shape is batch."""
    return x.reshape(*shape, -1, *x.shape[2:])


def _joined(tensors: tuple[Tensor, ...], dim: int) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors, dim)
