"""How far a module is from being equivariant: ``f(g x)`` against ``g f(x)``, for every element ``g`` of a group.

How ``g`` acts on outputs follows from their shape: not at all on ``[n, outputs]``, so that invariance is asked for; by moving
positions of ``[n, channels, height, width]``; and by moving the group as well in ``[n, channels, order, height, width]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from laplace_invariance.layers.group import GroupConv2d
from laplace_invariance.layers.symmetry import NAMED, Group
from laplace_invariance.modes import evaluation

__all__ = ["equivariance_error"]

SHIFTS = "shifts"


def equivariance_error(
    module: nn.Module,
    group: str | Group | Sequence[str | Group],
    x: Tensor | None = None,
    *,
    max_elements: int = 1024,
    batch_size: int = 256,
    generator: torch.Generator | None = None,
) -> float:
    """Return the largest ``|f(g x) - g f(x)| / |f(x)|`` over images and elements: zero, up to rounding, if equivariant.

    A module that subsamples is equivariant to shifts only up to a shift of its output: one position of the output is several
    of the input, and which of these it stands for may follow the image (see ``PolyphasePool2d``). Where the output is
    smaller than the input, the error under shifts is therefore the least over all circular shifts of the output, for each
    image on its own. Under other groups it is not: turns and flips map the grid of the output to itself.

    The module is evaluated without gradients in evaluation mode; the modes of its parts are restored.

    Args:
        module: maps ``x`` to ``[n, outputs]``, ``[n, channels, height, width]`` or ``[n, channels, order, height, width]``.
        group: ``"shifts"`` (circular), the name of a group (``"p4"``, ...), a :class:`Group`, or several of these, each of
            which is tested.
        x: images ``[n, channels, height, width]`` or features ``[n, channels, order, height, width]``; None draws two from
            a normal distribution, as the first layer of the module takes them, 32 x 32 if it takes any size.
        max_elements: of shifts, a random choice of so many if there are more; the default has all of 32 x 32.
        batch_size: images to evaluate at a time.
        generator: of random choices; None is torch's default generator.
    """
    x = _random_inputs(module, generator) if x is None else x
    if x.ndim not in (4, 5) or not x.numel():
        raise ValueError(
            f"equivariance_error needs images [n, channels, height, width] or features on a group [n, channels, order, height, "
            f"width], got shape {list(x.shape)}"
        )
    if min(max_elements, batch_size) < 1:
        raise ValueError(
            f"max_elements and batch_size must be positive, got {max_elements} and {batch_size}"
        )
    groups = [group] if isinstance(group, str | Group) else list(group)
    if not groups:
        raise ValueError("equivariance_error needs at least one group, got none")
    groups = [one if one == SHIFTS else _group(one) for one in groups]
    with torch.no_grad(), evaluation(module):
        y = module(x)
        if y.ndim not in (2, 4, 5) or len(y) != len(x):
            raise ValueError(
                f"the module must return [n, outputs], [n, channels, height, width] or [n, channels, order, height, width] "
                f"for n = {len(x)} inputs, got shape {list(y.shape)}"
            )
        errors = [
            error
            for one in groups
            for error in (
                _under_shifts(module, x, y, max_elements, batch_size, generator)
                if one == SHIFTS
                else _under_group(module, one, x, y, batch_size)
            )
        ]
    return float(torch.cat(errors).max())


def _random_inputs(module: nn.Module, generator: torch.Generator | None) -> Tensor:
    first = next((part for part in module.modules() if hasattr(part, "in_channels")), None)
    if first is None:
        raise ValueError(
            f"no layer in {type(module).__name__} says how many channels it takes; give inputs x"
        )
    group = [first.group.order] if isinstance(first, GroupConv2d) else []
    shape = (2, first.in_channels, *group, *getattr(first, "in_shape", (32, 32)))
    parameter = next(module.parameters(), torch.empty(0))
    device = parameter.device if generator is None else generator.device
    return torch.randn(shape, generator=generator, device=device, dtype=parameter.dtype).to(
        parameter.device
    )


def _group(group: str | Group) -> Group:
    if isinstance(group, str) and group not in NAMED:
        raise ValueError(
            f"there is no group {group!r}; choose from {SHIFTS}, {', '.join(NAMED)}, or give a Group"
        )
    return Group.of(group)


def _under_group(
    module: nn.Module, group: Group, x: Tensor, y: Tensor, batch_size: int
) -> Iterator[Tensor]:
    """Yield errors ``[n]`` of each element."""

    def transform(z: Tensor, element: int) -> Tensor:
        if z.ndim == 2:
            return z
        return group.transform(z, element) if z.ndim == 4 else group.transform_features(z, element)

    for element in range(group.order):
        outputs = torch.cat([module(part) for part in transform(x, element).split(batch_size)])
        yield _relative(outputs, transform(y, element))


def _under_shifts(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    max_elements: int,
    batch_size: int,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    """Yield errors ``[shifts * n]`` of some shifts at a time."""
    height, width = x.shape[-2:]
    elements = torch.arange(height * width)
    if len(elements) > max_elements:
        elements = torch.randperm(height * width, generator=generator)[:max_elements]
    for some in elements.split(max(batch_size // len(x), 1)):
        images = x.repeat(len(some), *[1] * (x.ndim - 1))
        targets = y.repeat(len(some), *[1] * (y.ndim - 1))
        shifts = (
            torch.stack([some // width, some % width]).repeat_interleave(len(x), 1).to(x.device)
        )
        outputs = torch.cat([module(part) for part in _shift(images, shifts).split(batch_size)])
        if y.ndim > 2:
            subsampled = y.shape[-2] < height or y.shape[-1] < width
            targets = _shift(targets, _best_shifts(outputs, targets) if subsampled else shifts)
        yield _relative(outputs, targets)


def _shift(x: Tensor, shifts: Tensor) -> Tensor:
    """Roll each of ``x`` ``[n, ..., height, width]`` by its own ``shifts`` ``[2, n]``, down and to the right."""
    for axis, shift in zip((-2, -1), shifts, strict=True):
        size = x.shape[axis]
        index = (torch.arange(size, device=x.device) - shift.unsqueeze(1)) % size
        shape = [len(x)] + [1] * (x.ndim - 1)
        shape[axis] = size
        x = x.take_along_dim(index.view(shape), axis)
    return x


def _best_shifts(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the shifts ``[2, n]`` of ``targets`` that come closest to ``outputs``: those of the largest correlation."""
    spectrum = (
        torch.fft.rfft2(outputs.flatten(1, -3)) * torch.fft.rfft2(targets.flatten(1, -3)).conj()
    )
    width = outputs.shape[-1]
    best = torch.fft.irfft2(spectrum.sum(1), outputs.shape[-2:]).flatten(1).argmax(1)
    return torch.stack([best // width, best % width])


def _relative(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the distance of each output from its target, relative to the target, ``[n]``."""
    norms = (
        targets.flatten(1).norm(dim=1).clamp_min(torch.finfo(targets.dtype).tiny)
    )  # 0 / 0 is no error
    return (outputs - targets).flatten(1).norm(dim=1) / norms
