"""Matrix Lie groups, and their affine transformations of images and of coordinates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from laplace_invariance.augmentations.base import Shape
from laplace_invariance.augmentations.box import (
    BoxAugmentation,
    BoxOptions,
    Init,
    Names,
    as_factor,
    in_degrees,
)
from laplace_invariance.precision import single, without_autocast

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AffineImage", "AffinePoints", "LieGroup", "warn_of_bright_borders", "warp_images"]

BRIGHT = 0.9  # median of the borders of images from which on they are a bright background

# By number of dimensions: name -> the plane that is rotated, from its first axis to its second
ROTATIONS = {
    2: {"rotation": (0, 1)},
    3: {"x_rotation": (1, 2), "y_rotation": (2, 0), "z_rotation": (0, 1)},
}
SHEARS = {
    2: {"shear": (0, 1)},
    3: {"xy_shear": (0, 1), "xz_shear": (0, 2), "yz_shear": (1, 2)},
}


TAYLOR = [1 / math.factorial(k) for k in range(13)]
MOST_SQUARINGS = 8  # where the norm is not looked at; enough for norms up to 128


def matrix_exponential(matrices: Tensor) -> Tensor:
    """Return the exponentials of small matrices ``[..., d, d]``.

    By scaling and squaring of a Taylor polynomial of degree 12, whose remainder is below the
    round-off of double precision. Differentiating it takes half the time that
    ``torch.linalg.matrix_exp`` does, which decomposes matrices of twice the size for that.
    """
    norms = matrices.detach().abs().sum(-1, keepdim=True).amax(-2, keepdim=True)
    n_squarings, needed = 0, None
    if matrices.device.type == "cpu":
        norm = norms.amax().item()
        if 0.5 < norm < math.inf:
            n_squarings = math.ceil(math.log2(2 * norm))
        x = matrices / 2**n_squarings
    else:  # to look at norms is to wait for a GPU; each matrix is squared as often as it needs
        needed = torch.log2(2 * norms).ceil().clamp(0, MOST_SQUARINGS)
        n_squarings = MOST_SQUARINGS
        x = matrices * torch.exp2(-needed)
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    square = x @ x
    cube = square @ x
    result = TAYLOR[12] * identity
    for k in (9, 6, 3, 0):
        part = TAYLOR[k] * identity + TAYLOR[k + 1] * x + TAYLOR[k + 2] * square
        result = part + cube @ result
    for k in range(n_squarings):
        squared = result @ result
        result = squared if needed is None else torch.where(needed > k, squared, result)
    return result


class LieGroup(BoxAugmentation):
    """Transformations by matrices ``expm(sum_i c_i G_i)``, with ``c`` drawn from learnt ranges.

    Subclasses define :meth:`transform_by`, with the matrices of :meth:`exponential`.

    Args:
        names: Names of the generators.
        generators: Matrices of the generators, ``[k, d, d]``.
        limits: Largest useful magnitude of each coefficient, or infinity.
        init: Initial ``eta``: one number, one per generator, or a mapping from names.
        learn: Generators to learn: ``"all"``, a name, or names.
        **options: ``constraint``, ``correlated`` and ``draws``, as for
            :class:`~laplace_invariance.augmentations.BoxAugmentation`.
    """

    generators: Tensor

    def __init__(
        self,
        names: Sequence[str],
        generators: Tensor,
        limits: Sequence[float],
        init: Init = 0.0,
        learn: Names = "all",
        **options: Unpack[BoxOptions],
    ) -> None:
        super().__init__(names, limits, init, learn, **options)
        self.register_buffer("generators", generators, persistent=False)

    def matrices(self, draws: Tensor) -> Tensor:
        """Return the transformation matrices ``[..., d, d]`` of draws ``[..., k]``."""
        return self.exponential(self.coefficients(draws))

    @without_autocast()
    def exponential(self, coefficients: Tensor) -> Tensor:
        """Return ``expm(sum_i c_i G_i)``, ``[..., d, d]``, for coefficients ``[..., k]``."""
        coefficients = single(coefficients)
        generators = self.generators.to(coefficients.dtype)
        algebra = torch.einsum("...k,kij->...ij", coefficients, generators)
        return matrix_exponential(algebra)


class AffineImage(LieGroup):
    """Affine transformations of images ``[n, channels, height, width]``, zero outside.

    The generators are x_translation, y_translation, rotation, x_scale, y_scale and shear.
    Translations are in units of half the image (1 shifts the centre to the border), rotations in
    radians (``pi`` is all of them), scalings are logarithms of factors. A transformation says where
    each output pixel reads its input, in coordinates with x to the right and y *down*: a positive
    rotation is counter-clockwise, a positive x_translation shifts the picture to the left, a
    positive x_scale makes it narrower. Interpolation is bilinear, so that samples are piecewise
    smooth in the hyperparameters. Both coordinates go from -1 to 1, so that images that are not
    square are transformed as if they were squeezed into a square: crop or pad them before.

    Args:
        init: Initial ``eta``: one number, one per generator, or a mapping from names.
        learn: Generators to learn: ``"all"``, a name, or names.
        **options: ``constraint``, ``correlated`` and ``draws``, as for
            :class:`~laplace_invariance.augmentations.BoxAugmentation`.
    """

    input_ndims = (3,)

    def __init__(
        self, init: Init = 0.0, learn: Names = "all", **options: Unpack[BoxOptions]
    ) -> None:
        super().__init__(*affine_generators(2), init, learn, **options)

    def transform_by(self, x: Tensor, coefficients: Tensor) -> Tensor:
        """Warp ``x`` ``[n, c, h, w]`` by ``coefficients`` ``[n or 1, n_samples, 6]``."""
        if x.ndim != 4:
            raise ValueError(
                "AffineImage transforms images [n, channels, height, width], "
                f"got shape {list(x.shape)}"
            )
        if not x.is_floating_point():
            raise TypeError(
                "AffineImage interpolates, so images must be floating point, "
                f"got {x.dtype}; divide by 255 first"
            )
        return warp_images(x, self.exponential(coefficients)[..., :2, :])

    def in_words(self, name: str, magnitude: float, shape: Shape | None = None) -> str:
        """Return a range in words, with the shape of an image in pixels and factors."""
        if shape is None:
            return _in_words(name, magnitude, " half-widths")
        if name.endswith("translation"):
            n_pixels = shape[-1] if name.startswith("x") else shape[-2]
            return f"±{magnitude * (n_pixels - 1) / 2:.1f} pixels"
        if name == "shear":  # it stretches one diagonal and shrinks the other
            return f"{as_factor(magnitude)} along the diagonals"
        return _in_words(name, magnitude, "")


class AffinePoints(LieGroup):
    """Affine transformations of coordinates ``[n, d]`` or point sets ``[n, points, d]``.

    In two dimensions the generators are those of :class:`AffineImage`; in three they are x_, y_
    and z_translation, rotations about the three axes (x_rotation, ...), x_, y_ and z_scale, and
    xy_, xz_ and yz_shear. Rotations are counter-clockwise, and translations are in the units of the
    coordinates. Samples are smooth in the hyperparameters.

    Args:
        dimensions: Number of coordinates d, 2 or 3.
        init: Initial ``eta``: one number, one per generator, or a mapping from names.
        learn: Generators to learn: ``"all"``, a name, or names.
        **options: ``constraint``, ``correlated`` and ``draws``, as for
            :class:`~laplace_invariance.augmentations.BoxAugmentation`.
    """

    input_ndims = (1, 2)

    def __init__(
        self,
        dimensions: int = 2,
        init: Init = 0.0,
        learn: Names = "all",
        **options: Unpack[BoxOptions],
    ) -> None:
        if dimensions not in (2, 3):
            raise ValueError(
                f"AffinePoints transforms points in 2 or 3 dimensions, got {dimensions}"
            )
        super().__init__(*affine_generators(dimensions), init, learn, **options)
        self.dimensions = dimensions

    def transform_by(self, x: Tensor, coefficients: Tensor) -> Tensor:
        """Transform points ``x`` by ``coefficients`` ``[n or 1, n_samples, k]``."""
        d = self.dimensions
        if x.ndim not in (2, 3) or x.shape[-1] != d:
            raise ValueError(
                f"AffinePoints(dimensions={d}) transforms [n, {d}] or [n, points, {d}], "
                f"got shape {list(x.shape)}"
            )
        if not x.is_floating_point():
            raise TypeError(
                f"AffinePoints needs floating-point coordinates, got {x.dtype}; "
                "convert them with x.float()"
            )
        matrices = self.exponential(coefficients).to(x.dtype)
        linear, translations = matrices[..., :d, :d], matrices[..., None, :d, d]
        points = x.view(len(x), 1, -1, d) @ linear.mT + translations
        if x.ndim == 2:
            return points.squeeze(2)
        return points

    def in_words(self, name: str, magnitude: float, shape: Shape | None = None) -> str:
        return _in_words(name, magnitude, "")


def warp_images(images: Tensor, maps: Tensor) -> Tensor:
    """Let each pixel read its image where an affine map sends it, bilinearly, with zeros outside.

    Args:
        images: Images ``[n, channels, height, width]``.
        maps: Affine maps ``[n or 1, n_samples, 2, 3]``, in coordinates that are -1 and 1 at the
            outermost pixels, with x to the right and y down.

    Returns:
        Samples ``[n, n_samples, channels, height, width]``.
    """
    n, _, height, width = images.shape
    xs = torch.linspace(-1, 1, width, device=images.device, dtype=images.dtype)
    ys = torch.linspace(-1, 1, height, device=images.device, dtype=images.dtype)
    ones = torch.ones(height * width, device=images.device, dtype=images.dtype)
    pixels = torch.stack([xs.repeat(height), ys.repeat_interleave(width), ones])
    # One matrix product makes the grid, about ten times faster than F.affine_grid. The samples of
    # an image are stacked along the height of its grid, which spares copies of the image.
    rows = rearrange(maps.to(images.dtype).expand(n, -1, -1, -1), "n s i j -> (n i s) j")
    grid = rearrange(rows @ pixels, "(n i s) (h w) -> n (s h) w i", n=n, i=2, h=height)
    samples = F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=True)
    return rearrange(samples, "n c (s h) w -> n s c h w", h=height)


def warn_of_bright_borders(images: Tensor) -> None:
    """Warn if images have a bright background, as what comes in from outside is black.

    Args:
        images: Images ``[n, channels, height, width]`` in [0, 1].
    """
    sides = [images[..., 0, :], images[..., -1, :], images[..., 0], images[..., -1]]
    median = torch.cat([side.flatten() for side in sides]).median().item()
    if median > BRIGHT:
        warnings.warn(
            f"images have bright borders (median {median:.2f}), and what comes in from outside of "
            "a transformed image is 0, black, which the network can tell apart: turn images into "
            "bright on black, as by 1 - x, or ranges come out too narrow",
            stacklevel=3,
        )


def affine_generators(dimensions: int) -> tuple[list[str], Tensor, list[float]]:
    """Return names, matrices ``[k, d + 1, d + 1]`` and limits of the affine Lie algebra.

    Matrices are in homogeneous coordinates. Translations, rotations (counter-clockwise where x
    points right and y points up), scalings and shears, in this order.
    """
    cells: dict[str, dict[tuple[int, int], float]] = {}
    axes = list(enumerate("xyz"[:dimensions]))
    for i, axis in axes:
        cells[f"{axis}_translation"] = {(i, dimensions): 1.0}
    for name, (i, j) in ROTATIONS[dimensions].items():
        cells[name] = {(j, i): 1.0, (i, j): -1.0}
    for i, axis in axes:
        cells[f"{axis}_scale"] = {(i, i): 1.0}
    for name, (i, j) in SHEARS[dimensions].items():
        cells[name] = {(i, j): 1.0, (j, i): 1.0}
    generators = torch.zeros(len(cells), dimensions + 1, dimensions + 1)
    limits = [math.inf] * len(cells)
    for index, (name, entries) in enumerate(cells.items()):
        for (i, j), value in entries.items():
            generators[index, i, j] = value
        if name in ROTATIONS[dimensions]:
            limits[index] = math.pi
    return list(cells), generators, limits


def _in_words(name: str, magnitude: float, translation_unit: str) -> str:
    if name.endswith("rotation"):
        return in_degrees(magnitude)
    if name.endswith("scale"):
        return as_factor(magnitude)
    if name.endswith("translation"):
        return f"±{magnitude:.3f}{translation_unit}"
    return f"±{magnitude:.3f}"
