"""Configurations of experiments that learn ranges of transformations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, get_args

from laplace_invariance.experiments import choices
from laplace_invariance.experiments.checks import check_not_negative, check_positive, check_ranges
from laplace_invariance.experiments.options.images import ImagesConfig

__all__ = ["CompareConfig", "LearnConfig", "ProfileConfig", "RangesConfig", "SuggestConfig"]


WITHOUT_RANGES = ("none", "trivial-augment")  # methods


@dataclass(frozen=True, kw_only=True)
class RangesConfig(ImagesConfig):
    """What ``learn`` and ``compare`` have in common: the network, its training, the methods.

    Attributes:
        net: Network; by default cnn for images in colour, and mlp for grey ones.
        n_samples: Number of sampled transformations per image, if outputs are averaged.
        average: What is averaged over transformations.
        n_epochs: Number of epochs of training.
        search: Whether starts are searched for the ranges that evidence learns; by default on,
            unless init says where they start.
        learn: Ranges that are learnt; the others stay at init, or at zero.
        init: Where ranges start without a search, by name: translations in half-widths of the
            image, scales as logarithms of factors, rotation in radians, or in degrees as in
            rotation=90deg; by default zero, and 0.1 under Augerino.
        draws: Draws of transformations; a grid is for two ranges at most.
        lr_aug: Largest step size of ranges that are learnt by evidence; by default 0.3.
        estimator: How the evidence is estimated in training; by default running, but refit where
            training images are augmented.
        curvature: Curvature of the Laplace approximation.
        structure: Structure of the curvature.
        prior_structure: What shares a prior precision.
        subset_of_weights: Weights that the Laplace approximation is of.
        correlated: Learn correlations of the ranges, too.
        fixed: Ranges of the method "fixed", by name, as for init.
        strength: Strength of Augerino's reward for wide ranges.
        lr_augerino: Step size of the ranges under Augerino.
        device: Device that is computed on, such as cuda.
    """

    # 1: the evidence of three directions of the loss Hessian; 2: steps on priors, without search;
    # 3: a truth of images as they are, and no file of the model; 4: other translations
    format: ClassVar[int] = 5
    net: choices.NetworkName | None = None
    n_samples: int = 8
    average: choices.Average = field(default="outputs", metadata={"meanings": choices.AVERAGES})
    n_epochs: int = 100
    search: choices.Switch | None = field(default=None, metadata={"meanings": choices.SEARCH})
    learn: tuple[choices.RangeName, ...] = get_args(choices.RangeName)
    init: Mapping[str, float] = field(default_factory=dict)
    draws: choices.Draws = "sobol"
    lr_aug: float | None = None
    estimator: choices.EstimatorName | None = field(
        default=None, metadata={"meanings": choices.ESTIMATORS}
    )
    curvature: choices.Curvature = field(default="ggn", metadata={"meanings": choices.CURVATURES})
    structure: choices.Structure = field(default="kron", metadata={"meanings": choices.STRUCTURES})
    prior_structure: choices.RangesPrior = field(
        default="layerwise", metadata={"option": "prior", "meanings": choices.RANGES_PRIORS}
    )
    subset_of_weights: choices.WeightsSubset = field(
        default="all", metadata={"meanings": choices.SUBSETS_OF_WEIGHTS}
    )
    correlated: bool = False
    fixed: Mapping[str, float] = field(default_factory=lambda: {"rotation": math.pi})
    strength: float = 0.1
    lr_augerino: float = 0.03
    device: str = field(default="cpu", metadata={"identity": False})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "n_samples", "n_epochs", "lr_aug", "lr_augerino")
        check_not_negative(self, "strength")
        check_ranges("init", self.init)
        check_ranges("fixed", self.fixed)
        started = [name for name in self.init if name in self.learn]
        if self.search == "on" and started:
            raise ValueError(
                f"a search finds where {', '.join(started)} should start, and init says it; leave "
                "out one of them"
            )
        self._check_approximation()

    def _check_approximation(self) -> None:
        """Raise if parts of the approximation do not go together."""
        if self.estimator == "kernel" and self.subset_of_weights != "all":
            raise ValueError(
                "the kernel bound is that of all weights; choose another estimator for the last "
                "layer"
            )
        if self.prior_structure != "diag":
            return
        if self.structure == "kron":
            raise ValueError(
                "Kronecker factors take one prior precision, or one per tensor; choose prior "
                "scalar or layerwise, or structure diag or full"
            )
        if self.estimator == "kernel":
            raise ValueError(
                "the kernel bound takes one prior precision, or one per tensor; choose prior "
                "scalar or layerwise, or another estimator"
            )

    @property
    def searches(self) -> bool:
        """Whether starts are searched for ranges that evidence learns."""
        if self.search is not None:
            return self.search == "on"
        return not any(name in self.learn for name in self.init)


@dataclass(frozen=True, kw_only=True)
class LearnConfig(RangesConfig):
    """Configuration of one run of ``learn``: images, transformation, method and network.

    Attributes:
        transform: How the images are transformed.
        method: How invariance is learnt.
        seed: Seed of the subset, the transformations, the weights and the draws.
    """

    transform: choices.Transform = "original"
    method: choices.LearnMethod = field(
        default="evidence", metadata={"meanings": choices.LEARN_METHODS}
    )
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search == "on" and self.method != "evidence":
            raise ValueError(
                f"method {self.method!r} learns no range by evidence, so that there is nothing to "
                "search for; leave out search"
            )
        if self.init and self.method == "fixed":
            raise ValueError(
                "method 'fixed' has the ranges of fixed, such as --fixed rotation=60deg; init is "
                "where learnt ranges start"
            )
        if self.init and self.method in WITHOUT_RANGES:
            raise ValueError(f"method {self.method!r} has no range that init could start")


@dataclass(frozen=True, kw_only=True)
class CompareConfig(RangesConfig):
    """Configuration of ``compare``: one run of ``learn`` per transformation, method and seed.

    Attributes:
        transforms: How the images are transformed, one or several.
        methods: How invariance is learnt, one or several.
        seeds: Seeds of the subset, the transformations, the weights and the draws, one or several.
        n_jobs: Number of runs at a time; if several, each has a process of its own, with one
            thread.
    """

    transforms: tuple[choices.Transform, ...] = field(
        default=("original",), metadata={"option": "transform", "identity": False}
    )
    methods: tuple[choices.LearnMethod, ...] = field(
        default=("evidence", "none", "augerino", "fixed", "trivial-augment"),
        metadata={"option": "method", "meanings": choices.LEARN_METHODS, "identity": False},
    )
    seeds: tuple[int, ...] = field(default=(0,), metadata={"option": "seed", "identity": False})
    n_jobs: int = field(default=1, metadata={"identity": False})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "n_jobs")
        if not self.seeds:
            raise ValueError("there is nothing to compare: give at least one seed")

    @property
    def runs(self) -> list[LearnConfig]:
        """Configuration of every run, with the seeds innermost."""
        shared = {entry.name: getattr(self, entry.name) for entry in fields(RangesConfig)}
        found = []
        for transform, method, seed in itertools.product(self.transforms, self.methods, self.seeds):
            options = {**shared, "transform": transform, "method": method, "seed": seed}
            if self.search == "on" and method != "evidence":  # others have nothing to search for
                options["search"] = None
            if method in ("fixed", *WITHOUT_RANGES):
                options["init"] = {}
            found.append(LearnConfig(**options))
        return found


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(LearnConfig):
    """Configuration of ``profile``: a run of ``learn``, and the range along which to look.

    Attributes:
        name: Range that the evidence is computed along.
        values: Widths of the range, in radians (or written 60deg) for rotations, half-widths of the
            image for translations and logarithms of factors for scales; by default some around the
            learnt one.
        n_steps: Number of steps on the weights at each value.
        n_repeats: Number of repetitions with other batches and draws, for standard errors.
        hold_others: Whether other ranges stay as they were learnt, instead of following by
            gradient steps.
    """

    name: choices.RangeName = field(default="rotation", metadata={"option": "range"})
    values: tuple[float, ...] = field(default=(), metadata={"identity": False, "degrees": True})
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
        if self.name not in self.learn:
            raise ValueError(
                f"{self.name} is not learnt, so that there is no range to look along; choose from "
                f"{', '.join(self.learn)}"
            )
        for value in self.values:
            check_ranges("values", {self.name: value})
        if len(set(self.values)) < len(self.values):
            raise ValueError(f"values must differ from one another, got {self.values}")

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
        net: Network; by default cnn for images in colour, and mlp for grey ones.
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

    format: ClassVar[int] = 2  # 1: without the name of the network
    transform: choices.Transform = "original"
    net: choices.NetworkName | None = None
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
        check_ranges("ranges", self.ranges)
        if self.n_steps % 2:
            raise ValueError(
                "n_steps must be even, as evidences are compared after half of them, too, got "
                f"{self.n_steps}"
            )
        if self.n_repeats < 2:
            raise ValueError("n_repeats must be at least 2: one repeat has no standard error")
