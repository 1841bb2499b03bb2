"""Configurations of experiments that learn ranges of transformations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, get_args

from laplace_invariance.experiments import choices
from laplace_invariance.experiments.checks import check_not_negative, check_positive
from laplace_invariance.experiments.options.images import ImagesConfig

__all__ = ["CompareConfig", "LearnConfig", "ProfileConfig", "RangesConfig", "SuggestConfig"]


@dataclass(frozen=True, kw_only=True)
class RangesConfig(ImagesConfig):
    """What ``learn`` and ``compare`` have in common: the network, its training, the methods.

    Attributes:
        net: Network.
        n_samples: Number of sampled transformations per image.
        n_epochs: Number of epochs of training.
        start: Where ranges that are learnt by evidence start.
        estimator: How the evidence is estimated in training; by default running, but refit where
            training images are augmented.
        subset_of_weights: Weights that the Laplace approximation is of.
        correlated: Learn correlations of the ranges, too.
        fixed: Ranges of the method "fixed", by name of the generator; rotations are in radians.
        strength: Strength of Augerino's reward for wide ranges.
        lr_augerino: Step size of the ranges under Augerino.
    """

    # 1: the evidence of three directions of the loss Hessian; 2: steps on priors, without search
    format: ClassVar[int] = 3
    net: choices.NetworkName = "mlp"
    n_samples: int = 8
    n_epochs: int = 100
    start: choices.Start = field(default="search", metadata={"meanings": choices.STARTS})
    estimator: choices.EstimatorName | None = field(
        default=None, metadata={"meanings": choices.ESTIMATORS}
    )
    subset_of_weights: choices.WeightsSubset = field(
        default="all", metadata={"meanings": choices.SUBSETS_OF_WEIGHTS}
    )
    correlated: bool = False
    fixed: Mapping[str, float] = field(default_factory=lambda: {"rotation": math.pi})
    strength: float = 0.1
    lr_augerino: float = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "n_samples", "n_epochs")
        check_not_negative(self, "strength")
        if self.estimator == "kernel" and self.subset_of_weights != "all":
            raise ValueError(
                "the kernel bound is that of all weights; choose another estimator for the last "
                "layer"
            )


@dataclass(frozen=True, kw_only=True)
class LearnConfig(RangesConfig):
    """Configuration of one run of ``learn``: images, transformation, method and network.

    Attributes:
        transform: How the images are transformed.
        method: How invariance is learnt.
        seed: Seed of the subset, the transformations, the weights and the draws.
    """

    transform: choices.Transform = "fully_rotated"
    method: choices.LearnMethod = field(
        default="evidence", metadata={"meanings": choices.LEARN_METHODS}
    )
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class CompareConfig(RangesConfig):
    """Configuration of ``compare``: one run of ``learn`` per transformation, method and seed.

    Attributes:
        transforms: How the images are transformed, one or several.
        methods: How invariance is learnt, one or several.
        seeds: Seeds of the subset, the transformations, the weights and the draws, one or several.
    """

    transforms: tuple[choices.Transform, ...] = field(
        default=get_args(choices.Transform), metadata={"option": "transform", "identity": False}
    )
    methods: tuple[choices.LearnMethod, ...] = field(
        default=get_args(choices.LearnMethod),
        metadata={"option": "method", "meanings": choices.LEARN_METHODS, "identity": False},
    )
    seeds: tuple[int, ...] = field(default=(0,), metadata={"option": "seed", "identity": False})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.seeds:
            raise ValueError("there is nothing to compare: give at least one seed")

    @property
    def runs(self) -> list[LearnConfig]:
        """Configuration of every run, with the seeds innermost."""
        shared = {entry.name: getattr(self, entry.name) for entry in fields(RangesConfig)}
        cells = itertools.product(self.transforms, self.methods, self.seeds)
        return [LearnConfig(**shared, transform=t, method=m, seed=s) for t, m, s in cells]


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(LearnConfig):
    """Configuration of ``profile``: a run of ``learn``, and the range along which to look.

    Attributes:
        name: Range that the evidence is computed along.
        values: Widths of the range, in radians for rotations, half-widths of the image for
            translations and logarithms of factors for scales; by default some around the learnt
            one.
        n_steps: Number of steps on the weights at each value.
        n_repeats: Number of repetitions with other batches and draws, for standard errors.
        hold_others: Whether other ranges stay as they were learnt, instead of following by
            gradient steps.
    """

    name: choices.RangeName = field(default="rotation", metadata={"option": "range"})
    values: tuple[float, ...] = field(default=(), metadata={"identity": False})
    n_steps: int = 100
    n_repeats: int = field(default=2, metadata={"identity": False})
    hold_others: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "n_steps")
        check_positive(self, "n_repeats")
        if self.method not in ("evidence", "augerino"):
            raise ValueError(
                f"method {self.method!r} learns no range to look along; choose evidence or augerino"
            )
        limit = math.pi if self.name == "rotation" else math.inf
        for value in self.values:
            if not 0 <= value <= limit or not math.isfinite(value):
                raise ValueError(
                    f"{self.name} must be finite and between 0 and {limit:.4g}, its limit, got "
                    f"{value}"
                )

    @property
    def run(self) -> LearnConfig:
        """Configuration of the run of ``learn``."""
        return LearnConfig(
            **{entry.name: getattr(self, entry.name) for entry in fields(LearnConfig)}
        )


@dataclass(frozen=True, kw_only=True)
class SuggestConfig(ImagesConfig):
    """Configuration of one run of ``suggest``: images, the network, and what is tried.

    Attributes:
        transform: How the images are transformed.
        net: Network.
        weights: File with the weights of the network, as a run without this option writes them to
            network.pt; by default the network is trained.
        n_epochs: Number of epochs of training, unless weights are read.
        ranges: Ranges to try, by name of the generator, rotations in radians; by default all, at
            two widths each.
        n_samples: Number of sampled transformations per image.
        n_steps: Number of steps on the weights before evidences are compared.
        n_repeats: Number of repeats with other batches and draws.
        seed: Seed of the subset, the transformations, the weights and the batches.
    """

    transform: choices.Transform = "original"
    net: choices.NetworkName = "mlp"
    weights: str | None = None
    n_epochs: int = 30
    ranges: Mapping[str, float] = field(default_factory=dict)
    n_samples: int = 8
    n_steps: int = 200
    n_repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "n_epochs", "n_samples", "n_steps", "n_repeats")
        if self.n_steps % 2:
            raise ValueError(
                "n_steps must be even, as evidences are compared after half of them, too, got "
                f"{self.n_steps}"
            )
        if self.n_repeats < 2:
            raise ValueError("n_repeats must be at least 2: one repeat has no standard error")
