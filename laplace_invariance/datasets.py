"""Data whose invariance is known, and images to make it from.

``load`` reads images, ``transformed`` moves each by a draw of its own; the others make data of their own. What a learnt range
should be is in ``true_ranges``. All images are floating point ``[n, channels, height, width]`` in [0, 1] with black = 0, so
that what comes in from outside of a moved image is background; networks standardise for themselves.
"""

from __future__ import annotations

import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "KINDS",
    "SOURCES",
    "Split",
    "check_images",
    "hue_rotated",
    "load",
    "rotate",
    "rotated_shapes",
    "rotation_regression",
    "transformed",
    "true_ranges",
    "warp",
    "waves",
]

# kind -> ranges of the generators of AffineImage that are not zero
_RANGES: dict[str, dict[str, float]] = {
    "fully_rotated": {"rotation": math.pi},
    "partially_rotated": {"rotation": math.pi / 2},
    "translated": {"x_translation": 4 / 7, "y_translation": 4 / 7},
    "scaled": {"x_scale": math.log(2), "y_scale": math.log(2)},
    "original": {},
}
KINDS = tuple(_RANGES)
_GENERATORS = ("x_translation", "y_translation", "rotation", "x_scale", "y_scale", "shear")
_WARPED_AT_ONCE = 4096  # images; a grid of coordinates is twice as large as a grey image


# Images, moved.


def true_ranges(kind: str) -> dict[str, float]:
    """Return how far images of a kind are moved along each generator of ``AffineImage``, by its name.

    Rotation is in radians, translation in half-widths, scale in logarithms of factors.
    """
    name = kind.replace("-", "_")
    if name not in _RANGES:
        raise ValueError(f"unknown kind {kind!r}; choose from {', '.join(KINDS)}")
    return {generator: _RANGES[name].get(generator, 0.0) for generator in _GENERATORS}


def transformed(images: Tensor, kind: str, generator: torch.Generator | None = None) -> Tensor:
    """Move each image by a draw of its own, bilinearly, with zeros outside.

    Draws are uniform within plus or minus :func:`true_ranges`. An image is "fully_rotated" by up to 180 degrees to either
    side, "partially_rotated" by up to 90, "translated" by up to 4/7 of its half-width and, independently, of its half-height
    (8 pixels at 28 x 28), "scaled" by a factor between 1/2 and 2, the same for both axes, or left as it is ("original").

    Args:
        images: ``[n, channels, height, width]`` in [0, 1].
        kind: one of ``KINDS``; hyphens may stand for underscores.
        generator: source of the draws; None is torch's default generator.

    Returns:
        Images of the same shape.
    """
    ranges = true_ranges(kind)
    check_images(images)
    if not any(ranges.values()):
        return images
    angle, log_factor, x, y = _uniform((len(images), 4), generator, images).unbind(-1)
    angle = angle * ranges["rotation"]
    factor = (log_factor * ranges["x_scale"]).exp()
    cos, sin = factor * angle.cos(), factor * angle.sin()
    rows = [cos, -sin, x * ranges["x_translation"], sin, cos, y * ranges["y_translation"]]
    return warp(images, torch.stack(rows, -1).view(-1, 2, 3))


def warp(images: Tensor, maps: Tensor) -> Tensor:
    """Let each pixel read its image where an affine map sends it, as ``AffineImage`` does.

    Args:
        images: ``[n, channels, height, width]``.
        maps: ``[n, 2, 3]``, in coordinates that are -1 and 1 at the outermost pixels, x to the right and y down.
    """
    if maps.shape != (len(images), 2, 3):
        raise ValueError(f"{len(images)} images need maps of shape [{len(images)}, 2, 3], got {list(maps.shape)}")
    height, width = images.shape[-2:]
    ys = torch.linspace(-1, 1, height, device=images.device, dtype=images.dtype)
    xs = torch.linspace(-1, 1, width, device=images.device, dtype=images.dtype)
    pixels = torch.stack([xs.repeat(height), ys.repeat_interleave(width), torch.ones_like(xs).repeat(height)])
    parts = []
    for part, part_maps in zip(images.split(_WARPED_AT_ONCE), maps.to(images).split(_WARPED_AT_ONCE), strict=True):
        # one matrix product, about ten times faster than F.affine_grid
        grid = (part_maps.reshape(-1, 3) @ pixels).view(-1, 2, height, width).movedim(1, -1)
        parts.append(F.grid_sample(part, grid, mode="bilinear", padding_mode="zeros", align_corners=True))
    return torch.cat(parts)


def hue_rotated(images: Tensor, max_angle: float, generator: torch.Generator | None = None) -> Tensor:
    """Turn the colours of each RGB image about the grey axis, by one angle per image.

    A rotation of colour space itself, undone by the opposite angle: it keeps greys, and the mean of the three channels, and
    may take saturated colours out of [0, 1].

    Args:
        images: ``[n, 3, height, width]`` in [0, 1].
        max_angle: in radians, to either side.
        generator: source of the angles; None is torch's default generator.

    Returns:
        Images of the same shape.
    """
    check_images(images)
    if images.shape[1] != 3:
        raise ValueError(f"hue is a property of RGB images [n, 3, height, width], got shape {list(images.shape)}")
    if not 0 <= max_angle <= math.pi:
        raise ValueError(f"max_angle must be between 0 and pi, got {max_angle}")
    angles = (max_angle * _uniform((len(images),), generator, images)).view(-1, 1, 1)
    # Rodrigues: exp(t K) = 1 + sin(t) K + (1 - cos(t)) K^2, K the cross product with the unit vector along (1, 1, 1)
    cross = torch.tensor([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]).to(images) / 3**0.5
    matrices = torch.eye(3).to(images) + angles.sin() * cross + (1 - angles.cos()) * (cross @ cross)
    return (matrices @ images.flatten(2)).view_as(images)


def _uniform(shape: tuple[int, ...], generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Return draws from [-1, 1] with the type and device of ``like``."""
    device = like.device if generator is None else generator.device
    return (2 * torch.rand(shape, generator=generator, device=device, dtype=like.dtype) - 1).to(like.device)


def check_images(images: Tensor) -> None:
    """Refuse what is not floating point ``[n, channels, height, width]`` in [0, 1]."""
    if images.ndim != 4:
        raise ValueError(f"images must be [n, channels, height, width], got shape {list(images.shape)}")
    if not images.is_floating_point():
        raise ValueError(f"images must be floating point in [0, 1], got {images.dtype}; divide by the largest value")
    if len(images) and not (images.min() >= 0 and images.max() <= 1):
        raise ValueError(
            f"images must be in [0, 1] with black = 0, got values from {images.min():.3g} to {images.max():.3g}; "
            "standardise in the network (layers.Standardise), not here"
        )


# Points and signals.


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


def rotation_regression(n: int, noise: float = 0.1, generator: torch.Generator | None = None) -> TensorDataset:
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
        parts = phases.sin() * (sines / size)[kind].unsqueeze(1) + phases.cos() * (cosines / size)[kind].unsqueeze(1)
        return parts.sum(-1)

    return wave


# Images, read.


@dataclass(frozen=True, eq=False)
class Split:
    """Images ``[n, channels, height, width]`` in [0, 1] and labels ``[n]`` to train on and to test on.

    Attributes:
        n_classes: number of classes in the whole data set, of which a subset may lack some.
        name: where they are from.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    n_classes: int
    name: str

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Channels, height and width."""
        return tuple(self.x_train.shape[1:])


Arrays = dict[str, np.ndarray]
_KEYS = ("x_train", "y_train", "x_test", "y_test")
_TORCHVISION = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "cifar10": "CIFAR10"}
SOURCES = ("digits", *_TORCHVISION)


def load(
    source: str | Path,
    *,
    root: str | Path = "data",
    download: bool = False,
    n_train: int | None = None,
    n_test: int | None = None,
    seed: int = 0,
) -> Split:
    """Read images and labels, or random subsets of them.

    Args:
        source: "digits" (scikit-learn's 1,797 images of 8 x 8 pixels, a fixed third of them to test on), "mnist",
            "fashion-mnist" or "cifar10" (torchvision's), or the path of an .npz file with arrays x_train, y_train, x_test,
            y_test: images ``[n, h, w]``, ``[n, h, w, c]`` or ``[n, c, h, w]``, of uint8, or floating point in [0, 1].
        root: directory of torchvision's data sets.
        download: fetch a data set of torchvision that is not there.
        n_train: size of a random subset of the training data; None is all. Smaller subsets are parts of larger ones.
        n_test: the same of the test data.
        seed: of the subsets; decides nothing else.
    """
    path = Path(source)
    name = str(source).lower().replace("_", "-")
    if path.suffix == ".npz":
        arrays, name = _read_npz(path), path.stem
    elif name == "digits":
        arrays = _read_digits()
    elif name in _TORCHVISION:
        arrays = _read_torchvision(name, Path(root), download)
    else:
        raise ValueError(
            f"unknown source {str(source)!r}; choose from {', '.join(SOURCES)}, or give a path to an .npz file"
        )
    arrays = {key: _checked(array, key, name) for key, array in arrays.items()}
    for x, y in (("x_train", "y_train"), ("x_test", "y_test")):
        if len(arrays[x]) != len(arrays[y]):
            raise ValueError(f"{name}: {x} has {len(arrays[x])} images, but {y} has {len(arrays[y])} labels")
    if arrays["x_train"].shape[1:] != arrays["x_test"].shape[1:]:
        shapes = " and ".join(str(list(arrays[key].shape[1:])) for key in ("x_train", "x_test"))
        raise ValueError(f"{name}: images of x_train and x_test differ in shape, {shapes}")
    train = _subset(len(arrays["y_train"]), n_train, seed, f"{name}: n_train")
    test = _subset(len(arrays["y_test"]), n_test, seed, f"{name}: n_test")
    return Split(
        _to_images(arrays["x_train"][train]),
        torch.from_numpy(arrays["y_train"][train].astype(np.int64)),
        _to_images(arrays["x_test"][test]),
        torch.from_numpy(arrays["y_test"][test].astype(np.int64)),
        n_classes=1 + int(max(arrays["y_train"].max(), arrays["y_test"].max())),
        name=name,
    )


def _read_npz(path: Path) -> Arrays:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; it should hold the arrays {', '.join(_KEYS)}")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not an archive as numpy.savez writes it")
    with np.load(path, allow_pickle=False) as archive:
        missing = [key for key in _KEYS if key not in archive.files]
        if missing:
            found = ", ".join(archive.files) or "nothing"
            raise ValueError(f"{path} lacks {', '.join(missing)}; it needs {', '.join(_KEYS)}, and has {found}")
        try:
            return {key: archive[key] for key in _KEYS}
        except ValueError as error:
            raise ValueError(f"{path} must hold plain arrays of numbers, not pickled objects: {error}") from error


def _read_digits() -> Arrays:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits are part of scikit-learn: pip install scikit-learn") from error
    digits = load_digits()
    images, labels = digits.images / 16, digits.target
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).numpy()
    test, train = order[: len(order) // 3], order[len(order) // 3 :]
    return dict(zip(_KEYS, (images[train], labels[train], images[test], labels[test]), strict=True))


def _read_torchvision(name: str, root: Path, download: bool) -> Arrays:
    from torchvision import datasets

    arrays: Arrays = {}
    for part in ("train", "test"):
        try:
            data = getattr(datasets, _TORCHVISION[name])(root, train=part == "train", download=download)
        except RuntimeError as error:
            if download:
                raise
            raise FileNotFoundError(
                f"{name} is not complete in {root.resolve()}; pass download=True (--download) to fetch it, another root, or "
                "the path of an .npz file"
            ) from error
        arrays[f"x_{part}"], arrays[f"y_{part}"] = np.asarray(data.data), np.asarray(data.targets)
    return arrays


def _checked(array: np.ndarray, key: str, name: str) -> np.ndarray:
    """Refuse what is not images or labels; bring images to ``[n, c, h, w]``."""
    if not len(array):
        raise ValueError(f"{name}: {key} is empty")
    if key.startswith("y"):
        if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0:
            raise ValueError(
                f"{name}: {key} must be [n], of integers from 0 on, got shape {list(array.shape)} of {array.dtype}"
                + (f" from {array.min()} on" if array.ndim == 1 else "")
            )
        return array
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise ValueError(f"{name}: {key} holds NaN or infinite values")
        if array.min() < 0 or array.max() > 1:
            raise ValueError(
                f"{name}: floating-point images must be in [0, 1], but {key} goes from {array.min():.4g} to "
                f"{array.max():.4g}; rescale it, or store uint8"
            )
    elif array.dtype != np.uint8:
        raise ValueError(f"{name}: {key} must be uint8, or floating point in [0, 1], got {array.dtype}")
    return _channels_second(array, key, name)


def _channels_second(array: np.ndarray, key: str, name: str) -> np.ndarray:
    if array.ndim == 3:
        return array[:, None]
    second, last = (array.ndim == 4 and array.shape[axis] in (1, 3) for axis in (1, -1))
    if second == last:  # neither, or no way to tell
        raise ValueError(
            f"{name}: {key} must be [n, h, w], [n, h, w, c] or [n, c, h, w] with one or three channels, got shape "
            f"{list(array.shape)}"
        )
    return array if second else np.moveaxis(array, -1, 1)


def _subset(n: int, size: int | None, seed: int, name: str) -> slice | np.ndarray:
    if size is None:
        return slice(None)
    if not 0 < size <= n:
        raise ValueError(f"{name} must be between 1 and {n}, all that there are, got {size}")
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:size].numpy()


def _to_images(array: np.ndarray) -> Tensor:
    integers = array.dtype == np.uint8
    array = np.ascontiguousarray(array, dtype=np.uint8 if integers else np.float64)
    images = torch.from_numpy(array).to(torch.get_default_dtype())
    return images / 255 if integers else images
