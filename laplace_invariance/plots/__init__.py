"""Pictures: functions that take and return matplotlib Axes, and import matplotlib when called."""

from laplace_invariance.plots.outcomes import (
    bound_by_range,
    by_method,
    evidence_by_range,
    gains,
    invariances,
    orbit_codes,
    probability_by_angle,
)
from laplace_invariance.plots.paths import layer_precisions, layer_shares
from laplace_invariance.plots.style import INK, figure
from laplace_invariance.plots.tables import against, predictive
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
from laplace_invariance.plots.units import by_unit, in_unit, short_words, unit_of

__all__ = [
    "INK",
    "against",
    "bound_by_range",
    "by_method",
    "by_unit",
    "errors",
    "evidence",
    "evidence_by_range",
    "evidence_terms",
    "figure",
    "filter_bank",
    "flow",
    "gains",
    "in_unit",
    "invariances",
    "layer_precisions",
    "layer_shares",
    "learnt_range",
    "orbit_codes",
    "predictive",
    "probability_by_angle",
    "ranges_from_starts",
    "ranges_over_epochs",
    "samples",
    "search_trials",
    "shapes",
    "short_words",
    "spectra",
    "unit_of",
]
