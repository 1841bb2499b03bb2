"""Changes of brightness, contrast and hue."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
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

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Colour", "hue_rotations"]

LIMITS = {"brightness": math.inf, "contrast": math.inf, "hue": math.pi}


def hue_rotations(angles: Tensor) -> Tensor:
    """Return rotations of RGB vectors about the grey axis ``(1, 1, 1)``.

    Rodrigues' formula ``cos I + (1 - cos) u u^T + sin [u]_x`` with ``u = (1, 1, 1) / sqrt(3)``.

    Args:
        angles: Angles ``[...]`` in radians; a third of a turn takes red to green.

    Returns:
        Matrices ``[..., 3, 3]``.
    """
    identity = torch.eye(3, dtype=angles.dtype, device=angles.device)
    cross = (identity.roll(1, 0) - identity.roll(-1, 0)) / math.sqrt(3)
    cos, sin = angles.cos()[..., None, None], angles.sin()[..., None, None]
    return cos * identity + (1 - cos) / 3 + sin * cross


class Colour(BoxAugmentation):
    """Changes of brightness, contrast and hue of images ``[n, 3, height, width]``, black zero.

    ``x' = exp(b) (exp(c) R(h) (x - m) + m)``: brightness ``b`` and contrast ``c`` are logarithms of
    factors, contrast that of deviations from the image's mean grey ``m``, over pixels and channels;
    hue ``h`` is an angle in radians, by which ``R`` rotates the RGB vector about the grey axis
    (``pi`` is all hues). Values of images are in ``[0, 1]``. Samples are smooth in the
    hyperparameters, because nothing is clamped: values can leave ``[0, 1]``. :meth:`to_transform`
    clamps.

    Images of one channel are allowed if hue is always zero, e.g. with
    ``learn=("brightness", "contrast")``.

    Args:
        init: Initial ``eta``: one number, one per generator, or a mapping from names.
        learn: Generators to learn: ``"all"``, a name, or names.
        **options: ``constraint``, ``correlated`` and ``draws``, as for
            :class:`~laplace_invariance.augmentations.BoxAugmentation`.
    """

    input_ndims = (3,)
    unit_range = True

    def __init__(
        self, init: Init = 0.0, learn: Names = "all", **options: Unpack[BoxOptions]
    ) -> None:
        super().__init__(list(LIMITS), list(LIMITS.values()), init, learn, **options)

    def transform_by(self, x: Tensor, coefficients: Tensor) -> Tensor:
        """Change the colours of ``x`` by ``coefficients`` ``[n or 1, n_samples, 3]``."""
        self._check(x)
        n, channels, height, _ = x.shape
        brightness, contrast, hue = coefficients.to(x.dtype).unbind(-1)
        # R leaves grey as it is, so that x' is M x + t with one matrix and one number per sample.
        matrices = (brightness + contrast).exp()[..., None, None]
        if channels == 3:
            matrices = matrices * hue_rotations(hue)
        offsets = brightness.exp() * (1 - contrast.exp()) * x.mean((1, 2, 3)).unsqueeze(1)
        samples = torch.baddbmm(
            offsets.repeat_interleave(channels, dim=1).unsqueeze(-1),
            rearrange(matrices.expand(n, -1, -1, -1), "n s i j -> n (s i) j"),
            x.flatten(2),
        )
        return rearrange(samples, "n (s c) (h w) -> n s c h w", c=channels, h=height)

    def _check(self, x: Tensor) -> None:
        if x.ndim != 4 or x.shape[1] not in (1, 3):
            raise ValueError(
                f"Colour transforms images [n, 3, height, width], got shape {list(x.shape)}"
            )
        if x.shape[1] == 1 and self.names.index("hue") in self.active:
            raise ValueError(
                f"images of one channel have no hue, got shape {list(x.shape)}; leave hue out with "
                "Colour(learn=('brightness', 'contrast')) and without an init for it"
            )
        if not x.is_floating_point():
            raise TypeError(
                f"Colour needs floating-point images in [0, 1], got {x.dtype}; divide by 255 first"
            )

    def in_words(self, name: str, magnitude: float, shape: Shape | None = None) -> str:
        if name == "hue":
            return in_degrees(magnitude)
        return as_factor(magnitude)
