"""Pictures: functions that take and return matplotlib Axes, and import matplotlib when called."""

from laplace_invariance.plots.outcomes import (
    accuracies,
    bound_by_range,
    evidence_by_range,
    gains,
    invariances,
    orbit_codes,
    probability_by_angle,
)
from laplace_invariance.plots.paths import layer_precisions, layer_shares
from laplace_invariance.plots.style import figure
from laplace_invariance.plots.training import (
    errors,
    evidence,
    evidence_terms,
    learnt_range,
    ranges_from_starts,
    ranges_over_epochs,
    search_trials,
    spectra,
)
from laplace_invariance.plots.transformations import filter_bank, flow, samples, shapes

__all__ = [
    "accuracies",
    "bound_by_range",
    "errors",
    "evidence",
    "evidence_by_range",
    "evidence_terms",
    "figure",
    "filter_bank",
    "flow",
    "gains",
    "invariances",
    "layer_precisions",
    "layer_shares",
    "learnt_range",
    "orbit_codes",
    "probability_by_angle",
    "ranges_from_starts",
    "ranges_over_epochs",
    "samples",
    "search_trials",
    "shapes",
    "spectra",
]
