"""One call from a data set and a network to a learnt augmentation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from laplace_invariance.augmentations.affine import warn_of_bright_borders
from laplace_invariance.augmentations.base import Augmentation
from laplace_invariance.curvature.ggn import AugmentedGGN
from laplace_invariance.curvature.names import find_backend
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.layers import Standardise
from laplace_invariance.marglik.recipes import cosine_recipe
from laplace_invariance.marglik.search import Search
from laplace_invariance.marglik.suggestions.given import chosen_augmentation, like
from laplace_invariance.marglik.training import Result, marglik_training
from laplace_invariance.modes import evaluation
from laplace_invariance.tables import labelled

if TYPE_CHECKING:
    from laplace_invariance.augmentations.export import LearntTransform

__all__ = ["LearntAugmentation", "learn_augmentation"]

MARGLIK_BATCH = 250  # examples per batch of an estimate of the evidence
MOST_SHOWN = 12  # labels in a message


@dataclass(frozen=True)
class LearntAugmentation:
    """What :func:`learn_augmentation` learnt; prints as ranges in words.

    Attributes:
        augmentation: The learnt augmentation.
        model: The network, averaged over the augmentation.
        shape: Shape of one input.
        training: What :func:`~laplace_invariance.marglik_training` returned: history, evidence,
            Laplace approximation.
        n_examples: Number of training examples.
    """

    augmentation: Augmentation
    model: InvariantModel
    shape: tuple[int, ...]
    training: Result
    n_examples: int

    @property
    def evidence(self) -> float:
        """Log evidence per training example."""
        return self.training.evidence / self.n_examples

    def ranges(self) -> dict[str, str]:
        """Return the learnt ranges, by name, in degrees, pixels of these images, and factors."""
        return self.augmentation.ranges(self.shape)

    def to_transform(self, generator: torch.Generator | None = None) -> LearntTransform:
        """Return a transform of torchvision that draws from what was learnt.

        Args:
            generator: Source of the draws; None is torch's default generator.
        """
        return self.augmentation.to_transform(generator)

    def __str__(self) -> str:
        lines = [labelled(name.replace("_", " "), words) for name, words in self.ranges().items()]
        return "\n".join([*lines, labelled("log evidence", f"{self.evidence:.3f} per example")])


def learn_augmentation(
    net: nn.Module,
    dataset: Dataset[Any],
    augmentation: Augmentation | None = None,
    *,
    likelihood: str = "classification",
    n_samples: int = 8,
    n_epochs: int = 100,
    batch_size: int = 100,
    lr: float = 5e-3,
    search: bool | Search = True,
    progress_bar: bool = False,
    **options: Any,
) -> LearntAugmentation:
    """Learn from a data set which augmentation a network should be trained with.

    The examples are read once and kept in memory, so a data set whose own transforms are random
    should be given without them. Images are standardised in front of the network, behind the
    augmentation. Weights, priors and ranges are learnt together, on these examples alone.

    Args:
        net: Network with outputs ``[batch, outputs]``, which is trained in place.
        dataset: Data set of pairs of input and target, such as one of torchvision or one's own.
            Images are PIL images, tensors ``[channels, height, width]`` of uint8, or of floating
            point in [0, 1] with black = 0; all have one size. Labels are 0, 1, 2, ... without gaps.
        augmentation: What is learnt; None is ``AffineImage()``, for images. It is copied.
        likelihood: Either ``"classification"`` or ``"regression"``.
        n_samples: Number of samples that outputs are averaged over.
        n_epochs: Number of epochs.
        batch_size: Number of examples per batch of training.
        lr: Step size of the weights at the start, from which it falls along half a cosine.
        search: Whether to try many ranges in short trainings first, or a
            :class:`~laplace_invariance.marglik.Search` with other options; False starts where the
            augmentation is.
        progress_bar: Whether to show progress.
        **options: Further arguments of :func:`~laplace_invariance.marglik_training`, which replace
            those chosen here.

    Returns:
        The augmentation, the averaged network, and the result of training.

    Raises:
        TypeError: If examples are not pairs, or inputs are neither tensors nor images.
        ValueError: If inputs differ in shape, labels have gaps or start at 1, there is one class,
            or the network has too few outputs.
    """
    _check_network(net)
    x, y = _examples(dataset)
    if likelihood == "classification":
        _check_labels(y)
        y = y.long()
    device, dtype = like(net)
    x = x.to(dtype)
    chosen = chosen_augmentation(augmentation, x).to(device, dtype)
    model = InvariantModel(_standardised(net, x).to(device, dtype), chosen, n_samples)
    if likelihood == "classification":
        _check_outputs(model, x, int(y.max()) + 1)
    train = TensorDataset(x, y)
    loader = DataLoader(train, min(batch_size, len(train)), shuffle=True)
    arguments: dict[str, Any] = {
        **cosine_recipe(n_epochs, len(loader), lr=lr),
        "search": search,
        "marglik_batch_size": MARGLIK_BATCH,
    }
    backend = find_backend(options.get("backend", "ggn"))
    if likelihood == "regression" or not issubclass(backend, AugmentedGGN):
        arguments["backend_kwargs"] = {}  # nothing to sample
    training = marglik_training(
        model, loader, likelihood, progress_bar=progress_bar, **(arguments | options)
    )
    return LearntAugmentation(chosen, model, tuple(x.shape[1:]), training, len(train))


def _check_network(net: nn.Module) -> None:
    for name, module in net.named_modules():
        if isinstance(module, InvariantModel | Augmentation):
            raise ValueError(
                f"the network has an augmentation already, {name or 'itself'} of class "
                f"{type(module).__name__}; give the network alone, or call marglik_training"
            )


def _standardised(net: nn.Module, x: Tensor) -> nn.Module:
    """Return a network that standardises images first; networks for other inputs stay alone."""
    if x.ndim != 4:
        return net
    if x.min() < 0 or x.max() > 1:
        warnings.warn(
            f"images go from {x.min():.2f} to {x.max():.2f}, but what comes in from outside of a "
            "transformed image is 0, which should be black: leave out normalisation, as images are "
            "standardised behind the augmentation",
            stacklevel=3,
        )
    warn_of_bright_borders(x)
    return nn.Sequential(Standardise.of(x), net)


@torch.no_grad()
def _check_outputs(model: InvariantModel, x: Tensor, n_classes: int) -> None:
    """Raise unless the network has an output for every class."""
    device, _ = like(model.net)
    with evaluation(model):
        outputs = model.net(x[:2].to(device))
    if outputs.ndim != 2 or outputs.shape[1] < n_classes:
        raise ValueError(
            f"{n_classes} classes need outputs [batch, {n_classes}], and those of the network are "
            f"[{', '.join(['batch', *map(str, outputs.shape[1:])])}]"
        )


# Examples.


def _examples(dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """Return all inputs ``[n, ...]`` and targets of a data set."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"the data set must have a length and examples by number, as a list has, got "
            f"{type(dataset).__name__}; of a DataLoader, give its .dataset"
        )
    if not len(dataset):
        raise ValueError("the data set is empty")
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        x, y = dataset.tensors
        return _as_tensor(x, "the inputs"), y
    inputs, targets = [], []
    for place, x, y in _pairs(dataset):
        inputs.append(_as_tensor(x, place))
        if isinstance(y, str):
            raise TypeError(
                f"the label of {place} is {y!r}, and labels must be numbers 0, 1, 2, ..."
            )
        targets.append(torch.as_tensor(y))
        if inputs[-1].shape != inputs[0].shape:
            raise ValueError(
                f"inputs differ in shape: {list(inputs[0].shape)} at first, and "
                f"{list(inputs[-1].shape)} of {place}; bring images to one size and kind in the "
                "data set, as by transform=torchvision.transforms.v2.Resize((32, 32))"
            )
    return torch.stack(inputs), torch.stack(targets)


def _pairs(dataset: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield place, input and target of all examples."""
    files = getattr(dataset, "samples", None)  # of torchvision's folders
    for i in range(len(dataset)):
        place = f"example {i}"
        if isinstance(files, list) and len(files) == len(dataset):
            place = f"{place} ({files[i][0]})"
        try:
            example = dataset[i]
        except OSError as error:  # such as that of a damaged image
            raise ValueError(f"{place} cannot be read: {error}; replace or remove it") from error
        if not isinstance(example, Sequence) or len(example) != 2:
            raise TypeError(
                f"{place} must be a pair of input and target, got {type(example).__name__}"
            )
        yield place, example[0], example[1]


def _as_tensor(value: Any, place: str) -> Tensor:
    """Return an input as a tensor; images of bytes as floating point in [0, 1]."""
    if not isinstance(value, Tensor):
        from PIL.Image import Image
        from torchvision.transforms.v2 import functional

        if not isinstance(value, Image):
            raise TypeError(
                f"{place} must be a tensor or a PIL image, got {type(value).__name__}; of an array "
                "make one by torch.from_numpy"
            )
        value = functional.pil_to_tensor(value)
    value = value.detach().as_subclass(Tensor)
    if value.dtype == torch.uint8:
        return value.to(torch.get_default_dtype()) / 255
    if not value.is_floating_point():
        raise TypeError(f"{place} must be uint8 or floating point, got {value.dtype}")
    return value


def _check_labels(y: Tensor) -> None:
    """Raise unless labels are 0, 1, 2, ... without gaps."""
    if y.ndim != 1 or y.is_floating_point():
        raise ValueError(
            f"labels must be integers, one per example, got shape {list(y.shape)} of {y.dtype}"
        )
    labels = y.unique().tolist()
    if labels != list(range(len(labels))):
        shown = ", ".join(str(label) for label in labels[:MOST_SHOWN])
        raise ValueError(
            f"labels are {shown}{', ...' if len(labels) > MOST_SHOWN else ''}, but {len(labels)} "
            f"classes are labelled 0 to {len(labels) - 1}, without gaps; map them in the data set, "
            "as by target_transform=sorted_labels.index"
        )
    if len(labels) == 1:
        raise ValueError("there is one class, so that there is nothing to tell apart")
