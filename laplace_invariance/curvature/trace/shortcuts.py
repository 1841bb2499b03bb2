"""Cheaper double backward passes through activations, max pooling and convolutions.

The gradient to hyperparameters differentiates K backward passes through the same layers.
Autograd does so one by one: for each column it multiplies with the second derivative of an
activation, it carries a second derivative of ReLU and max pooling along that is zero, and it
computes a gradient of convolution weights that nobody asked for. Inside :func:`shortcuts`,

- the first derivative ``d`` of an activation is one tensor of the graph, shared by all columns,
  so that the second derivative is applied once, to the sum of what arrives at ``d``;
- the derivative of ReLU and of max pooling depends on nothing;
- a convolution is a linear map, whose adjoint is a linear map.

Results are the same. What a model calls as a function, not as a module, is left to autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["shortcuts"]

SMOOTH = (nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.Mish, nn.LogSigmoid, nn.Softsign)
PIECEWISE_LINEAR = (nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.Hardtanh)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
POOLING = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)


class _Elementwise(torch.autograd.Function):
    """``y`` as a function of ``x`` with derivative ``d``, which may itself depend on ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, d: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(d)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (d,) = ctx.saved_tensors
        return gradient * d, None, None


class _Detached(torch.autograd.Function):
    """``y`` as a function of ``x``, with the derivative of ``y`` at ``leaf``, a constant copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor, y: Tensor) -> Tensor:
        ctx.leaf = leaf
        ctx.y = y
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        graph = torch.is_grad_enabled()
        with torch.enable_grad():
            (result,) = torch.autograd.grad(
                ctx.y, ctx.leaf, gradient, retain_graph=True, create_graph=graph
            )
        return result, None, None


class _Convolution(torch.autograd.Function):
    """``y = conv(x)`` with weights that need no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, module: nn.modules.conv._ConvNd) -> Tensor:
        ctx.module = module
        ctx.like = x.detach()
        ctx.weight = module.weight.detach()
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _ConvolutionAdjoint.apply(gradient, ctx.like, ctx.weight, ctx.module), None, None


class _ConvolutionAdjoint(torch.autograd.Function):
    """The gradient of a convolution in its input, linear in the gradient of its output."""

    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, like: Tensor, weight: Tensor, module: nn.modules.conv._ConvNd
    ) -> Tensor:
        ctx.module = module
        ctx.weight = weight
        result, _, _ = torch.ops.aten.convolution_backward(
            gradient,
            like,
            weight,
            None,
            module.stride,
            module.padding,
            module.dilation,
            transposed=False,
            output_padding=[0] * len(module.kernel_size),
            groups=module.groups,
            output_mask=[True, False, False],
        )
        return result

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None, None]:
        m = ctx.module
        convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(m.kernel_size)]
        result = convolve(cotangent, ctx.weight, None, m.stride, m.padding, m.dilation, m.groups)
        return result, None, None, None


def _differentiated(args: tuple[Tensor, ...]) -> bool:
    return len(args) == 1 and args[0].requires_grad


def _convolution(
    module: nn.modules.conv._ConvNd, args: tuple[Tensor, ...], y: Tensor
) -> Tensor | None:
    plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    leaves = module.weight.is_leaf and (module.bias is None or module.bias.is_leaf)
    if not (plain and leaves) or not _differentiated(args):
        return None
    if args[0].ndim != len(module.kernel_size) + 2:
        return None
    return _Convolution.apply(args[0], y, module)


def _activation(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor | None:
    if not _differentiated(args) or getattr(module, "inplace", False):
        return None
    (x,) = args
    smooth = type(module) in SMOOTH
    (d,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=smooth, retain_graph=True)
    return _Elementwise.apply(x, d, y)


@contextmanager
def shortcuts(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make double backward passes through modules cheaper, and possible through attention.

    Parameter gradients are not available inside the context, but for modules left out.

    Args:
        modules: Modules to look for activations, max pooling and convolutions, by exact type.
    """
    handles = []
    pooled: dict[nn.Module, Tensor] = {}

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        if not _differentiated(args):
            return None
        pooled[module] = args[0]
        return (args[0].detach().requires_grad_(),)

    def after(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor | None:
        if module not in pooled:
            return None
        return _Detached.apply(pooled.pop(module), args[0], y)

    for module in modules:
        if type(module) in SMOOTH + PIECEWISE_LINEAR:
            handles.append(module.register_forward_hook(_activation, prepend=True))
        elif type(module) in CONVOLUTIONS:
            handles.append(module.register_forward_hook(_convolution, prepend=True))
        elif type(module) in POOLING and not module.return_indices:
            handles.append(module.register_forward_pre_hook(before))
            handles.append(module.register_forward_hook(after, prepend=True))
    try:
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            yield
    finally:
        for handle in handles:
            handle.remove()
