"""Changes of brightness, contrast and hue."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laplace_invariance.augmentations.box import BoxAugmentation, Init, Names, as_factor, in_degrees

__all__ = ["Colour"]

NAMES = ("brightness", "contrast", "hue")


def hue_rotations(angles: Tensor) -> Tensor:
    """Return rotations ``[..., 3, 3]`` of RGB vectors about the grey axis ``(1, 1, 1)``, by ``angles`` ``[...]``.

    Rodrigues' formula ``cos I + (1 - cos) u u^T + sin [u]_x`` with ``u = (1, 1, 1) / sqrt(3)``.
    """
    cross = torch.tensor(
        [[0, -1, 1], [1, 0, -1], [-1, 1, 0]], dtype=angles.dtype, device=angles.device
    ) / math.sqrt(3)
    identity = torch.eye(3, dtype=angles.dtype, device=angles.device)
    cos, sin = angles.cos()[..., None, None], angles.sin()[..., None, None]
    return cos * identity + (1 - cos) / 3 + sin * cross


class Colour(BoxAugmentation):
    """Changes of brightness, contrast and hue of images ``[n, 3, height, width]`` with values in ``[0, 1]``, black zero.

    ``x' = exp(b) (exp(c) R(h) (x - m) + m)``: brightness ``b`` and contrast ``c`` are logarithms of factors, contrast that
    of deviations from the image's mean grey ``m``, over pixels and channels; hue ``h`` is an angle in radians, by which
    ``R`` turns the RGB vector about the grey axis (``pi`` is all hues, and a third of a turn takes red to green). Smooth in
    the hyperparameters, because nothing is clamped: values can leave ``[0, 1]``. :meth:`to_transform` clamps.

    Images of one channel are allowed if hue can never move, e.g. ``learn=("brightness", "contrast")``.

    Args: as for :class:`~laplace_invariance.augmentations.BoxAugmentation`.
    """

    input_ndims = (3,)
    unit_range = True

    def __init__(
        self,
        init: Init = 0.0,
        learn: Names = "all",
        constraint: str | None = None,
        correlated: bool = False,
        draws: str = "independent",
    ) -> None:
        super().__init__(
            NAMES, (math.inf, math.inf, math.pi), init, learn, constraint, correlated, draws
        )

    def _check(self, x: Tensor) -> None:
        if x.ndim != 4 or x.shape[1] not in (1, 3):
            raise ValueError(
                f"Colour transforms images [n, 3, height, width], got shape {list(x.shape)}"
            )
        if x.shape[1] == 1 and NAMES.index("hue") in self.moving:
            raise ValueError(
                f"images of one channel have no hue, got shape {list(x.shape)}; leave hue out with "
                "Colour(learn=('brightness', 'contrast')) and without an init for it"
            )
        if not x.is_floating_point():
            raise TypeError(
                f"Colour needs floating-point images in [0, 1], got {x.dtype}; divide by 255 first"
            )

    def move(self, x: Tensor, coefficients: Tensor) -> Tensor:
        self._check(x)
        n, channels, height, width = x.shape
        n_samples = coefficients.shape[1]
        brightness, contrast, hue = coefficients.to(x.dtype).unbind(-1)
        # Grey is fixed by R, so that x' is M x + t with one matrix and one number per sample.
        rotations = hue_rotations(hue) if channels == 3 else torch.ones_like(hue)[..., None, None]
        matrices = (brightness + contrast).exp()[..., None, None] * rotations
        offsets = brightness.exp() * (1 - contrast.exp()) * x.mean((1, 2, 3)).unsqueeze(1)
        samples = torch.baddbmm(
            offsets.repeat_interleave(channels, dim=1).unsqueeze(-1),
            matrices.expand(n, -1, -1, -1).reshape(n, n_samples * channels, channels),
            x.reshape(n, channels, height * width),
        )
        return samples.view(n, n_samples, channels, height, width)

    def ranges(self) -> dict[str, str]:
        return {
            k: in_degrees(v) if k == "hue" else as_factor(v) for k, v in self.magnitudes().items()
        }
