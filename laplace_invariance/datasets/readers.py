"""Images of data sets and files, as floating point ``[n, channels, height, width]`` in [0, 1]."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laplace_invariance.datasets.folders import list_folder, read_images
from laplace_invariance.datasets.images import fitted

__all__ = ["IMAGE_SOURCES", "Split", "load"]

Arrays = dict[str, np.ndarray]

_KEYS = ("x_train", "y_train", "x_test", "y_test")
_MOST_SHOWN = 12  # labels in a message
_TORCHVISION = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "cifar10": "CIFAR10"}

IMAGE_SOURCES = ("digits", *_TORCHVISION)


@dataclass(frozen=True, eq=False)
class Split:
    """Images in [0, 1] and labels, to train on and to test on.

    Attributes:
        x_train: Training images ``[n, channels, height, width]``.
        y_train: Training labels ``[n]``.
        x_test: Test images, of the same shape; none, ``[0, ...]``, if there is no test set.
        y_test: Test labels.
        n_classes: Number of classes in the whole data set, of which a subset may lack some.
        name: Name of the source.
        classes: Names of the classes, if they have names.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    n_classes: int
    name: str
    classes: tuple[str, ...] = ()

    @property
    def has_test(self) -> bool:
        """Whether there are images to test on."""
        return len(self.x_test) > 0

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
    size: int | None = None,
    test_share: float | None = None,
    seed: int = 0,
) -> Split:
    """Read images and labels, or random subsets of them.

    Args:
        source: "digits" (scikit-learn's 1,797 images of 8 x 8 pixels, a fixed third of them to test
            on), "mnist", "fashion-mnist" or "cifar10" (torchvision's); or the path of an .npz file
            with arrays x_train, y_train and, to test on, x_test, y_test: images ``[n, h, w]``,
            ``[n, h, w, c]`` or ``[n, c, h, w]``, of uint8, or floating point in [0, 1], and labels
            0, 1, 2, ...; or a folder with one subfolder of images per class, as for torchvision's
            ImageFolder, or with two such folders, train and test.
        root: Directory of torchvision's data sets, or of archives of that name, such as
            ``fashion_mnist.npz``.
        download: Whether to fetch a data set of torchvision that is not there.
        n_train: Size of a random subset of the training data; None is all. Smaller subsets are
            parts of larger ones.
        n_test: Size of a random subset of the test data; None is all.
        size: Height and width of all images, of which the middle square is resized; None leaves
            them as they are.
        test_share: Share of the images that is set aside to test on, if the data have no test set,
            the same for every seed; None sets none aside.
        seed: Seed of the subsets; it decides nothing else.

    Raises:
        FileNotFoundError: If the data are not there.
        ValueError: If the source is unknown, arrays or files are not images and labels, or a subset
            is larger than the data.
    """
    if size is not None and size < 1:
        raise ValueError(f"size must be positive, got {size}")
    arrays, name, classes = _read(source, Path(root), download)
    _check_lengths(arrays, name)
    if test_share is not None:
        arrays = _with_test_set(arrays, test_share, name)
    n_classes = 1 + max(int(arrays[key].max()) for key in arrays if key.startswith("y"))
    arrays = _some(arrays, "train", n_train, seed, name)
    arrays = _some(arrays, "test", n_test, seed, name)
    x = _read_files(arrays, size) if classes else _images(arrays, name, size)
    y = {key: arrays.get(key, np.empty(0, np.int64)) for key in ("y_train", "y_test")}
    return Split(
        x["x_train"],
        torch.from_numpy(y["y_train"].astype(np.int64)),
        x.get("x_test", x["x_train"][:0]),
        torch.from_numpy(y["y_test"].astype(np.int64)),
        n_classes,
        name,
        classes,
    )


def _read(source: str | Path, root: Path, download: bool) -> tuple[Arrays, str, tuple[str, ...]]:
    """Return the arrays of a source as they are stored, its name, and names of its classes.

    Of a folder, names of files stand for the images.
    """
    path = Path(source)
    if path.suffix == ".npz":
        arrays = _read_npz(path)
        _check_npz_labels(arrays, path.stem)
        return arrays, path.stem, ()
    name = str(source).lower().replace("_", "-")
    if name == "digits":
        return _read_digits(), name, ()
    if name in _TORCHVISION:
        return _read_torchvision(name, root, download), name, ()
    if path.is_dir():
        arrays, classes = list_folder(path)
        return arrays, path.resolve().name, classes
    raise ValueError(
        f"unknown source {str(source)!r}; choose from {', '.join(IMAGE_SOURCES)}, "
        "or give the path of an .npz file or of a folder with one subfolder per class"
    )


def _read_npz(path: Path) -> Arrays:
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {path}; it should hold the arrays {', '.join(_KEYS[:2])} and, to "
            f"test on, {', '.join(_KEYS[2:])}"
        )
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not an archive as numpy.savez writes it")
    with np.load(path, allow_pickle=False) as archive:
        wanted = [key for key in _KEYS if key in archive.files]
        missing = [key for key in _KEYS if key not in archive.files]
        if missing not in ([], ["x_test", "y_test"]):  # a test set may be left out
            if set(_KEYS[2:]) <= set(missing):
                missing = missing[:-2]
            found = ", ".join(archive.files) or "nothing"
            raise ValueError(
                f"{path} lacks {', '.join(missing)}; it needs {', '.join(_KEYS[:2])}, to test on "
                f"also {', '.join(_KEYS[2:])}, and has {found}"
            )
        return {key: _read_array(archive, key, path) for key in wanted}


def _read_array(archive: Any, key: str, path: Path) -> np.ndarray:
    try:
        array: np.ndarray = archive[key]
    except MemoryError as error:
        raise ValueError(
            f"{path}: {key} does not fit into memory, or the file is damaged: {error}"
        ) from error
    except Exception as error:  # numpy and zipfile raise many kinds
        raise ValueError(
            f"{path}: {key} is not a plain array of numbers, as it is damaged or holds pickled "
            f"objects: {error}"
        ) from error
    return array


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
    archive = root / f"{name.replace('-', '_')}.npz"
    if archive.exists():
        return _read_npz(archive)
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
                f"fetch it, another root, or {archive.name} in it"
            ) from error
        arrays[f"x_{part}"] = np.asarray(data.data)
        arrays[f"y_{part}"] = np.asarray(data.targets)
    return arrays


def _check_lengths(arrays: Arrays, name: str) -> None:
    """Raise unless labels are non-negative integers, and every image has one."""
    for x, y in (("x_train", "y_train"), ("x_test", "y_test")):
        if x not in arrays:
            continue
        if not arrays[x].size:
            shape = list(arrays[x].shape)
            raise ValueError(f"{name}: {x} is empty: it has no images, or no pixels, shape {shape}")
        if not arrays[x].ndim:
            raise ValueError(f"{name}: {x} must be images [n, ...], got a number")
        _check_labels(arrays[y], f"{name}: {y}")
        if len(arrays[x]) != len(arrays[y]):
            raise ValueError(
                f"{name}: {x} has {len(arrays[x])} images, but {y} has {len(arrays[y])} labels"
            )


def _check_labels(array: np.ndarray, what: str) -> None:
    """Raise unless labels are non-negative integers ``[n]``."""
    if not array.size:
        raise ValueError(f"{what} is empty")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{what} must be [n], of integers from 0 on, "
            f"got shape {list(array.shape)} of {array.dtype}"
        )
    if array.min() < 0:
        raise ValueError(f"{what} must be integers from 0 on, got integers from {array.min()} on")


def _check_npz_labels(arrays: Arrays, name: str) -> None:
    """Raise unless labels of a file are 0, 1, 2, ... without gaps, at least two of them."""
    for key in ("y_train", "y_test"):
        if key in arrays:
            _check_labels(arrays[key], f"{name}: {key}")
    labels = np.unique(arrays["y_train"])
    if len(labels) != labels[-1] + 1:
        raise ValueError(
            f"{name}: y_train has the labels {_listed(labels)}, but {len(labels)} classes are "
            f"labelled 0 to {len(labels) - 1}, without gaps; map them by numpy: "
            "labels = unique(y_train), y_train = searchsorted(labels, y_train), and y_test likewise"
        )
    if len(labels) == 1:
        raise ValueError(f"{name}: y_train has one class, so that there is nothing to tell apart")
    unknown = np.setdiff1d(arrays.get("y_test", labels), labels)
    if len(unknown):
        raise ValueError(f"{name}: y_test has labels that y_train has not: {_listed(unknown)}")


def _listed(labels: np.ndarray) -> str:
    shown = ", ".join(str(label) for label in labels[:_MOST_SHOWN])
    return f"{shown}, ..." if len(labels) > _MOST_SHOWN else shown


def _checked_images(array: np.ndarray, what: str) -> np.ndarray:
    """Return images as ``[n, c, h, w]``; raise unless they are uint8 or in [0, 1]."""
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            bad = [i for i, image in enumerate(array) if not np.isfinite(image).all()]
            raise ValueError(
                f"{what} holds NaN or infinite values, first in image {bad[0]}; "
                f"leave such images out ({len(bad)}), or fill them in"
            )
        if array.min() < 0 or array.max() > 1:
            raise ValueError(
                f"{what} goes from {array.min():.4g} to {array.max():.4g}, but floating-point "
                "images must be in [0, 1]; rescale it, clip it (interpolation may overshoot), or "
                "store uint8"
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


def _with_test_set(arrays: Arrays, share: float, name: str) -> Arrays:
    """Return arrays with a share of the training images set aside, always the same ones."""
    if "x_test" in arrays:
        raise ValueError(
            f"{name} has a test set of its own, of {len(arrays['y_test'])} images; leave out "
            "--test-share (test_share)"
        )
    n = len(arrays["y_train"])
    n_test = round(share * n)
    if not 0 < share < 1 or not 0 < n_test < n:
        raise ValueError(
            f"test_share must be between 0 and 1, and leave images to train and to test on, got "
            f"{share} of {n} images"
        )
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).numpy()
    chosen = {"test": np.sort(order[:n_test]), "train": np.sort(order[n_test:])}
    return {f"{a}_{part}": arrays[f"{a}_train"][i] for part, i in chosen.items() for a in "xy"}


def _some(arrays: Arrays, part: str, size: int | None, seed: int, name: str) -> Arrays:
    """Return arrays with a random subset of one part."""
    if size is None:
        return arrays
    x, y = f"x_{part}", f"y_{part}"
    if x not in arrays:
        raise ValueError(
            f"{name} has no test images of which to take {size}; set some aside by "
            "--test-share 0.2 (test_share=0.2)"
        )
    n = len(arrays[y])
    if not 0 < size <= n:
        raise ValueError(
            f"{name}: n_{part} must be between 1 and {n}, all that there are, got {size}"
        )
    chosen = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:size].numpy()
    return arrays | {x: arrays[x][chosen], y: arrays[y][chosen]}


def _read_files(arrays: Arrays, size: int | None) -> dict[str, Tensor]:
    """Return the images of all parts, by key, from names of files."""
    keys = [key for key in ("x_train", "x_test") if key in arrays]
    images = read_images([str(path) for key in keys for path in arrays[key]], size)
    parts = np.split(images, np.cumsum([len(arrays[key]) for key in keys])[:-1])
    return {key: _to_images(part) for key, part in zip(keys, parts, strict=True)}


def _images(arrays: Arrays, name: str, size: int | None) -> dict[str, Tensor]:
    """Return the images of all parts, by key, from arrays."""
    keys = [key for key in ("x_train", "x_test") if key in arrays]
    found: dict[str, Tensor] = {}
    for key in keys:
        found[key] = _to_images(_checked_images(arrays[key], f"{name}: {key}"))
    shapes = [list(images.shape[1:]) for images in found.values()]
    if shapes[0] != shapes[-1]:
        raise ValueError(
            f"{name}: images of x_train and x_test differ in shape, {shapes[0]} and {shapes[-1]}"
        )
    if size is not None:
        found = {key: fitted(images, size) for key, images in found.items()}
    return found


def _to_images(array: np.ndarray) -> Tensor:
    dtype = torch.get_default_dtype()
    if array.dtype == np.uint8:
        return torch.from_numpy(np.ascontiguousarray(array)).to(dtype) / 255
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64)).to(dtype)
