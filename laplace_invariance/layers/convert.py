"""Replace the convolutions of an existing network by residual pathways."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from laplace_invariance.layers.paths import PATHS, PathSpec
from laplace_invariance.layers.residual import ResidualPathway
from laplace_invariance.modes import evaluation

__all__ = ["convert"]

Sizes = tuple[tuple[int, int], tuple[int, int]]  # height and width of input and output


def convert(
    model: nn.Module,
    in_shape: Sequence[int],
    kind: str = "f_fc+conv",
    *,
    scale: float = 0.01,
    min_positions: int = 2,
) -> nn.Module:
    """Return a copy of ``model`` in which ``nn.Conv2d`` s have freer paths beside them.

    A convolution ``c`` of several positions becomes ``ResidualPathway(conv=c, f_fc=...)`` and
    keeps its weights. The new paths start near zero, so that the network computes nearly what
    it did (with ``scale=0`` exactly that), and their prior precisions, learnt by evidence,
    decide whether they are used::

        net = convert(net, (3, 32, 32))
        result = marglik_training(net, loader, prior_structure="path")
        print(metrics.layer_report(result.la))

    Args:
        model: Any network with outputs ``[batch, outputs]``; it is left as it is. A convolution
            that is called with several sizes cannot be converted, and subclasses of
            ``nn.Conv2d`` are not, with a warning.
        in_shape: Channels, height and width of the inputs, from which those of every layer
            follow.
        kind: ``"conv"`` and the free paths to put beside it, joined by ``"+"``: ``"f_fc"``,
            ``"s_fc"`` or ``"fc"``.
        scale: Scale of the initial weights of new paths.
        min_positions: Number of input positions below which convolutions are left alone: with a
            single one, as in 1 x 1 layers at the end of a network, nothing is freer than a
            convolution.

    Raises:
        ValueError: If the kind is another one, or there is nothing to convert.
    """
    beside = _paths_beside(kind)
    if len(in_shape) != 3 or min(in_shape) < 1:
        raise ValueError(f"in_shape must be channels, height and width, got {tuple(in_shape)}")
    model = copy.deepcopy(model)
    _warn_of_subclasses(model)
    pathways: dict[nn.Module, ResidualPathway] = {}  # one for each convolution, wherever it is used
    for conv, (inputs, outputs) in _sizes(model, in_shape).items():
        if inputs[0] * inputs[1] < min_positions:
            continue
        spec = PathSpec(conv.in_channels, conv.out_channels, inputs, outputs, gain=scale)
        paths = {name: PATHS[name].build(spec) for name in beside}
        pathways[conv] = ResidualPathway(conv=conv, **paths).to(conv.weight).train(conv.training)
    if not pathways:
        raise ValueError(
            f"the model has no nn.Conv2d with {min_positions} positions or more, "
            "so there is nothing to convert"
        )
    if model in pathways:
        return pathways[model]
    _replace(model, pathways)
    return model


def _paths_beside(kind: str) -> list[str]:
    """Return the free paths of a kind, which must have ``"conv"`` as well."""
    names = kind.split("+")
    beside = [name for name in names if name != "conv"]
    free = [name for name, path in PATHS.items() if path.free]
    known = set(beside) <= set(free)
    if len(beside) != len(names) - 1 or not beside or not known or len(set(names)) < len(names):
        raise ValueError(
            f"convert keeps the convolutions: kind must be 'conv' and one or more of "
            f"{', '.join(free)}, joined by '+', got {kind!r}"
        )
    return beside


def _warn_of_subclasses(model: nn.Module) -> None:
    others = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and type(module) is not nn.Conv2d
    ]
    if others:
        warnings.warn(
            f"{', '.join(others)}: subclasses of nn.Conv2d, parametrised ones included, "
            "may compute anything, and are left as they are",
            stacklevel=3,
        )


def _sizes(model: nn.Module, in_shape: Sequence[int]) -> dict[nn.Conv2d, Sizes]:
    """Return height and width of input and output of every convolution, by running the model."""
    found: dict[nn.Conv2d, Sizes] = {}
    names = {module: name for name, module in model.named_modules()}

    def record(
        module: nn.Conv2d, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
    ) -> None:
        x = args[0] if args else kwargs["input"]
        if x.ndim != 4:
            raise ValueError(
                f"{names[module]} is called without a batch axis, with shape {list(x.shape)}"
            )
        sizes = (x.shape[2], x.shape[3]), (output.shape[2], output.shape[3])
        if found.setdefault(module, sizes) != sizes:
            raise ValueError(
                f"{names[module]} is called with several sizes, {found[module][0]} and {sizes[0]}; "
                "a fully connected path has one"
            )

    # Of the exact type: subclasses may compute anything.
    convolutions = [module for module in model.modules() if type(module) is nn.Conv2d]
    handles = [conv.register_forward_hook(record, with_kwargs=True) for conv in convolutions]
    try:
        with torch.no_grad(), evaluation(model):
            model(torch.zeros(1, *in_shape).to(next(model.parameters())))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _replace(model: nn.Module, pathways: dict[nn.Module, ResidualPathway]) -> None:
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child in pathways:
                setattr(module, name, pathways[child])
