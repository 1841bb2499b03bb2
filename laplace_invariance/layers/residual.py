"""A layer as the sum of several: one with a symmetry, and freer ones beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["OnGroup", "ResidualPathway"]

ELEMENTS = ("channels", "positions")  # what elements of a group are to layers without one


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
        self._off: frozenset[str] = frozenset()

    @property
    def paths(self) -> dict[str, nn.Module]:
        """The paths by name."""
        # Not named_children(), which would leave out a module that is there twice.
        children = self._modules.items()
        return {name: path for name, path in children if path is not None and name != "pool"}

    @contextmanager
    def without(self, *names: str) -> Iterator[None]:
        """Leave paths out of the sum inside the context; weights and shapes stay as they are.

        Args:
            *names: Names of the paths that are left out.

        Raises:
            ValueError: If there is no such path.
        """
        unknown = [name for name in names if name not in self.paths]
        if unknown:
            raise ValueError(f"there is no path {unknown[0]!r}, only {', '.join(self.paths)}")
        before = self._off
        self._off = before | frozenset(names)
        try:
            yield
        finally:
            self._off = before

    def forward(self, x: Tensor) -> Tensor:
        outputs = {name: path(x) for name, path in self.paths.items()}
        for name in self._off:
            outputs[name] = torch.zeros_like(outputs[name])
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
    """Apply a layer for feature maps to features on a group.

    Elements of the group are further channels, or further positions: the feature maps of all
    elements, one below the other. A factored layer, ``theta_1(c', c, x') theta_2(c', c, x)``, then
    has factors for each pair of channels and elements, or for each pair of channels factors that
    depend on element and position, ``order`` times fewer weights.

    Args:
        layer: Maps ``[n, channels * order, ...]`` to ``[n, channels' * order, ...]`` or, for
            positions, ``[n, channels, order * height, width]`` likewise.
        order: Number of elements of the group.
        elements: ``"channels"`` or ``"positions"``.

    Raises:
        ValueError: If ``elements`` is neither.
    """

    def __init__(self, layer: nn.Module, order: int, elements: str = "channels") -> None:
        super().__init__()
        if elements not in ELEMENTS:
            raise ValueError(f"elements must be one of {', '.join(ELEMENTS)}, got {elements!r}")
        self.layer = layer
        self.order = order
        self.axis = 1 + ELEMENTS.index(elements)  # which elements are further entries of

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 5:  # an image is not on the group yet
            x = x.flatten(self.axis, self.axis + 1)
        y = self.layer(x)
        if self.axis == 1:
            return y.unflatten(1, (-1, self.order))
        return y.unflatten(2, (self.order, -1))
