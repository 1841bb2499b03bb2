"""Reports: one page in HTML for the directory of a run, with all that it found and its pictures."""

from laplace_invariance.experiments.reports.learnt import learn_report
from laplace_invariance.experiments.reports.others import (
    compare_report,
    layers_report,
    profile_report,
    suggest_report,
)

__all__ = [
    "compare_report",
    "layers_report",
    "learn_report",
    "profile_report",
    "suggest_report",
]
