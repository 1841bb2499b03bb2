"""Backends for laplace-torch that know about samples, and differentiate in hyperparameters.

``laplace.Laplace(model, ..., backend=AugmentedGGN)``. Works on any model; on one without an
``InvariantModel`` inside it is an ordinary backend that also covers normalisation layers, grouped
convolutions and embeddings.
"""

from __future__ import annotations

from typing import Any

import torch
from laplace.curvature.curvature import EFInterface, GGNInterface
from laplace.utils import Likelihood
from torch import Tensor, nn

from laplace_invariance.curvature.backend import (
    AugmentedCurvature,
    check_count,
    target_totals,
)
from laplace_invariance.curvature.loss_hessian import Columns, LossHessian, softmax_trace
from laplace_invariance.curvature.trace.chunks import AnyTrace

__all__ = ["AugmentedEF", "AugmentedGGN"]


class AugmentedGGN(AugmentedCurvature, GGNInterface):
    """Generalised Gauss-Newton of an averaged network, differentiable in its hyperparameters.

    Args:
        model: Maps ``[batch, ...]`` to ``[batch, C]``; an ``InvariantModel`` averages samples.
        likelihood: ``"classification"`` or ``"regression"``.
        last_layer: Whether to consider the last layer only, of laplace's ``FeatureExtractor``.
        subnetwork_indices: Indices of the parameters to consider in ``diag`` and ``full``.
        dict_key_x: Key of the inputs, for models that take a mapping.
        dict_key_y: Key of the targets, for models that take a mapping.
        stochastic: Estimate the loss Hessian from random directions instead of all of them. It is
            exact where as many are asked for as there are, ``C - 1`` in classification.
        num_samples: Number of random directions.
        output_rank: Number of leading directions of each input's loss Hessian (classification).
            A trained network confuses few classes, so two or three often carry nearly all of it;
            ``discarded`` tells. The gradient holds them fixed. With ``stochastic``, random
            directions stand for what they leave out: unbiased, with less variance than without.
        kfac_approx: ``"expand"`` or ``"reduce"``, for weights that are shared over positions.
        per_slot: Whether layers whose matrix has slots (factored and sparse fully connected ones)
            have a gradient factor for each, not their mean: closer to the curvature, at no cost.
        chunk_size: Number of rows (inputs times samples) to propagate at once; fewer need less
            memory and, below the number of samples of one input, further forward passes.
        on_unsupported: ``"error"``, or ``"diag"`` for exact diagonals where ``kron`` has no rule.
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
        **options: Any,
    ) -> None:
        options |= {"stochastic": stochastic, "num_samples": num_samples}
        keys = (dict_key_x, dict_key_y)
        super().__init__(model, likelihood, last_layer, subnetwork_indices, *keys, **options)
        check_count("output_rank", output_rank)
        check_count("num_samples", num_samples)
        if output_rank is not None and likelihood == Likelihood.REGRESSION:
            raise ValueError(
                "output_rank truncates the softmax Hessian; the one of regression is the identity"
            )
        self.output_rank = output_rank
        self._trace_kept = self._trace_total = torch.zeros(())

    @property
    def discarded(self) -> float:
        """Share of the loss Hessian's trace that ``output_rank`` left out, over all batches."""
        if self._trace_total == 0:
            return 0.0
        return max(0.0, 1 - (self._trace_kept / self._trace_total).item())

    def _loss_hessian(self) -> LossHessian:
        classification = self.likelihood == Likelihood.CLASSIFICATION
        n_samples = self.num_samples if self.stochastic else 0
        return LossHessian(classification, self.output_rank or 0, n_samples)

    def _n_columns(self, n_outputs: int) -> int:
        return self._loss_hessian().n_columns(n_outputs)

    def _columns(self, trace: AnyTrace, y: Tensor) -> Columns:
        outputs, hessian = trace.outputs, self._loss_hessian()
        columns, weights = hessian.columns(outputs)
        truncated = weights is None and hessian.rank > 0 and hessian.n_samples == 0
        if truncated and not trace.differentiate:  # once, not again in the backward pass
            kept = torch.stack([column.detach() for column in columns]).square().sum()
            self._trace_kept = self._trace_kept.to(kept) + kept
            self._trace_total = self._trace_total.to(kept) + softmax_trace(outputs.detach()).sum()
        if hessian.classification:
            # the Hessian of an input's loss is that of the softmax times the total of its target
            root = target_totals(y).to(outputs.dtype).sqrt().unsqueeze(-1)
            columns = [root * column for column in columns]
        return columns, weights


class AugmentedEF(AugmentedCurvature, EFInterface):
    """Empirical Fisher of an averaged network, differentiable in its hyperparameters.

    Scaled as in laplace-torch: ``factor * sum_n g_n g_n^T``, ``g_n`` the gradient of ``lossfunc``.

    Args:
        model: Maps ``[batch, ...]`` to ``[batch, C]``; an ``InvariantModel`` averages samples.
        likelihood: ``"classification"`` or ``"regression"``.
        last_layer: Whether to consider the last layer only, of laplace's ``FeatureExtractor``.
        subnetwork_indices: Indices of the parameters to consider in ``diag`` and ``full``.
        dict_key_x: Key of the inputs, for models that take a mapping.
        dict_key_y: Key of the targets, for models that take a mapping.
        kfac_approx: ``"expand"`` or ``"reduce"``, for weights that are shared over positions.
        per_slot: Whether layers with slots have a gradient factor for each, not their mean.
        chunk_size: Number of rows (inputs times samples) to propagate at once.
        on_unsupported: ``"error"``, or ``"diag"`` for exact diagonals where ``kron`` has no rule.
    """

    def _n_columns(self, n_outputs: int) -> int:
        return 1

    def _columns(self, trace: AnyTrace, y: Tensor) -> Columns:
        # the root of the factor goes into the column, so that no weights are needed
        return [self.factor**0.5 * self._loss_gradient(trace.outputs, y)], None
