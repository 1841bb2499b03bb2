"""What was learnt, in numbers: how much of each layer is in use, and how equivariant it is, really."""

from laplace_invariance.metrics.equivariance import equivariance_error
from laplace_invariance.metrics.layers import LayerReport, PathReport, effective_parameters, layer_report

__all__ = ["LayerReport", "PathReport", "effective_parameters", "equivariance_error", "layer_report"]
