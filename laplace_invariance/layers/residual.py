"""A layer as the sum of several: one with a symmetry, and freer ones beside it."""

from __future__ import annotations

import re

from torch import Tensor, nn

from laplace_invariance.layers.factored import SlotLinear

__all__ = ["OnGroup", "ResidualPathway", "closed_paths"]


class ResidualPathway(nn.Module):
    """Sum of layers that see the same input; the prior precision of each decides how much of it is used.

    Paths are given in order, or by name, which then names their parameters: ``ResidualPathway(conv=nn.Conv2d(3, 8, 3),
    f_fc=FactoredLinear2d(3, 8, 32, 30))``.

    Where features are subsampled, strictly equivariant paths must be subsampled together, at the same positions, or their sum
    would not be equivariant: ``pool`` does so. Paths to the smaller size, which have no symmetry to lose, are added after it.

    Args:
        *paths: modules, called ``"0"``, ``"1"``, ...
        pool: subsampling of the sum of all paths whose output is larger than that of the others, or of all.
        **named: modules by name.
    """

    def __init__(
        self, *paths: nn.Module, pool: nn.Module | None = None, **named: nn.Module
    ) -> None:
        super().__init__()
        everything = {str(i): path for i, path in enumerate(paths)}
        if everything.keys() & named.keys():
            raise ValueError(
                f"path {min(everything.keys() & named.keys())!r} is given in order and by name"
            )
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
        return {name: path for name, path in self._modules.items() if name != "pool"}

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
    return sum(outputs.values())


class OnGroup(nn.Module):
    """Apply a layer for feature maps to features on a group, ``[n, channels, group, height, width]``, as to further channels.

    Args:
        layer: maps ``[n, channels * order, ...]`` to ``[n, channels' * order, ...]``.
        order: size of the group.
    """

    def __init__(self, layer: nn.Module, order: int) -> None:
        super().__init__()
        self.layer, self.order = layer, order

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.flatten(1, 2) if x.ndim == 5 else x)  # an image is not on the group yet
        return y.unflatten(1, (-1, self.order))


def closed_paths(
    model: nn.Module, precision: float = 1e3, *, shared: bool = False
) -> dict[str, float]:
    """Return prior precisions with which training starts with nearly strict symmetry: all paths but the first are closed.

    Small weights alone do not keep a free path closed, as an optimiser such as Adam moves small weights as fast as others before
    the evidence is first estimated. Give these to training, by evidence, of a network of
    :class:`ResidualPathway` s: ``marglik_training(net, loader, prior_prec_init=closed_paths(net))``.

    The first factor of a factored path, ``theta_2``, starts at four times its number of inputs instead, which for
    ``FactoredLinear2d`` is four times the precision of its initial weights, whatever its size. With ``precision`` for both
    factors, those of small layers would vanish, and with them the gradients of both: what is closed too early would stay so.

    Args:
        model: with pathways, their strictest path first.
        precision: of what is closed.
        shared: use ``precision`` for both factors; for a ``prior_structure`` in which these share theirs, such as ``"path"``.

    Returns:
        precisions by regular expression, one for each trainable tensor of the paths concerned but ``omega`` of sparse layers,
        whose size says nothing about how much of a path is used.
    """
    found: dict[str, float] = {}
    for place, pathway in model.named_modules():
        if not isinstance(pathway, ResidualPathway):
            continue
        for name in list(pathway.paths)[1:]:
            for part, module in pathway.paths[name].named_modules():
                prefix = ".".join(filter(None, (place, name, part)))
                first = (
                    isinstance(module, SlotLinear)
                    and part.split(".")[-1] == "theta_2"
                    and not shared
                )
                value = 4.0 * module.in_features if first else precision
                for tensor, parameter in module.named_parameters(recurse=False):
                    if parameter.requires_grad and tensor != "omega":
                        found[re.escape(f"{prefix}.{tensor}")] = value
    return found
