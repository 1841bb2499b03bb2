"""Data whose invariance is known."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

__all__ = ["rotated_shapes"]


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
    shapes = torch.randn(n_shapes, n_points, 2, generator=torch.Generator().manual_seed(shapes_seed))
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
