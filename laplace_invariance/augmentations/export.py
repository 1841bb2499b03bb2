"""A learnt augmentation as a transform of torchvision, for ordinary training elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import PIL.Image
import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

if TYPE_CHECKING:
    from laplace_invariance.augmentations.base import Augmentation

__all__ = ["LearntTransform"]

MODES = (
    "L",
    "LA",
    "RGB",
    "RGBA",
)  # of PIL images; others are palettes, have another black or more than eight bits
OVERSHOOT = 0.25  # how far an image may leave [0, 1], as resizing makes it; normalised images go much further


def _can_be_input(value: Any) -> bool:
    """Tell inputs from labels: images, and tensors of numbers that can be interpolated, but no single numbers."""
    if isinstance(value, (PIL.Image.Image, tv_tensors.Image)):
        return True
    return (
        isinstance(value, Tensor)
        and value.ndim > 0
        and (value.is_floating_point() or value.dtype == torch.uint8)
    )


class LearntTransform(v2.Transform):
    """Transform inputs by draws from a learnt augmentation, frozen as it is now.

    Made by :meth:`~laplace_invariance.augmentations.Augmentation.to_transform`. Takes what the augmentation takes, with or
    without the batch: images ``[channels, height, width]``, point sets ``[points, d]`` or one point ``[d]``, signals
    ``[channels, length]``. Each element of a batch gets its own draw; images of one sample get the same. Images can be
    floating-point tensors, uint8 tensors, ``tv_tensors.Image`` or PIL images, and stay what they are. As in all of
    ``torchvision.transforms.v2``, labels and other things pass through, and of plain tensors all but the first.

    Args:
        augmentation: what has been learnt.
        generator: source of the draws; None is torch's default generator.
    """

    _transformed_types = (_can_be_input,)

    def __init__(
        self, augmentation: Augmentation, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        if not augmentation.input_ndims:
            raise ValueError(
                f"{type(augmentation).__name__} does not say how many dimensions one input has, so a batch cannot be told "
                "from one input; set input_ndims in the class, e.g. input_ndims = (3,) for images"
            )
        self.augmentation = (
            augmentation.frozen().cpu()
        )  # workers of a DataLoader cannot share a GPU
        for module in self.augmentation.modules():
            if getattr(module, "draws", None) == "grid":  # of which one draw is its midpoint
                module.draws = "independent"
        self.generator = generator

    @property
    def _images(self) -> bool:
        return 3 in self.augmentation.input_ndims

    def _is_batch(self, x: Tensor) -> bool:
        ndims = self.augmentation.input_ndims
        if x.ndim not in (*ndims, max(ndims) + 1):
            raise ValueError(
                f"{type(self.augmentation).__name__} transforms inputs of {' or '.join(map(str, ndims))} dimensions, or of "
                f"{max(ndims) + 1} with a batch; got shape {list(x.shape)}"
            )
        return x.ndim > max(ndims)

    def check_inputs(self, flat_inputs: list[Any]) -> None:
        for value in flat_inputs:
            if isinstance(value, tv_tensors.TVTensor) and not isinstance(value, tv_tensors.Image):
                raise TypeError(
                    f"{type(value).__name__} is not supported: only images are transformed, and it would no longer match them"
                )
            if isinstance(value, (PIL.Image.Image, tv_tensors.Image)) and not self._images:
                raise TypeError(
                    f"{type(self.augmentation).__name__} does not transform images, got {type(value).__name__}"
                )
            if isinstance(value, PIL.Image.Image) and value.mode not in MODES:
                raise TypeError(
                    f"PIL images must have one of the modes {MODES}, got {value.mode!r}; convert('RGB') first"
                )

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        if not flat_inputs:
            kinds = "images, floating point or uint8" if self._images else "floating-point tensors"
            raise TypeError(
                f"nothing to transform: {type(self.augmentation).__name__} takes {kinds}"
            )
        if self.generator is not None and get_worker_info() is not None:
            raise RuntimeError(
                "every worker of a DataLoader has the same copy of this generator, so the workers would repeat each other; "
                "use to_transform(generator=None), whose draws depend on torch.manual_seed and on the worker"
            )
        sizes = {len(x) if isinstance(x, Tensor) and self._is_batch(x) else 1 for x in flat_inputs}
        if len(sizes) > 1:
            raise ValueError(
                f"inputs of one sample get the same draws, but these are batches of {sorted(sizes)}"
            )
        device = getattr(flat_inputs[0], "device", torch.device("cpu"))
        if next(self.augmentation.buffers()).device != device:
            self.augmentation.to(device)
        return {"draws": self.augmentation.draw_one(sizes.pop(), self.generator)}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if isinstance(inpt, PIL.Image.Image):
            return F.to_pil_image(self._move(F.pil_to_tensor(inpt), params["draws"]))
        moved = self._move(inpt.as_subclass(Tensor), params["draws"])
        return tv_tensors.wrap(moved, like=inpt) if isinstance(inpt, tv_tensors.Image) else moved

    def _move(self, x: Tensor, draws: Tensor) -> Tensor:
        if x.dtype != torch.uint8:
            return self._move_floats(x, draws)
        if not self._images:
            raise TypeError(
                f"{type(self.augmentation).__name__} transforms floating-point tensors, got {x.dtype}"
            )
        return (
            (255 * self._move_floats(x.float() / 255, draws)).round().clamp(0, 255).to(torch.uint8)
        )

    def _move_floats(self, x: Tensor, draws: Tensor) -> Tensor:
        unit_range = self.augmentation.unit_range
        if unit_range and x.numel() and (x.min() < -OVERSHOOT or x.max() > 1 + OVERSHOOT):
            raise ValueError(
                f"{type(self.augmentation).__name__} transforms images in [0, 1], got values from {x.min():.2f} to "
                f"{x.max():.2f}; normalise after it"
            )
        if self._is_batch(x):
            moved = self.augmentation.transform(x, draws).squeeze(1)
        else:
            moved = self.augmentation.transform(x.unsqueeze(0), draws)[0, 0]
        return moved.clamp(0, 1) if unit_range else moved

    # the names of these methods before torchvision 0.21
    _check_inputs, _get_params, _transform = check_inputs, make_params, transform

    def extra_repr(self) -> str:
        return ", ".join(f"{name}: {words}" for name, words in self.augmentation.ranges().items())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"
