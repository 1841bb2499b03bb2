"""Turn the convolutions of an existing network into residual pathways."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from laplace_invariance.layers.factored import FactoredLinear2d, Linear2d
from laplace_invariance.layers.residual import ResidualPathway
from laplace_invariance.layers.sparse import SparseLinear2d

__all__ = ["convert"]

FREER = {"f_fc": FactoredLinear2d, "s_fc": SparseLinear2d, "fc": Linear2d}


def convert(
    model: nn.Module,
    in_shape: Sequence[int],
    kind: str = "f_fc+conv",
    *,
    scale: float = 0.01,
    min_positions: int = 2,
) -> nn.Module:
    """Return a copy of ``model`` in which every ``nn.Conv2d`` of several positions has freer paths beside it, weights kept.

    A convolution ``c`` becomes ``ResidualPathway(conv=c, f_fc=...)``. The new paths start near zero, so that the network computes
    nearly what it did (with ``scale=0`` exactly that), and their prior precisions, learnt by evidence, decide whether they are
    used::

        net = convert(net, (3, 32, 32))
        result = marglik_training(net, loader, prior_structure="path")
        print(metrics.layer_report(result.la))

    Args:
        model: any network with outputs ``[batch, outputs]``; it is left as it is. A convolution that is called with
            several sizes cannot be converted, and subclasses of ``nn.Conv2d`` are not, with a warning.
        in_shape: channels, height and width of its inputs, from which those of every layer follow.
        kind: ``"conv"`` and what to put beside it, joined by ``"+"``: ``"f_fc"``, ``"s_fc"`` or ``"fc"``.
        scale: of the initial weights of new paths.
        min_positions: leave convolutions alone whose input has fewer positions than that: with a single one, as of 1 x 1 layers
            at the end of a network, nothing is freer than a convolution.
    """
    names = kind.split("+")
    beside = [name for name in names if name != "conv"]
    if (
        "conv" not in names
        or not beside
        or any(name not in FREER for name in beside)
        or len(set(names)) < len(names)
    ):
        raise ValueError(
            f"convert keeps the convolutions: kind must be 'conv' and one or more of {', '.join(FREER)}, joined by '+', got "
            f"{kind!r}"
        )
    if len(in_shape) != 3 or min(in_shape) < 1:
        raise ValueError(f"in_shape must be channels, height and width, got {tuple(in_shape)}")
    model = copy.deepcopy(model)
    sizes = {
        conv: size
        for conv, size in _sizes(model, in_shape).items()
        if size[0].numel() >= min_positions
    }
    if not sizes:
        raise ValueError(
            f"the model has no nn.Conv2d with {min_positions} positions or more, so there is nothing to convert"
        )
    pathways: dict[nn.Module, ResidualPathway] = {}  # one for each convolution, wherever it is used
    for conv, size in sizes.items():
        paths = {
            key: FREER[key](conv.in_channels, conv.out_channels, *size, scale=scale)
            for key in beside
        }
        pathways[conv] = ResidualPathway(conv=conv, **paths).to(conv.weight).train(conv.training)
    if model in pathways:
        return pathways[model]
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child in pathways:
                setattr(module, name, pathways[child])
    return model


def _sizes(
    model: nn.Module, in_shape: Sequence[int]
) -> dict[nn.Module, tuple[torch.Size, torch.Size]]:
    """Return height and width of input and output of every convolution."""
    found: dict[nn.Module, tuple[torch.Size, torch.Size]] = {}
    names = {module: name for name, module in model.named_modules()}

    def hook(
        module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
    ) -> None:
        x = args[0] if args else kwargs["input"]
        if x.ndim != 4:
            raise ValueError(
                f"{names[module]} is called without a batch axis, with shape {list(x.shape)}"
            )
        sizes = x.shape[2:], output.shape[2:]
        if found.setdefault(module, sizes) != sizes:
            raise ValueError(
                f"{names[module]} is called with several sizes, {tuple(found[module][0])} and {tuple(sizes[0])}; a fully "
                "connected path has one"
            )

    others = [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.Conv2d) and type(m) is not nn.Conv2d
    ]
    if others:
        warnings.warn(
            f"{', '.join(others)}: subclasses of nn.Conv2d, parametrised ones included, may compute anything, and are left as "
            "they are",
            stacklevel=3,
        )
    handles = [
        m.register_forward_hook(hook, with_kwargs=True)
        for m in model.modules()
        if type(m) is nn.Conv2d
    ]
    modes = [(module, module.training) for module in model.modules()]
    parameter = next(model.parameters())
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, *in_shape).to(parameter))
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
    return found
