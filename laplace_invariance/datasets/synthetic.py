"""Points, signals and vectors whose invariance is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

__all__ = [
    "PAIR_TASKS",
    "HiddenShifts",
    "fourier_code",
    "rotate",
    "rotated_shapes",
    "rotation_regression",
    "waves",
]

PAIR_TASKS = ("dft", "shift", "two-part", "permutation", "scaled-shift")


def rotated_shapes(
    n: int,
    max_angle: float = 2 * math.pi / 3,
    *,
    n_shapes: int = 10,
    n_points: int = 6,
    noise: float = 0.3,
    shapes_seed: int = 0,
    angles: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> TensorDataset:
    """Return noisy shapes of 2-D points, each turned by some angle, labelled by their shape and by how far.

    A shape that is turned by at most ``max_angle`` to either side has the label of its shape, from 1 on; one that is turned
    further has the label 0. So labels are invariant to rotation, up to ``max_angle`` and no more.

    Args:
        n: number of examples.
        max_angle: in radians.
        n_shapes: number of shapes, hence classes - 1.
        n_points: points per shape.
        noise: standard deviation of each coordinate; the shapes themselves are of unit standard deviation.
        shapes_seed: seed of the shapes.
        angles: ``[n]``, radians; None draws them uniformly from all.
        generator: source of everything else; None is torch's default generator.

    Returns:
        Points ``[n, n_points, 2]`` and labels ``[n]``.
    """
    if not 0 < max_angle <= math.pi:
        raise ValueError(f"max_angle must be between 0 and pi, got {max_angle}")
    shapes = torch.randn(
        n_shapes, n_points, 2, generator=torch.Generator().manual_seed(shapes_seed)
    )
    kind = torch.randint(n_shapes, (n,), generator=generator)
    points = shapes[kind] + noise * torch.randn(n, n_points, 2, generator=generator)
    if angles is None:
        angles = (2 * torch.rand(n, generator=generator) - 1) * math.pi
    labels = torch.where(angles.abs() <= max_angle, kind + 1, 0)
    return TensorDataset(rotate(points, angles), labels)


def rotate(points: Tensor, angles: Tensor) -> Tensor:
    """Turn each of ``points`` ``[n, n_points, 2]`` counter-clockwise by its angle, ``[n]``."""
    cos, sin = angles.cos(), angles.sin()
    matrices = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    return points @ matrices.mT


def rotation_regression(
    n: int, noise: float = 0.1, generator: torch.Generator | None = None
) -> TensorDataset:
    """Return points of the plane and noisy targets that only their radius decides, ``cos(2 r)``.

    Args:
        n: number of examples.
        noise: standard deviation of the targets about their mean.
        generator: source of points and noise; None is torch's default generator.

    Returns:
        Standard normal points ``[n, 2]`` and targets ``[n, 1]``.
    """
    points = torch.randn(n, 2, generator=generator)
    targets = (2 * points.norm(dim=-1, keepdim=True)).cos()
    return TensorDataset(points, targets + noise * torch.randn(n, 1, generator=generator))


def waves(
    n: int,
    max_shift: float = 0.5,
    *,
    n_classes: int = 5,
    length: int = 64,
    noise: float = 0.3,
    padding: str = "circular",
    shapes_seed: int = 0,
    shifts: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> TensorDataset:
    """Return noisy signals, each a smooth wave that is shifted by some part of its length, labelled by its shape.

    Shifts are in units of half the length. With ``"circular"`` padding, what leaves at one end comes in at the other, and
    shifts are of any size: a wave shifted by at most ``max_shift`` to either side has the label of its shape, from 1 on; one
    that is shifted further has the label 0, since otherwise all shifts would be invariances. With ``"zeros"``, waves fade to
    zero at both ends, shifts stay within ``max_shift``, and shapes are labelled from 0 on.

    Args:
        n: number of examples.
        max_shift: the range of the invariance, up to 1.
        n_classes: number of labels.
        length: number of time steps.
        noise: standard deviation at each time step; the waves, before they fade, are of unit standard deviation.
        padding: ``"circular"`` or ``"zeros"``.
        shapes_seed: seed of the waves' shapes.
        shifts: ``[n]``, positive to the right; None draws them uniformly.
        generator: source of everything else; None is torch's default generator.

    Returns:
        Signals ``[n, 1, length]`` and labels ``[n]``.
    """
    if padding not in ("circular", "zeros"):
        raise ValueError(f"unknown padding {padding!r}; choose circular or zeros")
    if not 0 < max_shift <= 1:
        raise ValueError(f"max_shift must be between 0 and 1 half-length, got {max_shift}")
    if n_classes < 2:
        raise ValueError(f"n_classes must be at least 2, got {n_classes}")
    circular = padding == "circular"
    kind = torch.randint(n_classes - circular, (n,), generator=generator)
    if shifts is None:
        shifts = (2 * torch.rand(n, generator=generator) - 1) * (1.0 if circular else max_shift)
    times = (2 * torch.arange(length) + 1) / length - 1 - shifts.unsqueeze(-1)
    signals = _wave_shapes(n_classes - circular, shapes_seed)(kind, times)
    if circular:
        labels = torch.where(shifts.abs() <= max_shift, kind + 1, 0)
    else:
        signals = signals * torch.where(times.abs() < 1, (math.pi / 2 * times).cos(), 0.0)
        labels = kind
    signals = signals + noise * torch.randn(n, length, generator=generator)
    return TensorDataset(signals.unsqueeze(1), labels)


def _wave_shapes(n: int, seed: int, n_harmonics: int = 4) -> Callable[[Tensor, Tensor], Tensor]:
    """Return ``f(kind [m], times [m, length])``: ``n`` random waves of period 2, zero mean and unit standard deviation."""
    source = torch.Generator().manual_seed(seed)
    sines, cosines = torch.randn(2, n, n_harmonics, generator=source)
    size = ((sines**2 + cosines**2).sum(-1, keepdim=True) / 2).sqrt()

    def wave(kind: Tensor, times: Tensor) -> Tensor:
        phases = math.pi * times.unsqueeze(-1) * torch.arange(1, n_harmonics + 1)
        parts = phases.sin() * (sines / size)[kind].unsqueeze(1) + phases.cos() * (cosines / size)[
            kind
        ].unsqueeze(1)
        return parts.sum(-1)

    return wave


class HiddenShifts:
    """Circular shifts of vectors, of each part by an amount of its own, in a hidden order of the entries, and rescaled.

    Args:
        n_features: size of the vectors.
        n_parts: parts of equal size, one after the other.
        order: a permutation ``[n_features]``: shifts move an entry along this cycle; None is the order of the entries.
        max_factor: vectors are also multiplied, by a factor between 1 / max_factor and max_factor.
    """

    def __init__(
        self,
        n_features: int,
        n_parts: int = 1,
        order: Tensor | None = None,
        max_factor: float = 1.0,
    ) -> None:
        if n_parts < 1 or n_features < 2 * n_parts or n_features % n_parts:
            raise ValueError(
                f"parts must be of equal size, of two entries at least: {n_features} features, {n_parts} parts"
            )
        if not 1 <= max_factor < math.inf:
            raise ValueError(f"max_factor must be finite and at least 1, got {max_factor}")
        order = torch.arange(n_features) if order is None else order
        if order.shape != (n_features,) or not torch.equal(
            order.sort().values.cpu(), torch.arange(n_features)
        ):
            raise ValueError(
                f"order must be a permutation of {n_features} entries, got {order.tolist()}"
            )
        self.n_features, self.n_parts, self.max_factor = n_features, n_parts, max_factor
        self.order, self.inverse = order, order.argsort()
        self.length = n_features // n_parts

    @classmethod
    def of(
        cls, task: str, n_features: int, generator: torch.Generator | None = None
    ) -> HiddenShifts:
        """Return the symmetry of one of ``PAIR_TASKS``; the generator draws the hidden cycle of the task "permutation"."""
        if task not in PAIR_TASKS:
            raise ValueError(f"unknown task {task!r}; choose from {', '.join(PAIR_TASKS)}")
        if task == "permutation":
            return cls(n_features, order=torch.randperm(n_features, generator=generator))
        return cls(
            n_features,
            n_parts=2 if task == "two-part" else 1,
            max_factor=2 if task == "scaled-shift" else 1,
        )

    def parts(self, x: Tensor) -> Tensor:
        """Return the parts of vectors ``[n, n_features]`` in order, as ``[n, n_parts, length]``."""
        if x.ndim != 2 or x.shape[1] != self.n_features or not x.is_floating_point():
            raise ValueError(
                f"vectors must be floating point [n, {self.n_features}], got shape {list(x.shape)} of {x.dtype}"
            )
        return x[:, self.order.to(x.device)].unflatten(1, (self.n_parts, -1))

    def shifted(self, x: Tensor, shifts: Tensor) -> Tensor:
        """Shift the parts of ``x`` ``[n, n_features]`` towards their end by integers ``[n, n_parts]``."""
        places = torch.arange(self.length, device=x.device) - shifts.to(x.device).unsqueeze(-1)
        return (
            self.parts(x).gather(2, places % self.length).flatten(1)[:, self.inverse.to(x.device)]
        )

    def invariants(self, x: Tensor) -> Tensor:
        """Return the moduli of each part's Fourier transform, ``[n, n_features]``; of mean square 1 if vectors are rescaled."""
        moduli = torch.fft.fft(self.parts(x)).abs().flatten(1)
        return self.n_features**0.5 * F.normalize(moduli, dim=1) if self.max_factor > 1 else moduli

    def orbit(self, x: Tensor) -> Tensor:
        """Return one vector ``[n_features]`` under all shifts, at the same time from the smallest factor to the largest."""
        shifts = torch.cartesian_prod(*[torch.arange(self.length)] * self.n_parts).view(
            -1, self.n_parts
        )
        exponents = torch.linspace(-1, 1, len(shifts), device=x.device, dtype=x.dtype)
        return self.shifted(x.expand(len(shifts), -1), shifts) * (
            self.max_factor**exponents
        ).unsqueeze(1)

    def pairs(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw pairs of vectors ``[n, n_features]``, and distances ``[n]`` of their :meth:`invariants`.

        Entries are uniform in [-1, 1]. Each part of the second vector is, with probability one half, the first one's, or else
        another; then all are shifted and rescaled at random.
        """
        draws: dict[str, Any] = {
            "generator": generator,
            "device": generator.device if generator else None,
        }
        x, fresh = (2 * torch.rand(n, self.n_features, **draws) - 1 for _ in range(2))
        same = (torch.rand(n, self.n_parts, **draws) < 0.5).repeat_interleave(self.length, 1)
        other = self.moved(torch.where(same[:, self.inverse.to(x.device)], x, fresh), generator)
        return x, other, (self.invariants(x) - self.invariants(other)).norm(dim=1)

    def moved(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Shift and rescale each vector by draws of its own."""
        draws: dict[str, Any] = {
            "generator": generator,
            "device": generator.device if generator else None,
        }
        shifts = torch.randint(self.length, (len(x), self.n_parts), **draws)
        exponents = 2 * torch.rand(len(x), 1, **draws) - 1
        return self.shifted(x, shifts) * (self.max_factor**exponents).to(x)


def fourier_code(x: Tensor) -> Tensor:
    """Return moduli, sines and cosines of the phases of the Fourier transform of ``[n, d]``, as ``[n, 3 d]``."""
    spectrum = torch.fft.fft(x)
    phase = spectrum.angle()
    return torch.cat([spectrum.abs(), phase.sin(), phase.cos()], dim=1)
