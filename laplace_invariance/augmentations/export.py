"""A learnt augmentation as a transform of torchvision, for ordinary training elsewhere."""

from __future__ import annotations

from typing import Any

import PIL.Image
import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from laplace_invariance.augmentations.base import Augmentation
from laplace_invariance.augmentations.box import BoxAugmentation

__all__ = ["LearntTransform"]

# Other modes of PIL images are palettes, or have another black or more than eight bits.
PIL_MODES = ("L", "LA", "RGB", "RGBA")
# How far an image may leave [0, 1], as resizing makes it; normalised images leave it much further.
OVERSHOOT = 0.25


def _can_be_input(value: Any) -> bool:
    """Return whether a value is an input, and no label or single number."""
    if isinstance(value, (PIL.Image.Image, tv_tensors.Image)):
        return True
    if not isinstance(value, Tensor) or value.ndim == 0:
        return False
    return value.is_floating_point() or value.dtype == torch.uint8


class LearntTransform(v2.Transform):
    """Transforms of inputs by draws from a learnt augmentation, frozen as it is now.

    Made by :meth:`~laplace_invariance.augmentations.Augmentation.to_transform`. Takes what the
    augmentation takes, with or without the batch: images ``[channels, height, width]``, point sets
    ``[points, d]`` or one point ``[d]``, signals ``[channels, length]``. Each element of a batch
    gets its own draw; images of one sample get the same. Images can be floating-point tensors,
    uint8 tensors, ``tv_tensors.Image`` or PIL images, and stay what they are. As in all of
    ``torchvision.transforms.v2``, labels and other things pass through, and of plain tensors all
    but the first.

    Args:
        augmentation: The learnt augmentation, of which a frozen copy is kept.
        generator: Source of the draws; None is torch's default generator.
    """

    _transformed_types = (_can_be_input,)

    def __init__(
        self, augmentation: Augmentation, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        if not augmentation.input_ndims:
            raise ValueError(
                f"{type(augmentation).__name__} does not say how many dimensions one input has, so "
                "a batch cannot be told from one input; set input_ndims in the class, e.g. "
                "input_ndims = (3,) for images"
            )
        # on the CPU, because workers of a DataLoader cannot share a GPU
        self.augmentation = augmentation.frozen().cpu()
        for module in self.augmentation.modules():
            if isinstance(module, BoxAugmentation) and module.draws == "grid":
                module.draws = "independent"  # one draw from a grid is always its midpoint
        self.generator = generator

    @property
    def _takes_images(self) -> bool:
        return 3 in self.augmentation.input_ndims

    @property
    def _name(self) -> str:
        return type(self.augmentation).__name__

    def _is_batch(self, x: Tensor) -> bool:
        ndims = self.augmentation.input_ndims
        if x.ndim not in (*ndims, max(ndims) + 1):
            raise ValueError(
                f"{self._name} transforms inputs of {' or '.join(map(str, ndims))} dimensions, or "
                f"of {max(ndims) + 1} with a batch; got shape {list(x.shape)}"
            )
        return x.ndim > max(ndims)

    def check_inputs(self, flat_inputs: list[Any]) -> None:
        """Raise ``TypeError`` if an input is of a kind that cannot be transformed."""
        for value in flat_inputs:
            if isinstance(value, tv_tensors.TVTensor) and not isinstance(value, tv_tensors.Image):
                raise TypeError(
                    f"{type(value).__name__} is not supported: only images are transformed, and it "
                    "would no longer match them"
                )
            if isinstance(value, (PIL.Image.Image, tv_tensors.Image)) and not self._takes_images:
                raise TypeError(
                    f"{self._name} does not transform images, got {type(value).__name__}"
                )
            if isinstance(value, PIL.Image.Image) and value.mode not in PIL_MODES:
                raise TypeError(
                    f"PIL images must have one of the modes {PIL_MODES}, got {value.mode!r}; "
                    "convert('RGB') first"
                )

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Return one draw for each element of the batch, which all inputs of a sample share."""
        if not flat_inputs:
            kinds = (
                "images, as PIL has them or as tensors, floating point or uint8"
                if self._takes_images
                else "floating-point tensors"
            )
            raise TypeError(f"nothing to transform: {self._name} takes {kinds}")
        if self.generator is not None and get_worker_info() is not None:
            raise RuntimeError(
                "every worker of a DataLoader has the same copy of this generator, so the workers "
                "would repeat each other; use to_transform(generator=None), whose draws depend on "
                "torch.manual_seed and on the worker"
            )
        sizes = {self._batch_size(x) for x in flat_inputs}
        if len(sizes) > 1:
            raise ValueError(
                f"inputs of one sample get the same draws, but these are batches of {sorted(sizes)}"
            )
        device = getattr(flat_inputs[0], "device", torch.device("cpu"))
        if next(self.augmentation.buffers()).device != device:
            self.augmentation.to(device)
        return {"draws": self.augmentation.draw_one(sizes.pop(), self.generator)}

    def _batch_size(self, x: Any) -> int:
        if isinstance(x, Tensor) and self._is_batch(x):
            return len(x)
        return 1

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Transform one input by the draws of :meth:`make_params`."""
        draws = params["draws"]
        if isinstance(inpt, PIL.Image.Image):
            return F.to_pil_image(self._transformed(F.pil_to_tensor(inpt), draws))
        transformed = self._transformed(inpt.as_subclass(Tensor), draws)
        if isinstance(inpt, tv_tensors.Image):
            return tv_tensors.wrap(transformed, like=inpt)
        return transformed

    def _transformed(self, x: Tensor, draws: Tensor) -> Tensor:
        """Transform a tensor, and images of bytes by way of floats."""
        if x.dtype != torch.uint8:
            return self._transformed_floats(x, draws)
        if not self._takes_images:
            raise TypeError(f"{self._name} transforms floating-point tensors, got {x.dtype}")
        floats = self._transformed_floats(x.float() / 255, draws)
        return (255 * floats).round().clamp(0, 255).to(torch.uint8)

    def _transformed_floats(self, x: Tensor, draws: Tensor) -> Tensor:
        unit_range = self.augmentation.unit_range
        if unit_range and x.numel() and (x.min() < -OVERSHOOT or x.max() > 1 + OVERSHOOT):
            raise ValueError(
                f"{self._name} transforms images in [0, 1], got values from {x.min():.2f} to "
                f"{x.max():.2f}; normalise after it"
            )
        if self._is_batch(x):
            samples = self.augmentation.transform(x, draws).squeeze(1)
        else:
            samples = self.augmentation.transform(x.unsqueeze(0), draws)[0, 0]
        return samples.clamp(0, 1) if unit_range else samples

    # the names of these methods before torchvision 0.21
    _check_inputs = check_inputs
    _get_params = make_params
    _transform = transform

    def extra_repr(self) -> str:
        return ", ".join(f"{name}: {words}" for name, words in self.augmentation.ranges().items())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"
