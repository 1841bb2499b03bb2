"""What was learnt, in numbers: how much of each layer is in use, and how equivariant or invariant it is, really."""

from laplace_invariance import _laplace  # noqa: F401
from laplace_invariance.metrics.equivariance import equivariance_error
from laplace_invariance.metrics.genuine import (
    Invariance,
    InvarianceError,
    InvarianceReport,
    invariance_report,
    logit_invariance,
    predictive_invariance,
    saliency_invariance,
)
from laplace_invariance.metrics.layers import (
    LayerReport,
    PathReport,
    effective_parameters,
    layer_report,
)
from laplace_invariance.metrics.spectrum import (
    JacobianSpectrum,
    SpectrumRecorder,
    jacobian_spectrum,
)

__all__ = [
    "Invariance",
    "InvarianceError",
    "InvarianceReport",
    "JacobianSpectrum",
    "LayerReport",
    "PathReport",
    "SpectrumRecorder",
    "effective_parameters",
    "equivariance_error",
    "invariance_report",
    "jacobian_spectrum",
    "layer_report",
    "logit_invariance",
    "predictive_invariance",
    "saliency_invariance",
]
