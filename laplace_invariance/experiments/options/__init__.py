"""Configurations of all experiments: one class per verb of the command line.

Nothing here imports torch or numpy, so that the command line, which is built from these classes,
answers ``--help`` at once. An entry under ``Attributes:`` is also the help text of its option.
"""

from laplace_invariance.experiments.options.images import ImagesConfig
from laplace_invariance.experiments.options.layers import LayersConfig
from laplace_invariance.experiments.options.others import (
    DemoConfig,
    MeasureConfig,
    PairsConfig,
    PlaneConfig,
    ReproduceConfig,
    VariationalConfig,
)
from laplace_invariance.experiments.options.ranges import (
    CompareConfig,
    LearnConfig,
    ProfileConfig,
    RangesConfig,
    SuggestConfig,
)

__all__ = [
    "CompareConfig",
    "DemoConfig",
    "ImagesConfig",
    "LayersConfig",
    "LearnConfig",
    "MeasureConfig",
    "PairsConfig",
    "PlaneConfig",
    "ProfileConfig",
    "RangesConfig",
    "ReproduceConfig",
    "SuggestConfig",
    "VariationalConfig",
]
