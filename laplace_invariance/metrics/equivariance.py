"""How far a module is from being equivariant: ``f(g x)`` against ``g f(x)``, for elements ``g``.

How ``g`` acts on outputs follows from their shape: not at all on ``[n, outputs]``, so that
invariance is asked for; by permuting positions of ``[n, channels, height, width]``; and by
permuting the group as well in ``[n, channels, order, height, width]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laplace_invariance.layers.group import GroupConv2d
from laplace_invariance.layers.residual import ResidualPathway
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
    """Return the largest ``|f(g x) - g f(x)| / |f(x)|`` over images and elements.

    It is zero, up to rounding, if the module is equivariant. A module that subsamples is
    equivariant to shifts only up to a shift of its output: one position of the output is
    several of the input, and which of these it stands for may follow the image (see
    ``PolyphasePool2d``). Where the output is smaller than the input, the error under shifts is
    therefore the least over all circular shifts of the output, for each image on its own. Under
    other groups it is not: rotations and flips map the grid of the output to itself.

    The module is evaluated without gradients in evaluation mode; the modes of its parts are
    restored.

    Args:
        module: Maps ``x`` to ``[n, outputs]``, ``[n, channels, height, width]`` or ``[n,
            channels, order, height, width]``.
        group: ``"shifts"`` (circular), the name of a group (``"p4"``, ...), a :class:`Group`, or
            several of these, each of which is tested.
        x: Images ``[n, channels, height, width]`` or features ``[n, channels, order, height,
            width]``; None draws two from a normal distribution, as the first layer of the module
            takes them, 32 x 32 if it takes any size.
        max_elements: Largest number of shifts, a random choice if there are more; the default
            has all of 32 x 32.
        batch_size: Number of images to evaluate at a time.
        generator: Source of random choices; None is torch's default generator.

    Raises:
        ValueError: If a group is unknown, or a shape is not one of these.
    """
    if x is None:
        x = _random_inputs(module, generator)
    if x.ndim not in (4, 5) or not x.numel():
        raise ValueError(
            "equivariance_error needs images [n, channels, height, width] or features on a group "
            f"[n, channels, order, height, width], got shape {list(x.shape)}"
        )
    if min(max_elements, batch_size) < 1:
        raise ValueError(
            f"max_elements and batch_size must be positive, got {max_elements} and {batch_size}"
        )
    groups = _groups(group)
    errors: list[Tensor] = []
    with torch.no_grad(), evaluation(module):
        y = module(x)
        _check_outputs(y, len(x))
        for one in groups:
            if isinstance(one, Group):
                errors += _under_group(module, one, x, y, batch_size)
            else:
                shifts = _shifts(x.shape[-2], x.shape[-1], max_elements, generator)
                errors += _under_shifts(module, shifts, x, y, batch_size)
    return float(torch.cat(errors).max())


def _random_inputs(module: nn.Module, generator: torch.Generator | None) -> Tensor:
    first = next((part for part in module.modules() if hasattr(part, "in_channels")), None)
    if first is None:
        raise ValueError(
            f"no layer in {type(module).__name__} says how many channels it takes; give inputs x"
        )
    group = [first.group.order] if isinstance(first, GroupConv2d) else []
    shape: list[Any] = [2, first.in_channels, *group, *_image_shape(module, first)]
    parameter = next(module.parameters(), torch.empty(0))
    device = parameter.device if generator is None else generator.device
    x = torch.randn(shape, generator=generator, device=device, dtype=parameter.dtype)
    return x.to(parameter.device)


def _image_shape(module: nn.Module, first: nn.Module) -> tuple[int, ...]:
    """Return the height and width that the first layer takes, or another path beside it."""
    beside: list[nn.Module] = [first]
    for part in module.modules():
        if isinstance(part, ResidualPathway) and first in part.modules():
            beside += part.paths.values()
    shapes = (getattr(layer, "in_shape", None) for layer in beside)
    return next((tuple(shape) for shape in shapes if shape is not None), (32, 32))


def _groups(group: str | Group | Sequence[str | Group]) -> list[str | Group]:
    """Return the groups to test, where ``"shifts"`` stands for itself."""
    if isinstance(group, str | Group):
        group = [group]
    found: list[str | Group] = []
    for one in group:
        if one == SHIFTS:
            found.append(one)
        elif isinstance(one, Group) or one in NAMED:
            found.append(Group.of(one))
        else:
            raise ValueError(
                f"there is no group {one!r}; choose from {SHIFTS}, {', '.join(NAMED)}, "
                "or give a Group"
            )
    if not found:
        raise ValueError("equivariance_error needs at least one group, got none")
    return found


def _check_outputs(y: Tensor, n: int) -> None:
    if y.ndim not in (2, 4, 5) or len(y) != n:
        raise ValueError(
            "the module must return [n, outputs], [n, channels, height, width] or "
            f"[n, channels, order, height, width] for n = {n} inputs, got shape {list(y.shape)}"
        )


def _under_group(
    module: nn.Module, group: Group, x: Tensor, y: Tensor, batch_size: int
) -> Iterator[Tensor]:
    """Yield errors ``[n]`` of each element."""

    def transform(z: Tensor, element: int) -> Tensor:
        if z.ndim == 2:
            return z
        if z.ndim == 4:
            return group.transform(z, element)
        return group.transform_features(z, element)

    for element in range(group.order):
        outputs = _in_batches(module, transform(x, element), batch_size)
        yield _relative(outputs, transform(y, element))


def _shifts(
    height: int, width: int, max_elements: int, generator: torch.Generator | None
) -> Tensor:
    """Return the shifts to test, down and to the right, ``[2, shifts]``."""
    elements = torch.arange(height * width)
    if len(elements) > max_elements:
        elements = torch.randperm(height * width, generator=generator)[:max_elements]
    return torch.stack([elements // width, elements % width])


def _under_shifts(
    module: nn.Module, shifts: Tensor, x: Tensor, y: Tensor, batch_size: int
) -> Iterator[Tensor]:
    """Yield errors ``[shifts * n]`` of some shifts at a time."""
    subsampled = y.ndim > 2 and (y.shape[-2] < x.shape[-2] or y.shape[-1] < x.shape[-1])
    for some in shifts.split(max(batch_size // len(x), 1), dim=1):
        n = some.shape[1]
        images = x.repeat(n, *[1] * (x.ndim - 1))
        targets = y.repeat(n, *[1] * (y.ndim - 1))
        by = some.repeat_interleave(len(x), 1).to(x.device)
        outputs = _in_batches(module, _shift(images, by), batch_size)
        if subsampled:
            by = _best_shifts(outputs, targets)
        if y.ndim > 2:
            targets = _shift(targets, by)
        yield _relative(outputs, targets)


def _in_batches(module: nn.Module, x: Tensor, batch_size: int) -> Tensor:
    return torch.cat([module(part) for part in x.split(batch_size)])


def _shift(x: Tensor, shifts: Tensor) -> Tensor:
    """Roll each of ``x`` ``[n, ..., height, width]`` by its own ``shifts`` ``[2, n]``."""
    for axis, shift in zip((-2, -1), shifts, strict=True):
        size = x.shape[axis]
        index = (torch.arange(size, device=x.device) - shift.unsqueeze(1)) % size
        shape = [len(x)] + [1] * (x.ndim - 1)
        shape[axis] = size
        x = x.take_along_dim(index.view(shape), axis)
    return x


def _best_shifts(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the shifts ``[2, n]`` of ``targets`` of the largest correlation with ``outputs``."""
    there = torch.fft.rfft2(targets.flatten(1, -3))
    spectrum = torch.fft.rfft2(outputs.flatten(1, -3)) * there.conj()
    width = outputs.shape[-1]
    best = torch.fft.irfft2(spectrum.sum(1), outputs.shape[-2:]).flatten(1).argmax(1)
    return torch.stack([best // width, best % width])


def _relative(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the distance of each output from its target, relative to the target, ``[n]``."""
    tiny = torch.finfo(targets.dtype).tiny  # 0 / 0 is no error
    norms = targets.flatten(1).norm(dim=1).clamp_min(tiny)
    return (outputs - targets).flatten(1).norm(dim=1) / norms
