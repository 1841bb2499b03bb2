"""Images of data sets and of files, as floating point ``[n, channels, height, width]`` in [0, 1]."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["SOURCES", "Split", "load"]


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
            raise ValueError(
                f"{name}: {x} has {len(arrays[x])} images, but {y} has {len(arrays[y])} labels"
            )
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
    for part in ("train", "test"):
        try:
            data = getattr(datasets, _TORCHVISION[name])(
                root, train=part == "train", download=download
            )
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
        raise ValueError(
            f"{name}: {key} must be uint8, or floating point in [0, 1], got {array.dtype}"
        )
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
