"""Configurations of other ways to learn and to measure invariance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, get_args

from laplace_invariance.experiments import choices
from laplace_invariance.experiments.checks import Config, check_not_negative, check_positive
from laplace_invariance.experiments.options.images import ImagesConfig

__all__ = [
    "DemoConfig",
    "MeasureConfig",
    "PairsConfig",
    "PlaneConfig",
    "ReproduceConfig",
    "VariationalConfig",
]


@dataclass(frozen=True, kw_only=True)
class MeasureConfig(ImagesConfig):
    """Configuration of ``measure``: images, group, and the methods that networks are trained by.

    Attributes:
        shifted: Source of images of another kind and the same size, whose test images are used;
            by default negatives of the test images.
        group: Transformations that networks should be invariant to.
        methods: How networks are trained, one or several; all start with the same weights.
        n_samples: Number of rotations that networks are averaged over.
        n_epochs: Number of epochs of training.
        strength: Strength of the invariance error as a penalty.
        seed: Seed of the subsets, the transformations, the weights and the draws.
    """

    format: ClassVar[int] = 2  # 1: learnt by three directions of the loss Hessian
    shifted: str | None = None
    group: choices.MeasureGroup = "quarter-turns"
    methods: tuple[choices.MeasureMethod, ...] = field(
        default=get_args(choices.MeasureMethod),
        metadata={"option": "method", "meanings": choices.MEASURE_METHODS, "identity": False},
    )
    n_samples: int = 8
    n_epochs: int = 40
    strength: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "n_samples", "n_epochs")
        check_not_negative(self, "strength")


@dataclass(frozen=True, kw_only=True)
class PairsConfig(Config):
    """Configuration of ``pairs``: the hidden symmetry, the networks and their training.

    Attributes:
        task: Hidden symmetry, and how it is learnt.
        code: Code that the task dft teaches.
        part: What the task dft trains.
        networks: Networks, one or several, each as layer-depth of encoder and decoder, such as
            rich-1 or selu-4; all are trained on the same data.
        n_features: Size of the vectors.
        width: Number of linear units per layer, by default 8 for each feature.
        n_train: Number of vectors, or pairs, to train on.
        n_test: Number of vectors, or pairs, to test on.
        n_epochs: Number of epochs of training.
        batch_size: Number of vectors, or pairs, per batch.
        lr: Step size of Adam at the start, from which it falls to zero along half a cosine; by
            default 0.003, or 0.01 where SELU layers are taught the code (task dft).
        weight: Weight of the loss of the code, relative to that of the reconstruction.
        delta: Offset of squared distances in the loss of the code.
        alpha: Factor of squared distances in the loss of the code.
        seed: Seed of the data, the weights and the batches.
    """

    task: choices.PairsTask = field(default="dft", metadata={"meanings": choices.PAIRS_TASKS})
    code: choices.PairsCode = field(default="sines", metadata={"meanings": choices.PAIRS_CODES})
    part: choices.PairsPart = field(default="both", metadata={"meanings": choices.PAIRS_PARTS})
    networks: tuple[str, ...] = ("rich-1", "selu-4")
    n_features: int = 10
    width: int | None = None
    n_train: int = 60_000
    n_test: int = 10_000
    n_epochs: int = 30
    batch_size: int = 128
    lr: float | None = None
    weight: float = 8.0
    delta: float = 1.0
    alpha: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "width", "n_train", "n_test", "n_epochs", "batch_size")
        check_positive(self, "lr", "weight", "delta", "alpha")
        if not self.networks or len(set(self.networks)) < len(self.networks):
            raise ValueError(
                f"networks must be different ones, and at least one, got {list(self.networks)}"
            )
        for name in self.networks:
            self.layer_and_depth(name)
        if self.task != "dft" and (self.code, self.part) != ("sines", "both"):
            raise ValueError(
                f"code and part are options of the task dft, which teaches a code; {self.task} "
                "learns its own, by encoder and decoder"
            )

    @staticmethod
    def layer_and_depth(name: str) -> tuple[str, int]:
        """Return what the name of a network says: the kind of its layers and their number.

        Args:
            name: Name of a network, such as ``"rich-1"``.

        Raises:
            ValueError: If the name is of another form.
        """
        layer, _, depth = name.partition("-")
        if layer not in get_args(choices.PairsLayer) or not depth.isdecimal():
            known = ", ".join(get_args(choices.PairsLayer))
            raise ValueError(
                f"unknown network {name!r}; write layer-depth, such as rich-2, of {known}"
            )
        return layer, int(depth)


@dataclass(frozen=True, kw_only=True)
class VariationalConfig(ImagesConfig):
    """Configuration of ``variational``: images, starts of the range, network and training.

    Attributes:
        transform: How the images are transformed.
        learn: Ranges that are learnt; the others are closed.
        learnt: Starts in degrees, one run each, in which the ELBO learns the ranges; those that
            are no rotations start at as many half-widths of the image, or logarithms of factors,
            as these are radians.
        fixed: Ranges in degrees, one run each, in which the ranges stay.
        point: Starts in degrees, one run each, in which the likelihood of a point estimate learns
            the ranges.
        activation: Activation of the hidden layer.
        n_features: Width of the hidden layer, even for cosines.
        n_samples: Number of transformations of its weights.
        length_scale: Length scale of the cosines, in units of the image.
        output_scale: Initial standard deviation of the outputs under the prior.
        blur: Standard deviation of the blur of the weights, in half-widths of the image.
        draws: Draws of transformations. Those of a grid are always the same. The mean over
            independent draws is noisier for wider ranges, so that no range wider than needed is
            learnt.
        n_epochs: Number of epochs of training.
        batch_size: Number of images per batch.
        lr: Step size of the covariances and the first layer.
        lr_mean: Step size of the means.
        lr_hyper: Step size of the ranges and the scale.
        n_epochs_burnin: Number of epochs in which the ranges stay.
        seed: Seed of the subset, the transformations, the weights and the draws.
    """

    format: ClassVar[int] = 2  # 1: one range
    transform: choices.Transform = "fully_rotated"
    learn: tuple[choices.RangeName, ...] = ("rotation",)
    learnt: tuple[float, ...] = field(default=(5.0,), metadata={"option": "init"})
    fixed: tuple[float, ...] = ()
    point: tuple[float, ...] = ()
    activation: choices.Activation = "cosine"
    n_features: int = 256
    n_samples: int = 16
    length_scale: float = 3.0
    output_scale: float = 8.0
    blur: float = 0.1
    draws: choices.Draws = "independent"
    n_epochs: int = 15
    batch_size: int = 128
    lr: float = 0.02
    lr_mean: float = 0.3
    lr_hyper: float = 0.1
    n_epochs_burnin: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for method in choices.VARIATIONAL_METHODS:
            starts = tuple(float(start) for start in getattr(self, method))
            self._set(method, starts)
            if not all(0 <= start <= 180 for start in starts):
                raise ValueError(
                    f"ranges of {method} must be between 0 and 180 degrees, got {starts}"
                )
        if not self.plan:
            known = ", ".join(choices.VARIATIONAL_METHODS)
            raise ValueError(f"there is nothing to run; give at least one of {known}")
        check_positive(self, "n_epochs", "batch_size", "lr", "lr_mean", "lr_hyper")
        if self.n_epochs <= self.n_epochs_burnin:
            raise ValueError(
                f"n_epochs must be above the {self.n_epochs_burnin} of burn-in, in which ranges "
                f"stay, got {self.n_epochs}"
            )

    @property
    def plan(self) -> list[tuple[choices.VariationalMethod, float]]:
        """Method and start of every run."""
        runs: list[tuple[choices.VariationalMethod, float]] = []
        for method in choices.VARIATIONAL_METHODS:
            starts = dict.fromkeys(getattr(self, method))  # in their order, each once
            runs += [(method, start) for start in starts]
        return runs


@dataclass(frozen=True, kw_only=True)
class PlaneConfig(Config):
    """Configuration of ``plane``: labels of points, what is averaged over, and training.

    Attributes:
        labels: What the labels of points depend on.
        method: Rotations that the network is averaged over.
        by: What is maximised.
        n_train: Number of training points.
        n_samples: Number of sampled rotations per point.
        n_epochs: Number of epochs of training.
        seed: Seed of the points, the weights and the draws.
    """

    labels: choices.PlaneLabels = field(
        default="radius", metadata={"meanings": choices.PLANE_LABELS}
    )
    method: choices.PlaneMethod = field(
        default="learnt", metadata={"meanings": choices.PLANE_METHODS}
    )
    by: choices.PlaneBy = field(default="evidence", metadata={"meanings": choices.PLANE_BY})
    n_train: int = 60
    n_samples: int = 16
    n_epochs: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "n_train", "n_samples")
        if self.n_epochs < 2:
            raise ValueError(f"n_epochs must be at least 2, got {self.n_epochs}")


@dataclass(frozen=True, kw_only=True)
class DemoConfig(Config):
    """Configuration of a demonstration.

    Attributes:
        name: Demonstration: points learns how far shapes of 2-D points may be rotated (under a
            minute).
        n_train: Number of training examples.
        n_samples: Number of sampled rotations per example.
        n_epochs: Number of epochs of training.
        n_epochs_burnin: Number of epochs before the first estimate of the evidence.
        marglik_frequency: Number of epochs between two estimates of the evidence.
        seed: Seed of the data, the weights and the draws.
    """

    name: choices.DemoName = field(default="points", metadata={"positional": True})
    n_train: int = 200
    n_samples: int = 16
    n_epochs: int = 240
    n_epochs_burnin: int = 10
    marglik_frequency: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "n_train", "n_samples", "marglik_frequency")
        check_not_negative(self, "n_epochs_burnin")
        least = self.n_epochs_burnin + self.marglik_frequency
        if self.n_epochs < least:
            raise ValueError(f"n_epochs must be at least {least}, got {self.n_epochs}")


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig(Config):
    """Configuration of ``reproduce``: a table of a paper, and how large its runs are.

    Attributes:
        name: Table.
        scale: Size of the runs.
        n_jobs: Number of runs at a time, each with one thread.
        root: Directory of torchvision's data sets, or of mnist.npz, fashion_mnist.npz, cifar10.npz.
        download: Download a data set of torchvision that is not in the directory.
    """

    name: choices.TableName = field(default="input-mlp", metadata={"positional": True})
    scale: choices.Scale = field(default="small", metadata={"meanings": choices.SCALES})
    n_jobs: int = 2
    root: str = "data"
    download: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "n_jobs")
