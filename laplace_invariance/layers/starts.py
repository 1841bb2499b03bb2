"""How far free paths are open when training starts: scales of weights, and prior precisions.

The first path of every :class:`ResidualPathway` is its strictest one, and all others are *free*. A
free path is closed by small weights together with a narrow prior. Small weights alone do not keep
it closed, as an optimiser such as Adam changes small weights as fast as others before the evidence
is first estimated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from laplace_invariance.layers.residual import ResidualPathway

__all__ = [
    "START_LEVELS",
    "StartLevel",
    "check_rescalable",
    "closed_paths",
    "free_paths",
    "rescale_paths",
    "start_precisions",
]


@dataclass(frozen=True)
class StartLevel:
    """How far a free path is open at the start.

    Attributes:
        scale: Scale of the weights: their standard deviation times the square root of their
            fan-in. With 0, all tensors of the path are zero.
        precision: Prior precision of what closes the path.
        keeps_parts: Whether parts with precisions of their own (``closed_precisions``), such as
            the first factor of factored layers, have these, or ``precision`` as well.
    """

    scale: float
    precision: float
    keeps_parts: bool


# From closed for good to open. At zero both factors of a factored layer have no gradient. "half
# open" holds its first factor by a prior four times as narrow as its initial weights.
START_LEVELS: dict[str, StartLevel] = {
    "off": StartLevel(0.0, 1e3, keeps_parts=True),
    "closed": StartLevel(0.01, 1e3, keeps_parts=True),
    "half open": StartLevel(1.0, 1.0, keeps_parts=True),
    "open": StartLevel(1.0, 1.0, keeps_parts=False),
}


def free_paths(model: nn.Module) -> dict[str, dict[str, nn.Module]]:
    """Return all paths but the first of every pathway that has several, by place and name.

    A pathway inside of a free path is a part of that path.

    Args:
        model: Any module with pathways, their strictest path first.
    """
    found: dict[str, dict[str, nn.Module]] = {}
    inside: tuple[str, ...] = ()  # beginnings of the names of what is in a free path
    for place, pathway in model.named_modules():
        if not isinstance(pathway, ResidualPathway) or f"{place}.".startswith(inside):
            continue
        _, *others = pathway.paths.items()
        if others:
            found[place] = dict(others)
            inside += tuple(f"{_joined(place, name)}." for name, _ in others)
    return found


def check_rescalable(model: nn.Module) -> None:
    """Raise ValueError if weights of a free path are zero, which no factor takes elsewhere.

    Args:
        model: Any module with pathways.
    """
    for place, paths in free_paths(model).items():
        for name, path in paths.items():
            for part in _parts(path):
                if _is_rescaled(path, part):
                    _check_not_zero(path, part, _joined(place, name))


def closed_paths(
    model: nn.Module, precision: float = 1e3, *, shared: bool = False
) -> dict[str, float]:
    """Return prior precisions with which training starts with nearly strict symmetry.

    All paths but the first of each :class:`ResidualPathway` are closed. Give these to training by
    evidence::

        marglik_training(net, loader, prior_prec_init=closed_paths(net))

    Parts of a layer that start otherwise say so by a property ``closed_precisions``, as the
    first factor of factored layers does (:class:`FactoredMap2d`). With ``precision`` for both
    factors, those of small layers would vanish, and with them the gradients of both: what is
    closed too early would stay closed.

    Args:
        model: Any module with pathways, their strictest path first.
        precision: Precision of what is closed.
        shared: Use ``precision`` for both factors; for a ``prior_structure`` in which these
            share theirs, such as ``"path"``.

    Returns:
        Precisions by regular expression, one for each trainable tensor of the paths concerned,
        but not for a layer's ``own_prior_parameters``, the size of which says nothing about how
        much of a path is used.
    """
    found: dict[str, float] = {}
    for place, paths in free_paths(model).items():
        for name, path in paths.items():
            for part in _parts(path):
                value = precision if shared or part.precision is None else part.precision
                found[re.escape(_joined(place, name, part.name))] = value
    return found


def start_precisions(
    model: nn.Module, levels: Mapping[str, str], *, shared: bool = False
) -> dict[str, float]:
    """Return the prior precisions with which free paths start at some levels.

    Args:
        model: Any module with pathways, their strictest path first.
        levels: Name of a level of :data:`START_LEVELS` by place of the pathway.
        shared: Whether both factors of a factored layer share a prior precision.

    Returns:
        Initial prior precisions by name of the tensor.

    Raises:
        ValueError: If there is no such place or level.
    """
    found: dict[str, float] = {}
    for where, path, level in _started(model, levels):
        for part in _parts(path):
            value = level.precision
            if part.precision is not None and level.keeps_parts and not shared:
                value = part.precision
            found[_joined(where, part.name)] = value
    return found


def rescale_paths(model: nn.Module, levels: Mapping[str, str]) -> None:
    """Rescale the weights of free paths to the levels at which they start.

    Args:
        model: Any module with pathways, their strictest path first; changed in place.
        levels: Name of a level of :data:`START_LEVELS` by place of the pathway.

    Raises:
        ValueError: If there is no such place or level, or weights that are to be rescaled are zero.
    """
    for where, path, level in _started(model, levels):
        _rescale(path, level.scale, where)


def _started(
    model: nn.Module, levels: Mapping[str, str]
) -> Iterator[tuple[str, nn.Module, StartLevel]]:
    """Yield the full name of every free path, the path, and its level."""
    paths = free_paths(model)
    for place, level in levels.items():
        if place not in paths:
            known = ", ".join(paths) or "none"
            raise ValueError(f"{place!r} has no free paths; places that have some: {known}")
        if level not in START_LEVELS:
            raise ValueError(f"a level is one of {', '.join(START_LEVELS)}; got {level!r}")
        for name, path in paths[place].items():
            yield _joined(place, name), path, START_LEVELS[level]


class _Part(NamedTuple):
    """A tensor that opens or closes a path.

    Attributes:
        name: Name of the tensor in the path.
        owner: Module that has it.
        precision: Prior precision that it keeps when the path is closed; None if it has none.
    """

    name: str
    owner: nn.Module
    precision: float | None


def _parts(path: nn.Module) -> Iterator[_Part]:
    """Yield the trainable tensors of a path but for ``own_prior_parameters``."""
    precisions: dict[str, float] = {}  # by name of a part; parts come after the layer they are in
    for place, module in path.named_modules():
        for child, value in getattr(module, "closed_precisions", {}).items():
            precisions[_joined(place, child)] = value
        own = getattr(module, "own_prior_parameters", ())
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and name not in own:
                yield _Part(_joined(place, name), module, precisions.get(place))


@torch.no_grad()
def _rescale(path: nn.Module, scale: float, where: str) -> None:
    """Give a path weights of another scale; parts with precisions of their own keep theirs."""
    for part in _parts(path):
        tensor = path.get_parameter(part.name)
        if scale == 0:
            tensor.zero_()
        elif _is_rescaled(path, part):
            _check_not_zero(path, part, where)
            present = tensor.square().mean().sqrt().item() * math.sqrt(_fan_in(part.owner, tensor))
            tensor.mul_(scale / present)


def _is_rescaled(path: nn.Module, part: _Part) -> bool:
    """Return whether the scale of a tensor opens or closes a path: not that of a bias."""
    return path.get_parameter(part.name).ndim > 1 and part.precision is None


def _check_not_zero(path: nn.Module, part: _Part, where: str) -> None:
    if not path.get_parameter(part.name).any():
        raise ValueError(
            f"{where}.{part.name} is zero, and cannot be rescaled; build the path with a positive "
            "scale"
        )


def _fan_in(owner: nn.Module, weight: torch.Tensor) -> int:
    """Return the number of inputs of an output."""
    in_features = getattr(owner, "in_features", None)  # of one of several slots
    if isinstance(in_features, int):
        return in_features
    return weight[0].numel()


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))
