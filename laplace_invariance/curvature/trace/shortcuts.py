"""Cheaper double backward passes through activations, max pooling and convolutions.

The gradient to hyperparameters differentiates K backward passes through the same layers.
Autograd does so one by one: for each column it multiplies with the second derivative of an
activation, it carries a second derivative of ReLU and max pooling along that is zero, and it
computes a gradient of convolution weights that nobody asked for. Inside :func:`shortcuts`,

- the first derivative ``d`` of an activation is one tensor of the graph, shared by all columns,
  so that the second derivative is applied once, to the sum of what arrives at ``d``;
- the derivative of ReLU and of max pooling depends on nothing;
- that of an activation is applied after max pooling, where this follows, to the maxima only;
- a convolution is a linear map, whose adjoint is a linear map.

Results are the same. What a model calls as a function, not as a module, is left to autograd, and so
is what it computes inside of ``torch.utils.checkpoint``.
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
PIECEWISE_LINEAR = (nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.Hardtanh, nn.Hardsigmoid)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
POOLING = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)

# The hooks that replace saved tensors at present, or None
_saved_tensors_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


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


class _PooledActivation(torch.autograd.Function):
    """Maxima ``y`` of an activation of ``x``, whose derivative there is ``d``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, d: Tensor, y: Tensor, indices: Tensor, module: nn.MaxPool2d
    ) -> Tensor:
        ctx.save_for_backward(d)
        ctx.like = x.detach()
        ctx.indices = indices
        ctx.module = module
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (d,) = ctx.saved_tensors
        x = _Unpool.apply(gradient * d, ctx.like, ctx.indices, ctx.module)
        return x, None, None, None, None


class _Unpool(torch.autograd.Function):
    """The gradient of max pooling with known maxima, linear in the gradient of its output."""

    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, like: Tensor, indices: Tensor, module: nn.MaxPool2d
    ) -> Tensor:
        ctx.indices = indices
        m = module
        sizes = (_pair(m.kernel_size), _pair(m.stride), _pair(m.padding), _pair(m.dilation))
        return torch.ops.aten.max_pool2d_with_indices_backward(
            gradient, like, *sizes, m.ceil_mode, indices
        )

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None, None]:
        return _at(cotangent, ctx.indices), None, None, None


def _pair(size: int | tuple[int, ...]) -> list[int]:
    return [size, size] if isinstance(size, int) else list(size)


def _at(x: Tensor, indices: Tensor) -> Tensor:
    """Return the entries of images ``[rows, channels, ...]`` at indices into each of them."""
    return x.flatten(2).gather(2, indices.flatten(2)).view_as(indices)


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
        if _is_grey(module):
            return _correlate(gradient, weight, module)
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


def _is_grey(module: nn.modules.conv._ConvNd) -> bool:
    """Return whether a module is a plain convolution of grey images.

    oneDNN has no fast gradient of these in their inputs.
    """
    plain = type(module) is nn.Conv2d and module.in_channels == module.groups == 1
    ones = {*module.stride, *module.dilation} == {1}
    return plain and ones and min(_remaining(module)) >= 0


def _remaining(module: nn.modules.conv._ConvNd) -> list[int]:
    """Return how far the kernel reaches beyond the padding, in each axis."""
    assert not isinstance(module.padding, str)
    return [k - 1 - p for k, p in zip(module.kernel_size, module.padding, strict=True)]


def _correlate(gradient: Tensor, weight: Tensor, module: nn.modules.conv._ConvNd) -> Tensor:
    """Return the gradient of a plain convolution in its input, as a convolution."""
    reverse = weight.flip(2, 3).transpose(0, 1)
    return F.conv2d(gradient, reverse, padding=_remaining(module))


def _differentiated(args: tuple[Tensor, ...]) -> bool:
    """Return whether a module is differentiated, outside of ``torch.utils.checkpoint``.

    That replaces saved tensors one by one, in the order of the operations, and does not know what
    shortcuts keep beside them. Before torch 2.8 nobody can tell, and no shortcut is taken.
    """
    if _saved_tensors_hooks is None or _saved_tensors_hooks(True) is not None:
        return False
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


class _Activations:
    """Hooks of activations, and of max pooling, which asks for the activation before it."""

    def __init__(self) -> None:
        self._latest: tuple[Tensor, Tensor, Tensor] | None = None
        self._pooled: dict[nn.Module, Tensor] = {}

    def after_activation(
        self, module: nn.Module, args: tuple[Tensor, ...], y: Tensor
    ) -> Tensor | None:
        """Share the derivative among columns."""
        if not _differentiated(args) or getattr(module, "inplace", False):
            return None
        (x,) = args
        smooth = type(module) in SMOOTH
        (d,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=smooth, retain_graph=True)
        output = _Elementwise.apply(x, d, y)
        self._latest = (output, x, d)
        return output

    def before_pooling(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        """Cut the graph off, so that maxima are found at constants."""
        if not _differentiated(args):
            return None
        self._pooled[module] = args[0]
        return (args[0].detach().requires_grad_(),)

    def after_pooling(
        self, module: nn.Module, args: tuple[Tensor, ...], y: Tensor
    ) -> Tensor | None:
        """Connect the graph again, to what the activation received if there was one."""
        if module not in self._pooled:
            return None
        before = self._pooled.pop(module)
        indices = getattr(y.grad_fn, "_saved_result1", None)
        usual = type(module) is nn.MaxPool2d and before.ndim == 4
        activated = self._latest is not None and self._latest[0] is before
        if not usual or indices is None or not activated:
            return _Detached.apply(before, args[0], y)
        assert self._latest is not None
        _, x, d = self._latest
        return _PooledActivation.apply(x, _at(d, indices), y, indices, module)


@contextmanager
def shortcuts(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make double backward passes through modules cheaper, and possible through attention.

    Parameter gradients are not available inside the context, but for modules left out.

    Args:
        modules: Modules to look for activations, max pooling and convolutions, by exact type.
    """
    handles = []
    activations = _Activations()
    for module in modules:
        if type(module) in SMOOTH + PIECEWISE_LINEAR:
            handles.append(module.register_forward_hook(activations.after_activation, prepend=True))
        elif type(module) in CONVOLUTIONS:
            handles.append(module.register_forward_hook(_convolution, prepend=True))
        elif type(module) in POOLING and not module.return_indices:
            handles.append(module.register_forward_pre_hook(activations.before_pooling))
            handles.append(module.register_forward_hook(activations.after_pooling, prepend=True))
    try:
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            yield
    finally:
        for handle in handles:
            handle.remove()
