"""The tables of the papers, as runs of experiments, each in three sizes.

Like :mod:`.options` nothing here imports torch: a table is a list of cells, and a cell has the
configuration of the run that fills it. :mod:`laplace_invariance.experiments.reproduce` runs them.
"""

from laplace_invariance.experiments.papers.base import Cell, Curve, Measure, Picture, Table
from laplace_invariance.experiments.papers.input_invariances import INPUT_TABLES
from laplace_invariance.experiments.papers.invariant_weights import WEIGHTS_TABLES
from laplace_invariance.experiments.papers.layers import LAYER_TABLES
from laplace_invariance.experiments.papers.others import OTHER_TABLES

__all__ = ["TABLES", "Cell", "Curve", "Measure", "Picture", "Table"]

TABLES: dict[str, Table] = INPUT_TABLES | LAYER_TABLES | WEIGHTS_TABLES | OTHER_TABLES
