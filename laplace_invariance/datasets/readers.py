"""Images of data sets and files, as floating point ``[n, channels, height, width]`` in [0, 1]."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["IMAGE_SOURCES", "Split", "load"]

Arrays = dict[str, np.ndarray]

_KEYS = ("x_train", "y_train", "x_test", "y_test")
_TORCHVISION = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "cifar10": "CIFAR10"}

IMAGE_SOURCES = ("digits", *_TORCHVISION)


@dataclass(frozen=True, eq=False)
class Split:
    """Images in [0, 1] and labels, to train on and to test on.

    Attributes:
        x_train: Training images ``[n, channels, height, width]``.
        y_train: Training labels ``[n]``.
        x_test: Test images, of the same shape.
        y_test: Test labels.
        n_classes: Number of classes in the whole data set, of which a subset may lack some.
        name: Name of the source.
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
        source: "digits" (scikit-learn's 1,797 images of 8 x 8 pixels, a fixed third of them to test
            on), "mnist", "fashion-mnist" or "cifar10" (torchvision's), or the path of an .npz file
            with arrays x_train, y_train, x_test, y_test: images ``[n, h, w]``, ``[n, h, w, c]`` or
            ``[n, c, h, w]``, of uint8, or floating point in [0, 1].
        root: Directory of torchvision's data sets.
        download: Whether to fetch a data set of torchvision that is not there.
        n_train: Size of a random subset of the training data; None is all. Smaller subsets are
            parts of larger ones.
        n_test: Size of a random subset of the test data; None is all.
        seed: Seed of the subsets; it decides nothing else.

    Raises:
        FileNotFoundError: If the data are not there.
        ValueError: If the source is unknown, arrays are not images and labels, or a subset is
            larger than the data.
    """
    arrays, name = _read(source, Path(root), download)
    for key in ("x_train", "x_test"):
        arrays[key] = _checked_images(arrays[key], f"{name}: {key}")
    for key in ("y_train", "y_test"):
        arrays[key] = _checked_labels(arrays[key], f"{name}: {key}")
    _check_sizes(arrays, name)
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


def _read(source: str | Path, root: Path, download: bool) -> tuple[Arrays, str]:
    """Return the arrays of a source as they are stored, and its name."""
    path = Path(source)
    if path.suffix == ".npz":
        return _read_npz(path), path.stem
    name = str(source).lower().replace("_", "-")
    if name == "digits":
        return _read_digits(), name
    if name in _TORCHVISION:
        return _read_torchvision(name, root, download), name
    raise ValueError(
        f"unknown source {str(source)!r}; choose from {', '.join(IMAGE_SOURCES)}, "
        "or give a path to an .npz file"
    )


def _read_npz(path: Path) -> Arrays:
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {path}; it should hold the arrays {', '.join(_KEYS)}"
        )
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not an archive as numpy.savez writes it")
    with np.load(path, allow_pickle=False) as archive:
        missing = [key for key in _KEYS if key not in archive.files]
        if missing:
            found = ", ".join(archive.files) or "nothing"
            raise ValueError(
                f"{path} lacks {', '.join(missing)}; it needs {', '.join(_KEYS)}, and has {found}"
            )
        try:
            return {key: archive[key] for key in _KEYS}
        except ValueError as error:
            raise ValueError(
                f"{path} must hold plain arrays of numbers, not pickled objects: {error}"
            ) from error


def _read_digits() -> Arrays:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits are part of scikit-learn: pip install scikit-learn"
        ) from error
    digits = load_digits()
    images, labels = digits.images / 16, digits.target
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).numpy()
    test, train = order[: len(order) // 3], order[len(order) // 3 :]
    return dict(zip(_KEYS, (images[train], labels[train], images[test], labels[test]), strict=True))


def _read_torchvision(name: str, root: Path, download: bool) -> Arrays:
    from torchvision import datasets

    arrays: Arrays = {}
    read = getattr(datasets, _TORCHVISION[name])
    for part in ("train", "test"):
        try:
            data = read(root, train=part == "train", download=download)
        except RuntimeError as error:
            if download:
                raise
            raise FileNotFoundError(
                f"{name} is not complete in {root.resolve()}; pass download=True (--download) to "
                "fetch it, another root, or the path of an .npz file"
            ) from error
        arrays[f"x_{part}"] = np.asarray(data.data)
        arrays[f"y_{part}"] = np.asarray(data.targets)
    return arrays


def _checked_labels(array: np.ndarray, what: str) -> np.ndarray:
    """Return labels; raise unless they are non-negative integers ``[n]``."""
    if not len(array):
        raise ValueError(f"{what} is empty")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{what} must be [n], of integers from 0 on, "
            f"got shape {list(array.shape)} of {array.dtype}"
        )
    if array.min() < 0:
        raise ValueError(f"{what} must be integers from 0 on, got integers from {array.min()} on")
    return array


def _checked_images(array: np.ndarray, what: str) -> np.ndarray:
    """Return images as ``[n, c, h, w]``; raise unless they are uint8 or in [0, 1]."""
    if not len(array):
        raise ValueError(f"{what} is empty")
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise ValueError(f"{what} holds NaN or infinite values")
        if array.min() < 0 or array.max() > 1:
            raise ValueError(
                f"{what} goes from {array.min():.4g} to {array.max():.4g}, but floating-point "
                "images must be in [0, 1]; rescale it, or store uint8"
            )
    elif array.dtype != np.uint8:
        raise ValueError(f"{what} must be uint8, or floating point in [0, 1], got {array.dtype}")
    return _channels_second(array, what)


def _channels_second(array: np.ndarray, what: str) -> np.ndarray:
    if array.ndim == 3:
        return array[:, None]
    channels_second = array.ndim == 4 and array.shape[1] in (1, 3)
    channels_last = array.ndim == 4 and array.shape[-1] in (1, 3)
    if channels_second == channels_last:  # neither, or no way to tell
        raise ValueError(
            f"{what} must be [n, h, w], [n, h, w, c] or [n, c, h, w] with one or three channels, "
            f"got shape {list(array.shape)}"
        )
    if channels_last:
        return np.moveaxis(array, -1, 1)
    return array


def _check_sizes(arrays: Arrays, name: str) -> None:
    """Raise unless every image has a label, and all images have the same shape."""
    for x, y in (("x_train", "y_train"), ("x_test", "y_test")):
        if len(arrays[x]) != len(arrays[y]):
            raise ValueError(
                f"{name}: {x} has {len(arrays[x])} images, but {y} has {len(arrays[y])} labels"
            )
    train, test = (list(arrays[key].shape[1:]) for key in ("x_train", "x_test"))
    if train != test:
        raise ValueError(
            f"{name}: images of x_train and x_test differ in shape, {train} and {test}"
        )


def _subset(n: int, size: int | None, seed: int, name: str) -> slice | np.ndarray:
    if size is None:
        return slice(None)
    if not 0 < size <= n:
        raise ValueError(f"{name} must be between 1 and {n}, all that there are, got {size}")
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:size].numpy()


def _to_images(array: np.ndarray) -> Tensor:
    dtype = torch.get_default_dtype()
    if array.dtype == np.uint8:
        return torch.from_numpy(np.ascontiguousarray(array)).to(dtype) / 255
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64)).to(dtype)
