"""Configuration of the experiment that learns symmetries of layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from laplace_invariance.experiments import choices
from laplace_invariance.experiments.checks import check_not_negative, check_positive
from laplace_invariance.experiments.options.images import ImagesConfig

__all__ = ["LayersConfig"]


@dataclass(frozen=True, kw_only=True)
class LayersConfig(ImagesConfig):
    """Configuration of one run of ``layers``: images, task, network, priors and training.

    Attributes:
        transform: How the images are transformed.
        task: What the network predicts.
        kind: Paths of every layer, joined by "+": gconv (group convolution), s_gconv (with a sparse
            filter), conv, s_conv (convolution with a sparse filter), f_fc (fully connected,
            factored over positions), s_fc (factored and sparse), fc.
        method: How prior precisions are found.
        width: Number of channels of the first layer.
        n_epochs: Number of epochs of training.
        batch_size: Number of images per batch of training.
        lr: Step size of the weights at the start.
        lr_min: Step size of the weights at the end of half a cosine over all batches.
        marglik_frequency: Number of epochs between two estimates of the evidence.
        n_epochs_burnin: Number of epochs before the first estimate.
        estimator: How the evidence is estimated in training; by default refit, but running with
            ranges. On much data running is far cheaper.
        n_hypersteps: Number of steps on prior precisions per estimate.
        lr_hyp: Step size of the prior precisions.
        marglik_batch_size: Number of images per batch of an estimate.
        prior_structure: What shares a prior precision; in Python also regular expressions, as for
            ``marglik_training``.
        start: How far the free paths, all but the strictest, are open at the start.
        per_slot: Give factored layers a gradient factor per slot in the curvature.
        omega: What the inverse widths of basis functions of sparse paths are.
        kernel: Kernel of group convolutions; with a sparse filter pointwise or full.
        elements: What elements of the group are to fully connected paths beside group convolutions.
        ranges: Transformations that the network is averaged over, with ranges that are learnt by
            evidence.
        n_samples: Number of sampled transformations per image, if there are any.
        augment: Train weights on images that are mirrored and shifted by up to an eighth at random;
            the evidence is that of images as they are.
        scale: Scale of the initial weights of free paths that start closed.
        free_precision: Initial prior precision of these paths, if it is learnt per tensor or path;
            that of everything else is 1.
        seed: Seed of the subset, the transformations, the quadrants and the weights.
    """

    # 1: the evidence of some directions of the loss Hessian; 2: chosen by shares;
    # 3: without a log-likelihood
    format: ClassVar[int] = 4
    transform: choices.Transform = "original"
    task: choices.LayersTask = field(default="plain", metadata={"meanings": choices.LAYERS_TASKS})
    kind: str = "f_fc+conv"
    method: choices.LayersMethod = field(
        default="evidence", metadata={"meanings": choices.LAYERS_METHODS}
    )
    width: int = 4
    n_epochs: int = 40
    batch_size: int = 125
    lr: float = 5e-3
    lr_min: float = 1e-5
    marglik_frequency: int = 4
    n_epochs_burnin: int = 4
    estimator: choices.LayersEstimator | None = field(
        default=None, metadata={"meanings": choices.LAYERS_ESTIMATORS}
    )
    n_hypersteps: int = 50
    lr_hyp: float = 0.1
    marglik_batch_size: int = 500
    prior_structure: choices.PriorStructure | tuple[str, ...] = field(
        default="layerwise", metadata={"option": "prior", "meanings": choices.LAYERS_PRIORS}
    )
    start: choices.PathsStart = field(default="closed", metadata={"meanings": choices.PATHS_STARTS})
    per_slot: bool = False
    omega: choices.Omega = field(default="fixed", metadata={"meanings": choices.OMEGAS})
    kernel: choices.GroupKernel = field(default="pointwise", metadata={"meanings": choices.KERNELS})
    elements: choices.GroupElements = field(
        default="channels", metadata={"meanings": choices.ELEMENTS}
    )
    ranges: choices.LayersRanges = field(
        default="none", metadata={"meanings": choices.LAYERS_RANGES}
    )
    n_samples: int = 8
    augment: bool = False
    scale: float = 0.01
    free_precision: float = 1000.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "width", "n_epochs", "batch_size", "lr", "marglik_frequency")
        check_positive(self, "lr_hyp", "marglik_batch_size", "free_precision", "n_samples")
        check_not_negative(self, "lr_min", "n_epochs_burnin", "n_hypersteps", "scale")
        if self.ranges != "none" and (self.method != "evidence" or self.start == "search"):
            raise ValueError(
                f"ranges {self.ranges!r} are learnt by evidence, from where they start: they need "
                "method 'evidence', and a start of free paths without a search"
            )
        if self.estimator == "running" and self.augment:
            raise ValueError(
                "estimator 'running' sees the images that weights are trained on, but the evidence "
                "is that of images as they are: with augment, use 'refit'"
            )
        if self.start == "closed":
            return
        if self.method != "evidence" or self.prior_structure == "scalar":
            raise ValueError(
                f"start {self.start!r} needs prior precisions of free paths that are learnt by "
                "evidence: method 'evidence', and prior_structure 'layerwise' or 'path'"
            )
        if self.scale == 0:
            raise ValueError(f"start {self.start!r} rescales free paths: scale must be positive")
