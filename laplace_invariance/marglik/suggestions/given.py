"""What is given to suggest: the network, the data, the augmentation, and how to compare."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laplace_invariance.augmentations import AffineImage
from laplace_invariance.augmentations.base import Augmentation
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.marglik.search.candidates import Candidate, Space
from laplace_invariance.marglik.settings import Settings, check_numbers
from laplace_invariance.marglik.targets import targets_of

__all__ = [
    "Comparison",
    "Ranges",
    "candidates_of",
    "chosen_augmentation",
    "copied",
    "like",
    "signature",
]

# By a name or by several, which a Mapping cannot say as it is invariant in its keys
Ranges = Mapping[Any, float | Sequence[float]]
# Of the settings, what evidences depend on
SIGNED = ("likelihood", "hessian_structure", "backend", "backend_kwargs", "optimizer_kwargs")


@dataclass(frozen=True)
class Comparison:
    """How candidates are compared; see :func:`~laplace_invariance.suggest`."""

    n_steps: int
    n_repeats: int
    n_examples: int
    margin: float

    def __post_init__(self) -> None:
        check_numbers(self, "n_steps", "n_examples", whole=True)
        check_numbers(self, "margin", least=0)
        check_numbers(self, "n_repeats", least=2, whole=True)  # one has no standard error
        if self.n_steps % 2:
            raise ValueError(
                f"n_steps must be even, as evidences are compared after half of them, too, got "
                f"{self.n_steps}"
            )


def candidates_of(model: nn.Module, ranges: Ranges | None) -> list[Candidate]:
    """Return what is compared: nothing first, then ranges one after another.

    Args:
        model: Model with an augmentation, or the augmentation itself.
        ranges: Widths by names, as for :func:`~laplace_invariance.suggest`.

    Raises:
        ValueError: If there is no such range, or a width is zero or outside of its limits.
    """
    space = Space(model)
    if ranges is None:
        return space.alone()
    found = [space.candidate({})]
    for names, widths in ranges.items():
        unit = (names,) if isinstance(names, str) else tuple(names)
        for width in [widths] if isinstance(widths, int | float) else widths:
            candidate = space.candidate(dict.fromkeys(unit, width))
            if len(candidate.widths) < len(unit):
                raise ValueError(
                    f"a width of {width} closes {', '.join(unit)}, and nothing is always among the "
                    "candidates; give a width above 0.001"
                )
            found.append(candidate)
    if len(found) == 1:
        raise ValueError("ranges names nothing to try; leave it out to try everything")
    return list(dict.fromkeys(found))


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of the network; raise if it is not one without augmentation."""
    for name, module in model.named_modules():
        if isinstance(module, InvariantModel | Augmentation):
            place = f"its module {name!r}" if name else "it"
            raise ValueError(
                "suggest asks what a network without augmentation would gain, but the model has "
                f"one already: {place} is of class {type(module).__name__}; give the network "
                "inside, such as model.net, or learn ranges by marglik_training"
            )
    return deepcopy(model)


def like(net: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return device and type of the weights, which the augmentation gets as well."""
    for weight in net.parameters():
        return weight.device, weight.dtype
    raise ValueError("the model has no parameters, so that there is no evidence to compare")


def chosen_augmentation(augmentation: Augmentation | None, inputs: Any) -> Augmentation:
    """Return a copy of the augmentation; if there is none, that of images, if inputs are images."""
    if augmentation is not None:
        if not isinstance(augmentation, Augmentation):
            raise TypeError(
                "augmentation must be a laplace_invariance.Augmentation, "
                f"got {type(augmentation).__name__}"
            )
        return deepcopy(augmentation)
    if not isinstance(inputs, Tensor) or inputs.ndim != 4:
        kind = list(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
        raise ValueError(
            "without augmentation= inputs must be images [n, channels, height, width], got "
            f"{kind}; give an augmentation, such as AffinePoints() for points in the plane"
        )
    return AffineImage()


def signature(model: InvariantModel, settings: Settings, comparison: Comparison) -> dict[str, Any]:
    """Return what must agree between a call that wrote evidences and one that resumes."""
    weights = 0
    for tensor in model.net.state_dict().values():
        weights = zlib.crc32(tensor.detach().cpu().numpy().tobytes(), weights)
    targets = next(targets_of(settings.data))
    own = settings.signature()
    return {
        "checksum of the weights": weights,
        "checksum of the first targets": zlib.crc32(targets.cpu().numpy().tobytes()),
        "number of training examples": settings.data.n_data,
        "batch size": settings.data.train_loader.batch_size,
        "augmentation": repr(model.augmentation),
        "n_samples": model.n_samples,
        "n_steps": comparison.n_steps,
        "n_examples": comparison.n_examples,
        "optimizer": settings.optimizer.optimizer_cls.__name__,
        "subset_of_weights": settings.evidence.subset_of_weights,
        "prior_structure": repr(settings.priors.prior_structure),
        **{name: own[name] for name in SIGNED},
    }
