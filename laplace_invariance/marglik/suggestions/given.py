"""What is given to suggest: the network, the data, the augmentation, and how to compare."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from laplace_invariance.augmentations import AffineImage
from laplace_invariance.augmentations.base import Augmentation
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.marglik.fingerprints import data_fingerprint, model_fingerprint
from laplace_invariance.marglik.hyperparameters import outermost_augmentations
from laplace_invariance.marglik.search.candidates import Candidate, Space
from laplace_invariance.marglik.settings import Settings, check_numbers

__all__ = [
    "Comparison",
    "Ranges",
    "candidates_of",
    "check_options",
    "chosen_augmentation",
    "copied",
    "like",
    "signature",
]

# By a name or by several, which a Mapping cannot say as it is invariant in its keys
Ranges = Mapping[Any, float | Sequence[float]]
# Beside the arguments of suggest, those of settings_of_evidence
OPTIONS = (
    "optimizer_cls",
    "hessian_structure",
    "backend",
    "backend_kwargs",
    "prior_structure",
    "subset_of_weights",
    "dict_key_x",
    "dict_key_y",
)
# Of the settings, what evidences depend on
SIGNED = (
    "likelihood",
    "hessian_structure",
    "backend",
    "backend_kwargs",
    "optimizer_kwargs",
    "subset_of_weights",
)


@dataclass(frozen=True)
class Comparison:
    """How candidates are compared; see :func:`~laplace_invariance.suggest`."""

    n_steps: int
    n_repeats: int
    n_examples: int
    margin: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is None:
                raise TypeError(f"{name} must be a number, got None")
        check_numbers(self, "n_steps", "n_examples", whole=True)
        check_numbers(self, "margin", least=0)
        check_numbers(self, "n_repeats", least=2, whole=True)  # one has no standard error
        if self.n_steps % 2:
            raise ValueError(
                f"n_steps must be even, as evidences are compared after half of them, too, got "
                f"{self.n_steps}"
            )


def check_options(options: Mapping[str, Any], optimizer_kwargs: object) -> None:
    """Raise unless options are those that suggest takes, and of their kinds.

    Args:
        options: Options by name.
        optimizer_kwargs: Arguments of the optimiser.
    """
    for name, value in options.items():
        if name not in OPTIONS:
            raise TypeError(f"suggest has no option {name!r}; there are {', '.join(OPTIONS)}")
        if value is None and name != "backend_kwargs":
            raise TypeError(f"{name} must not be None; leave it out for the usual one")
    for name, value in {**options, "optimizer_kwargs": optimizer_kwargs}.items():
        if name.endswith("_kwargs") and not isinstance(value, Mapping | None):
            raise TypeError(f"{name} must be a dictionary, got {value!r}")
    optimizer = options.get("optimizer_cls", torch.optim.Adam)
    if not isinstance(optimizer, type) or not issubclass(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer_cls must be a class of torch optimisers, got {optimizer!r}")


def candidates_of(model: nn.Module, ranges: Ranges | None) -> list[Candidate]:
    """Return what is compared: nothing first, then ranges one after another.

    Args:
        model: Model with an augmentation, or the augmentation itself.
        ranges: Widths by names, as for :func:`~laplace_invariance.suggest`.

    Raises:
        TypeError: If names or widths are something else.
        ValueError: If there is no such range, or a width is zero or outside of its limits.
    """
    if not any(one.openings() for one in outermost_augmentations(model).values()):
        raise ValueError(
            "there is no range to try: the augmentation learns none, as after frozen(); give one "
            "whose ranges require grad, such as AffineImage()"
        )
    space = Space(model)
    if ranges is None:
        return space.alone()
    if not isinstance(ranges, Mapping):
        raise TypeError(
            f"ranges must map names to widths, such as {{'rotation': 1.0}}, got {ranges!r}"
        )
    if not ranges:
        raise ValueError("ranges names nothing to try; leave it out to try everything")
    found = [space.candidate({})]
    for names, widths in ranges.items():
        unit = _unit(names)
        found += [_opened(space, unit, width) for width in _numbers(", ".join(unit), widths)]
    return list(dict.fromkeys(found))


def _unit(names: Any) -> tuple[str, ...]:
    """Return the names that a key of ranges stands for."""
    unit = (names,) if isinstance(names, str) else names
    if not isinstance(unit, tuple) or not all(isinstance(name, str) for name in unit):
        raise TypeError(f"ranges must have names, or tuples of names, as keys, got {names!r}")
    if not unit:
        raise ValueError("ranges has a tuple without names, which opens nothing; leave it out")
    if len(set(unit)) < len(unit):
        raise ValueError(f"ranges names one of {', '.join(unit)} twice in one tuple")
    return unit


def _numbers(names: str, widths: Any) -> list[float]:
    """Return one width or several, of Python, numpy or torch, as numbers."""
    if isinstance(widths, Tensor | np.ndarray | np.generic):
        widths = widths.tolist()
    several = list(widths) if isinstance(widths, Iterable) else [widths]
    several = [w.tolist() if isinstance(w, Tensor | np.ndarray) else w for w in several]
    for width in several:
        if isinstance(width, bool) or not isinstance(width, numbers.Real):
            raise TypeError(f"the width of {names} must be a number, or several, got {widths!r}")
    if not several:
        raise ValueError(f"ranges has no width for {names}; leave it out")
    return [float(width) for width in several]


def _opened(space: Space, unit: tuple[str, ...], width: float) -> Candidate:
    candidate = space.candidate(dict.fromkeys(unit, width))
    if math.isinf(width):  # where there is no limit
        raise ValueError(f"the width of {', '.join(unit)} must be finite, got {width}")
    if len(candidate.widths) < len(unit):
        raise ValueError(
            f"a width of {width} closes {', '.join(unit)}, and nothing is always among the "
            "candidates; give a width above 0.001"
        )
    return candidate


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of the network; raise if it is not one without augmentation."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}")
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


def chosen_augmentation(augmentation: Augmentation | None, inputs: Tensor) -> Augmentation:
    """Return a copy of the augmentation; if there is none, that of images, if inputs are images."""
    if augmentation is not None:
        if not isinstance(augmentation, Augmentation):
            raise TypeError(
                "augmentation must be a laplace_invariance.Augmentation, "
                f"got {type(augmentation).__name__}"
            )
        return deepcopy(augmentation)
    if inputs.ndim != 4:
        raise ValueError(
            "without augmentation= inputs must be images [n, channels, height, width], got "
            f"{list(inputs.shape)}; give an augmentation, such as AffinePoints() for points in the "
            "plane"
        )
    return AffineImage()


def signature(model: InvariantModel, settings: Settings, comparison: Comparison) -> dict[str, Any]:
    """Return what must agree between a call that wrote evidences and one that resumes.

    Args:
        model: Averaged model, of which all ranges are closed here.
        settings: Settings of the evidence and of the optimiser.
        comparison: How candidates are compared.
    """
    space = Space(model)
    space.put(space.candidate({}))  # as all pilots start
    own = settings.signature()
    return {
        **model_fingerprint(model),
        "learnt weights": [name for name, p in model.named_parameters() if p.requires_grad],
        "learnt ranges": list(model.augmentation.widths()),
        **data_fingerprint(settings.data, model),
        "number of training examples": settings.data.n_data,
        "n_samples": model.n_samples,
        "n_steps": comparison.n_steps,
        "n_examples": comparison.n_examples,
        "optimizer": settings.optimizer.optimizer_cls.__name__,
        "prior_structure": repr(settings.priors.prior_structure),
        "dict_key_x": settings.data.dict_key_x,
        "dict_key_y": settings.data.dict_key_y,
        **{name: own[name] for name in SIGNED},
    }
