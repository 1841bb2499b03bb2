"""A layer as the sum of several: one with a symmetry, and freer ones beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

__all__ = ["OnGroup", "ResidualPathway", "closed_paths"]


class ResidualPathway(nn.Module):
    """Sum of layers that see the same input; the prior precision of each decides how much is used.

    Paths are given in order, or by name, which then names their parameters::

        ResidualPathway(conv=nn.Conv2d(3, 8, 3), f_fc=FactoredLinear2d(3, 8, 32, 30))

    Where features are subsampled, strictly equivariant paths must be subsampled together, at
    the same positions, or their sum would not be equivariant: ``pool`` does so. Paths to the
    smaller size, which have no symmetry to lose, are added after it.

    Args:
        *paths: Modules, which are called ``"0"``, ``"1"``, ...
        pool: Subsampling of the sum of all paths whose output is larger than that of the
            others, or of all.
        **named: Modules by name.

    Raises:
        ValueError: If there is no path, or a name is used twice.
        TypeError: If a path is not a module.
    """

    def __init__(
        self, *paths: nn.Module, pool: nn.Module | None = None, **named: nn.Module
    ) -> None:
        super().__init__()
        everything = {str(i): path for i, path in enumerate(paths)}
        twice = everything.keys() & named.keys()
        if twice:
            raise ValueError(f"path {min(twice)!r} is given in order and by name")
        everything |= named
        if not everything:
            raise ValueError("ResidualPathway needs at least one path")
        for name, path in everything.items():
            if not isinstance(path, nn.Module):
                raise TypeError(f"path {name!r} must be a module, got {type(path).__name__}")
            self.add_module(name, path)
        self.pool = pool

    @property
    def paths(self) -> dict[str, nn.Module]:
        """The paths by name."""
        # Not named_children(), which would leave out a module that is there twice.
        children = self._modules.items()
        return {name: path for name, path in children if path is not None and name != "pool"}

    def forward(self, x: Tensor) -> Tensor:
        outputs = {name: path(x) for name, path in self.paths.items()}
        if self.pool is None:
            return _sum(outputs)
        size = max(y.shape[-2:] for y in outputs.values())
        large = {name: y for name, y in outputs.items() if y.shape[-2:] == size}
        others = {name: y for name, y in outputs.items() if name not in large}
        return _sum({f"pooled {' + '.join(large)}": self.pool(_sum(large)), **others})


def _sum(outputs: dict[str, Tensor]) -> Tensor:
    if len({y.shape for y in outputs.values()}) > 1:
        shapes = ", ".join(f"{name}: {list(y.shape)}" for name, y in outputs.items())
        raise ValueError(f"the paths of a ResidualPathway must return the same shape, got {shapes}")
    # From 0 on, so that the output of a single path is copied: an activation in place behind the
    # pathway leaves it alone.
    total = sum(outputs.values())
    assert isinstance(total, Tensor)
    return total


class OnGroup(nn.Module):
    """Apply a layer for feature maps to features on a group, whose elements are further channels.

    Args:
        layer: Maps ``[n, channels * order, ...]`` to ``[n, channels' * order, ...]``.
        order: Number of elements of the group.
    """

    def __init__(self, layer: nn.Module, order: int) -> None:
        super().__init__()
        self.layer = layer
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 5:  # an image is not on the group yet
            x = x.flatten(1, 2)
        return self.layer(x).unflatten(1, (-1, self.order))


def closed_paths(
    model: nn.Module, precision: float = 1e3, *, shared: bool = False
) -> dict[str, float]:
    """Return prior precisions with which training starts with nearly strict symmetry.

    All paths but the first of each :class:`ResidualPathway` are closed. Small weights alone do
    not keep a free path closed, as an optimiser such as Adam changes small weights as fast as
    others before the evidence is first estimated. Give these to training by evidence::

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
    for place, pathway in model.named_modules():
        if not isinstance(pathway, ResidualPathway):
            continue
        _, *others = pathway.paths.items()
        for name, path in others:
            for tensor, value in _closed(path, precision, shared):
                found[re.escape(_joined(place, name, tensor))] = value
    return found


def _closed(path: nn.Module, precision: float, shared: bool) -> Iterator[tuple[str, float]]:
    """Yield the name of every tensor by which a path is closed, and its initial precision."""
    precisions: dict[str, float] = {}  # by name of a part; parts come after the layer they are in
    for part, module in path.named_modules():
        if not shared:
            for child, value in getattr(module, "closed_precisions", {}).items():
                precisions[_joined(part, child)] = value
        own = getattr(module, "own_prior_parameters", ())
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and name not in own:
                yield _joined(part, name), precisions.get(part, precision)


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))
