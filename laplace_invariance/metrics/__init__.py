"""How much of each layer is in use, how equivariant it is, how invariant a network really is."""

from laplace_invariance import _laplace  # noqa: F401
from laplace_invariance.metrics.ablation import Ablation, AblationRow, ablation
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
from laplace_invariance.metrics.spectrum import (
    JacobianSpectrum,
    SpectrumRecorder,
    jacobian_spectrum,
)
from laplace_invariance.metrics.usage import (
    LayerReport,
    PathReport,
    effective_parameters,
    layer_report,
)

__all__ = [
    "Ablation",
    "AblationRow",
    "Invariance",
    "InvarianceError",
    "InvarianceReport",
    "JacobianSpectrum",
    "LayerReport",
    "PathReport",
    "SpectrumRecorder",
    "ablation",
    "effective_parameters",
    "equivariance_error",
    "invariance_report",
    "jacobian_spectrum",
    "layer_report",
    "logit_invariance",
    "predictive_invariance",
    "saliency_invariance",
]
