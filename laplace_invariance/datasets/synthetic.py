"""Points, signals and vectors whose invariance is known."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.utils.data import TensorDataset

__all__ = [
    "FOURIER_CODES",
    "PAIR_TASKS",
    "HiddenShifts",
    "fourier_code",
    "labelled_points",
    "rotate",
    "rotated_shapes",
    "rotation_regression",
    "waves",
]

PAIR_TASKS = ("dft", "shift", "two-part", "permutation", "scaled-shift")
# parts of the codes, d numbers each
FOURIER_CODES: dict[str, tuple[str, ...]] = {
    "sines": ("modulus", "sine", "cosine"),
    "phase": ("modulus", "phase"),
}
N_HARMONICS = 4  # of the waves


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
    """Return noisy shapes of 2-D points, each rotated, labelled by their shape and by how far.

    A shape that is rotated by at most ``max_angle`` to either side has the label of its shape, from
    1 on; one that is rotated further has the label 0. So labels are invariant to rotation up to
    ``max_angle`` and no more.

    Args:
        n: Number of examples.
        max_angle: Range of the invariance, in radians.
        n_shapes: Number of shapes, hence of classes - 1.
        n_points: Number of points per shape.
        noise: Standard deviation of each coordinate; that of the shapes themselves is 1.
        shapes_seed: Seed of the shapes.
        angles: Angles ``[n]`` in radians; None draws them uniformly from all.
        generator: Source of everything else; None is torch's default generator.

    Returns:
        Points ``[n, n_points, 2]`` and labels ``[n]``.
    """
    if not 0 < max_angle <= math.pi:
        raise ValueError(f"max_angle must be between 0 and pi, got {max_angle}")
    source = torch.Generator().manual_seed(shapes_seed)
    shapes = torch.randn(n_shapes, n_points, 2, generator=source)
    kind = torch.randint(n_shapes, (n,), generator=generator)
    points = shapes[kind] + noise * torch.randn(n, n_points, 2, generator=generator)
    if angles is None:
        angles = (2 * torch.rand(n, generator=generator) - 1) * math.pi
    labels = torch.where(angles.abs() <= max_angle, kind + 1, 0)
    return TensorDataset(rotate(points, angles), labels)


def labelled_points(
    n: int, labels: str = "radius", generator: torch.Generator | None = None
) -> TensorDataset:
    """Return points of a disc of radius 2 in two classes.

    Classes are a disc and a ring about it, which rotations keep, or the upper and the lower half of
    the plane, which they exchange.

    Args:
        n: Number of examples.
        labels: What decides on the class, ``"radius"`` or ``"angle"``.
        generator: Source of the points; None is torch's default generator.

    Returns:
        Points ``[n, 2]``, uniform in radius and angle, and labels ``[n]``.
    """
    if labels not in ("radius", "angle"):
        raise ValueError(f"unknown labels {labels!r}; choose from radius, angle")
    radius, turn = torch.rand(2, n, generator=generator)
    angle = 2 * math.pi * turn
    points = 2 * radius.unsqueeze(-1) * torch.stack([angle.cos(), angle.sin()], dim=-1)
    decisive = radius if labels == "radius" else turn
    return TensorDataset(points, (2 * decisive).long())


def rotate(points: Tensor, angles: Tensor) -> Tensor:
    """Rotate each of ``points`` ``[n, n_points, 2]`` counter-clockwise by its angle, ``[n]``."""
    cos, sin = angles.cos(), angles.sin()
    return points @ rearrange([cos, -sin, sin, cos], "(i j) n -> n j i", i=2)


def rotation_regression(
    n: int, noise: float = 0.1, generator: torch.Generator | None = None
) -> TensorDataset:
    """Return points of the plane and noisy targets that only their radius decides, ``cos(2 r)``.

    Args:
        n: Number of examples.
        noise: Standard deviation of the targets about their mean.
        generator: Source of points and noise; None is torch's default generator.

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
    """Return noisy signals, each a smooth wave, shifted, and labelled by its shape.

    Shifts are in units of half the length. With ``"circular"`` padding, what leaves at one end
    comes in at the other, and shifts are of any size: a wave shifted by at most ``max_shift`` to
    either side has the label of its shape, from 1 on; one that is shifted further has the label 0,
    since otherwise all shifts would be invariances. With ``"zeros"``, waves fade to zero at both
    ends, shifts stay within ``max_shift``, and shapes are labelled from 0 on.

    Args:
        n: Number of examples.
        max_shift: Range of the invariance, up to 1.
        n_classes: Number of labels.
        length: Number of time steps.
        noise: Standard deviation at each time step; that of the waves, before they fade, is 1.
        padding: ``"circular"`` or ``"zeros"``.
        shapes_seed: Seed of the waves' shapes.
        shifts: Shifts ``[n]``, positive to the right; None draws them uniformly.
        generator: Source of everything else; None is torch's default generator.

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
    n_shapes = n_classes - circular
    kind = torch.randint(n_shapes, (n,), generator=generator)
    if shifts is None:
        largest = 1.0 if circular else max_shift
        shifts = (2 * torch.rand(n, generator=generator) - 1) * largest
    times = (2 * torch.arange(length) + 1) / length - 1 - shifts.unsqueeze(-1)
    signals = _wave(kind, times, n_shapes, shapes_seed)
    if circular:
        labels = torch.where(shifts.abs() <= max_shift, kind + 1, 0)
    else:
        labels = kind
        signals = signals * torch.where(times.abs() < 1, (math.pi / 2 * times).cos(), 0.0)
    signals = signals + noise * torch.randn(n, length, generator=generator)
    return TensorDataset(signals.unsqueeze(1), labels)


def _wave(kind: Tensor, times: Tensor, n_shapes: int, seed: int) -> Tensor:
    """Return random waves ``kind`` ``[m]`` at ``times`` ``[m, length]``.

    The waves have period 2, zero mean and unit standard deviation.
    """
    source = torch.Generator().manual_seed(seed)
    sines, cosines = torch.randn(2, n_shapes, N_HARMONICS, generator=source)
    size = ((sines**2 + cosines**2).sum(-1, keepdim=True) / 2).sqrt()
    phases = math.pi * times.unsqueeze(-1) * torch.arange(1, N_HARMONICS + 1)
    odd = phases.sin() * (sines / size)[kind].unsqueeze(1)
    even = phases.cos() * (cosines / size)[kind].unsqueeze(1)
    return (odd + even).sum(-1)


class HiddenShifts:
    """A symmetry of vectors: circular shifts of their parts in a hidden order, and rescaling.

    Args:
        n_features: Size of the vectors.
        n_parts: Number of parts of equal size, each shifted by an amount of its own.
        order: Permutation ``[n_features]``: shifts take an entry along this cycle; None is the
            order of the entries.
        max_factor: Vectors are also multiplied by a factor between 1 / max_factor and max_factor.
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
                "parts must be of equal size, of two entries at least: "
                f"{n_features} features, {n_parts} parts"
            )
        if not 1 <= max_factor < math.inf:
            raise ValueError(f"max_factor must be finite and at least 1, got {max_factor}")
        if order is None:
            order = torch.arange(n_features)
        if order.sort().values.tolist() != list(range(n_features)):
            raise ValueError(
                f"order must be a permutation of {n_features} entries, got {order.tolist()}"
            )
        self.n_features = n_features
        self.n_parts = n_parts
        self.length = n_features // n_parts
        self.max_factor = max_factor
        self.order = order
        self.inverse = order.argsort()

    @classmethod
    def for_task(
        cls, task: str, n_features: int, generator: torch.Generator | None = None
    ) -> HiddenShifts:
        """Return the symmetry of one of ``PAIR_TASKS``.

        Args:
            task: "two-part" has two parts, "permutation" a hidden order, "scaled-shift" rescales by
                a factor of up to 2; "shift" and "dft" have none of these.
            n_features: Size of the vectors.
            generator: Source of the hidden order; None is torch's default generator.
        """
        if task not in PAIR_TASKS:
            raise ValueError(f"unknown task {task!r}; choose from {', '.join(PAIR_TASKS)}")
        if task == "permutation":
            return cls(n_features, order=torch.randperm(n_features, generator=generator))
        n_parts = 2 if task == "two-part" else 1
        max_factor = 2.0 if task == "scaled-shift" else 1.0
        return cls(n_features, n_parts, max_factor=max_factor)

    def parts(self, x: Tensor) -> Tensor:
        """Return the parts of vectors ``[n, n_features]`` in order, ``[n, n_parts, length]``."""
        if x.ndim != 2 or x.shape[1] != self.n_features or not x.is_floating_point():
            raise ValueError(
                f"vectors must be floating point [n, {self.n_features}], "
                f"got shape {list(x.shape)} of {x.dtype}"
            )
        return x[:, self.order.to(x.device)].unflatten(1, (self.n_parts, -1))

    def shifted(self, x: Tensor, shifts: Tensor) -> Tensor:
        """Shift the parts of ``x`` ``[n, n_features]`` by integers ``[n, n_parts]``."""
        places = torch.arange(self.length, device=x.device) - shifts.to(x.device).unsqueeze(-1)
        parts = self.parts(x).gather(2, places % self.length)
        return parts.flatten(1)[:, self.inverse.to(x.device)]

    def transformed(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Shift and rescale each vector of ``x`` ``[n, n_features]`` by draws of its own."""
        device = generator.device if generator else None
        shape = (len(x), self.n_parts)
        shifts = torch.randint(self.length, shape, generator=generator, device=device)
        exponents = 2 * torch.rand(len(x), 1, generator=generator, device=device) - 1
        return self.shifted(x, shifts) * (self.max_factor**exponents).to(x)

    def invariants(self, x: Tensor) -> Tensor:
        """Return the moduli of each part's Fourier transform, ``[n, n_features]``.

        If the symmetry rescales vectors, they are scaled to mean square 1.
        """
        moduli = torch.fft.fft(self.parts(x)).abs().flatten(1)
        if self.max_factor == 1:
            return moduli
        return self.n_features**0.5 * F.normalize(moduli, dim=1)

    def orbit(self, x: Tensor) -> Tensor:
        """Return one vector ``[n_features]`` under all shifts, ``[length^n_parts, n_features]``.

        At the same time it is rescaled, from the smallest factor to the largest.
        """
        each_part = [torch.arange(self.length)] * self.n_parts
        shifts = torch.cartesian_prod(*each_part).view(-1, self.n_parts)
        exponents = torch.linspace(-1, 1, len(shifts), device=x.device, dtype=x.dtype)
        factors = (self.max_factor**exponents).unsqueeze(1)
        return self.shifted(x.expand(len(shifts), -1), shifts) * factors

    def pairs(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw pairs of vectors, and the distances of their :meth:`invariants`.

        Entries are uniform in [-1, 1]. Each part of the second vector is, with probability one
        half, that of the first, or else another; then all are shifted and rescaled at random.

        Args:
            n: Number of pairs.
            generator: Source of the draws; None is torch's default generator.

        Returns:
            Vectors ``[n, n_features]``, others ``[n, n_features]``, and distances ``[n]``.
        """
        device = generator.device if generator else None
        x = 2 * torch.rand(n, self.n_features, generator=generator, device=device) - 1
        fresh = 2 * torch.rand(n, self.n_features, generator=generator, device=device) - 1
        kept = torch.rand(n, self.n_parts, generator=generator, device=device) < 0.5
        same = kept.repeat_interleave(self.length, 1)[:, self.inverse.to(x.device)]
        other = self.transformed(torch.where(same, x, fresh), generator)
        return x, other, (self.invariants(x) - self.invariants(other)).norm(dim=1)


def fourier_code(x: Tensor, kind: str = "sines") -> Tensor:
    """Return moduli and phases of the Fourier transform of vectors.

    Circular shifts leave moduli as they are. Phases jump by a whole turn; their sines and cosines
    do not.

    Args:
        x: Vectors ``[n, d]``.
        kind: One of ``FOURIER_CODES``.

    Returns:
        Moduli, sines and cosines ``[n, 3 d]``, or moduli and phases ``[n, 2 d]``.
    """
    if kind not in FOURIER_CODES:
        raise ValueError(f"unknown code {kind!r}; choose from {', '.join(FOURIER_CODES)}")
    spectrum = torch.fft.fft(x)
    phase = spectrum.angle()
    parts = [phase] if kind == "phase" else [phase.sin(), phase.cos()]
    return torch.cat([spectrum.abs(), *parts], dim=1)
