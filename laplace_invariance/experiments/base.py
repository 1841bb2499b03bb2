"""What the experiments share: the seed, the data, the training recipe."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_invariance import datasets, plots
from laplace_invariance.augmentations import Augmentation
from laplace_invariance.augmentations.affine import warn_of_bright_borders
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.options import ImagesConfig
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.layers import Standardise
from laplace_invariance.marglik import KernelBound, Result, Running
from laplace_invariance.marglik.estimators import Estimator
from laplace_invariance.marglik.recipes import SAMPLED, Recipe, cosine_recipe
from laplace_invariance.modes import evaluation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "BATCH",
    "MARGLIK_BATCH",
    "N_SHOWN",
    "SAMPLED",
    "TEST_BATCH",
    "Recipe",
    "accuracy",
    "chosen_device",
    "cosine_recipe",
    "draw_evidence",
    "image_model",
    "load_images",
    "load_transformed",
    "log_likelihood",
    "network_name",
    "say",
    "seeded",
    "training_seconds",
    "with_error",
]

logger = logging.getLogger(__name__)

BATCH = 100  # training images per batch
MARGLIK_BATCH = 250  # training images per batch of an estimate of the evidence
TEST_BATCH = 500  # test images per batch
# What the evidence of a history is, by estimator; of others, the log evidence at that epoch.
ESTIMATES: dict[type[Estimator], str] = {
    Running: "log evidence (running estimate)",
    KernelBound: "lower bound of the log evidence",
}
N_SHOWN = 200  # test images for the accuracy in the progress bar and the history


# Randomness, progress and data.


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's default generator, and restore its state at the end of the context.

    Args:
        seed: The seed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def say(line: str, progress_bar: bool) -> None:
    """Print a line to standard error, where progress bars are, if these are shown."""
    if progress_bar:
        print(line, file=sys.stderr, flush=True)


def load_images(config: ImagesConfig, seed: int, *, needs_test: bool = True) -> datasets.Split:
    """Read the images of a configuration, as they are.

    Args:
        config: Source and numbers of the images.
        seed: Seed of the subsets.
        needs_test: Whether to refuse data without a test set.

    Raises:
        ValueError: If there is no test set where one is needed.
    """
    split = datasets.load(
        config.data,
        root=config.root,
        download=config.download,
        n_train=config.n_train,
        n_test=config.n_test,
        size=config.size,
        test_share=config.test_share,
        seed=seed,
    )
    if needs_test and not split.has_test:
        raise ValueError(
            f"{split.name} has no test images, which are needed here; set some aside by "
            "--test-share 0.2 (test_share=0.2)"
        )
    return split


def load_transformed(
    config: ImagesConfig, transform: str, seed: int, *, needs_test: bool = True
) -> datasets.Split:
    """Read the images of a configuration and transform each of them by a draw of its own.

    Args:
        config: Source and numbers of the images.
        transform: Kind of transformation, one of ``datasets.TRANSFORM_KINDS``.
        seed: Seed of the subsets and of the transformations.
        needs_test: Whether to refuse data without a test set.
    """
    split = load_images(config, seed, needs_test=needs_test)
    generator = torch.Generator().manual_seed(seed)
    x_train = datasets.transformed(split.x_train, transform, generator)
    x_test = datasets.transformed(split.x_test, transform, generator)
    return replace(split, x_train=x_train, x_test=x_test)


def network_name(name: str | None, split: datasets.Split) -> str:
    """Return the name of a network; by default one that suits the images.

    Args:
        name: The name; None chooses a convolutional network for images in colour.
        split: The images.
    """
    if name is not None:
        return name
    return "cnn" if split.in_shape[0] == 3 else "mlp"


def chosen_device(name: str) -> torch.device:
    """Return a device by name.

    Args:
        name: The name, such as ``"cuda"``.

    Raises:
        ValueError: If there is no such device, or it cannot be used.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device {name!r} cannot be used here: {reason}") from error
    return device


# Training.


def image_model(
    net: nn.Module, images: Tensor, augmentation: Augmentation | None, n_samples: int
) -> nn.Module:
    """Return a network that standardises images and, if asked, averages over transformations.

    Args:
        net: Network for standardised images.
        images: Images ``[n, channels, height, width]`` whose mean and deviation are used.
        augmentation: Transformations that the network is averaged over; None averages nothing.
        n_samples: Number of sampled transformations per image.
    """
    layers = [net]
    if isinstance(net, nn.Sequential):
        layers = list(net)
    model = nn.Sequential(Standardise.of(images), *layers)
    if augmentation is None:
        return model
    warn_of_bright_borders(images)
    return InvariantModel(model, augmentation, n_samples)


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset, batch_size: int = TEST_BATCH) -> float:
    """Return the share of examples that a model, in evaluation mode, classifies correctly.

    Args:
        model: Network with outputs ``[batch, classes]``.
        dataset: Inputs and labels.
        batch_size: Number of inputs at a time.
    """
    correct = 0
    device = next(model.parameters(), torch.empty(0)).device
    with evaluation(model):
        for x, y in DataLoader(dataset, batch_size):
            correct += int((model(x.to(device)).argmax(-1) == y.to(device)).sum().item())
    return correct / len(dataset)


@torch.no_grad()
def log_likelihood(model: nn.Module, dataset: TensorDataset, batch_size: int = TEST_BATCH) -> float:
    """Return the mean log-likelihood of labels under a model in evaluation mode.

    Args:
        model: Network with outputs ``[batch, classes]``.
        dataset: Inputs and labels.
        batch_size: Number of inputs at a time.
    """
    total = 0.0
    device = next(model.parameters(), torch.empty(0)).device
    with evaluation(model):
        for x, y in DataLoader(dataset, batch_size):
            total -= F.cross_entropy(model(x.to(device)), y.to(device), reduction="sum").item()
    return total / len(dataset)


def training_seconds(history: Sequence[Mapping[str, Any]]) -> float:
    """Return how long training took by its history.

    Args:
        history: Records of ``marglik_training``, one per epoch.
    """
    return sum(sum(record["seconds"].values()) for record in history)


def with_error(value: float, error: float) -> str:
    """Return a number in words, with its standard error unless that is zero."""
    if not error:
        return f"{value:.3f}"
    return f"{value:.3f} ± {error:.3f}"


def draw_evidence(
    directory: RunDirectory,
    history: Sequence[Mapping[str, Any]],
    n_data: int,
    title: str,
    estimator: Estimator,
    training: Result | None = None,
) -> None:
    """Draw the evidence per datum and its terms over epochs, unless it was never estimated.

    What training estimates is not the exact evidence of the result, and the label says what it is.

    Args:
        directory: Where ``evidence.png`` is saved.
        history: Records of ``marglik_training``, one per epoch.
        n_data: Number of training examples.
        title: Title of the figure.
        estimator: Estimator that made the history.
        training: Result whose epoch and exact evidence are marked; None marks nothing.
    """
    estimated = [record for record in history if record["evidence"] is not None]
    if not estimated:
        return
    terms = {
        ESTIMATES.get(type(estimator), "log evidence"): [r["evidence"] / n_data for r in estimated],
        "log likelihood": [r["log_likelihood"] / n_data for r in estimated],
        "-½ log determinant ratio": [-r["log_det_ratio"] / 2 / n_data for r in estimated],
        "-½ scatter": [-r["scatter"] / 2 / n_data for r in estimated],
    }
    epochs = [record["epoch"] for record in estimated]

    best_epoch = exact = None
    if training is not None:
        best_epoch, exact = training.best_epoch, training.evidence / n_data

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        plots.evidence_terms(epochs, terms, ax, best_epoch=best_epoch, exact=exact)
        figure.suptitle(
            f"evidence while training: {title}",
            x=0.01,
            ha="left",
            fontsize="medium",
            color=plots.INK,
        )

    directory.figure("evidence.png", (8.5, 4.2), draw)
