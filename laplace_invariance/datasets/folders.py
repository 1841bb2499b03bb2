"""Folders of images: one subfolder per class, as torchvision's ``ImageFolder`` has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

__all__ = ["SUFFIXES", "list_folder", "read_images"]

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
GREY, COLOUR = ("1", "L", "LA"), ("RGB", "RGBA", "P", "PA", "CMYK", "YCbCr")


def list_folder(folder: Path) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Return the files of a folder of images with their labels, and the names of the classes.

    Classes are the subfolders in alphabetical order; files in folders inside a subfolder are of its
    class. If there are subfolders ``train`` and ``test``, each of them has the subfolders of the
    classes. Hidden files, and those that are no images by their names, are ignored.

    Args:
        folder: The folder.

    Returns:
        Arrays ``x_train`` with names of files and ``y_train`` with labels, the same for ``test`` if
        there is one; and the classes.

    Raises:
        ValueError: If there are fewer than two classes, or a class has no image.
    """
    parts = {"train": folder}
    names = _subfolders(folder)
    if "train" in names and "test" in names:
        parts = {"train": folder / "train", "test": folder / "test"}
        names = _subfolders(folder / "train")
    elif "train" in names:
        raise ValueError(
            f"{folder} has a subfolder train, but no subfolder test; give {folder / 'train'}, or "
            "call the folder of test images test"
        )
    _check_classes(parts["train"], names)
    arrays: dict[str, np.ndarray] = {}
    for part, place in parts.items():
        unknown = [name for name in _subfolders(place) if name not in names]
        if unknown:
            raise ValueError(
                f"{place} has classes that {parts['train']} has not: {', '.join(unknown)}"
            )
        files = [_files(place / name) for name in names]
        empty = [name for name, found in zip(names, files, strict=True) if not found]
        if empty and (part == "train" or len(empty) == len(names)):
            raise ValueError(
                f"{place} has no images in {', '.join(empty)}; images end in {', '.join(SUFFIXES)}"
            )
        arrays[f"x_{part}"] = np.array([str(path) for found in files for path in found])
        arrays[f"y_{part}"] = np.repeat(np.arange(len(names)), [len(found) for found in files])
    return arrays, tuple(names)


def _subfolders(folder: Path) -> list[str]:
    found = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted(name for name in found if not name.startswith("."))


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES]
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def _check_classes(folder: Path, names: Sequence[str]) -> None:
    if not names:
        found = "is empty"
        if any(folder.iterdir()):
            found = "has no subfolders"
        raise ValueError(
            f"{folder} {found}; it should have one subfolder of images per class, such as "
            f"{folder / 'cats'} and {folder / 'dogs'}"
        )
    if len(names) == 1:
        raise ValueError(
            f"{folder} has one class, {names[0]!r}, so that there is nothing to tell apart; it "
            "should have one subfolder of images for each of two classes or more"
        )


def read_images(paths: Sequence[str], size: int | None = None) -> np.ndarray:
    """Read images, all grey or all in colour, and all of one size.

    What is transparent becomes black.

    Args:
        paths: Names of files.
        size: Height and width of the result: the middle square of each image, resized; None leaves
            images as they are.

    Returns:
        Images ``[n, 1 or 3, height, width]`` of uint8.

    Raises:
        ValueError: If a file is not a whole image, or images differ in kind or size.
    """
    images: list[np.ndarray] = []
    first: dict[tuple[int, ...], str] = {}
    for path in paths:
        images.append(_read(path, size))
        first.setdefault(images[-1].shape, path)
    _check_alike(first)
    return np.stack(images)


def _read(path: str, size: int | None) -> np.ndarray:
    """Return one image ``[channels, height, width]``."""
    try:
        with Image.open(path) as file:
            file.load()
            image = _plain(file, path)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        # Pillow reports damaged PNG files by SyntaxError
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path} is not an image that can be read, or only a part of one: {reason}; replace or "
            "remove it"
        ) from error
    if size is not None:
        image = _middle(image).resize((size, size), Image.Resampling.BILINEAR)
    array = np.asarray(image)
    if array.ndim == 2:
        return array[None]
    return np.moveaxis(array, -1, 0)


def _middle(image: Image.Image) -> Image.Image:
    """Return the middle square of an image."""
    width, height = image.size
    side = min(width, height)
    left, above = (width - side) // 2, (height - side) // 2
    return image.crop((left, above, left + side, above + side))


def _plain(image: Image.Image, path: str) -> Image.Image:
    """Return an image as grey or RGB, on black where it is transparent."""
    if image.mode not in (*GREY, *COLOUR):
        raise ValueError(
            f"{path} is of mode {image.mode}, which is neither grey nor colour of eight bits; "
            "convert it with Pillow's image.convert('L') or convert('RGB')"
        )
    mode = "L" if image.mode in GREY else "RGB"
    if not image.has_transparency_data:
        return image.convert(mode)
    layered = image.convert("RGBA")
    black = Image.new("RGBA", image.size, "black")
    return Image.alpha_composite(black, layered).convert(mode)


def _check_alike(first: dict[tuple[int, ...], str]) -> None:
    """Raise if images are of several shapes, of each of which an example is given."""
    channels = {shape[0]: path for shape, path in first.items()}
    if len(channels) > 1:
        raise ValueError(
            f"grey and colour are mixed: {channels[1]} is grey and {channels[3]} is in colour; "
            "convert all with Pillow's image.convert('L') or convert('RGB')"
        )
    if len(first) > 1:
        found = [f"{path} is {shape[2]} x {shape[1]}" for shape, path in first.items()]
        smallest = min(min(shape[1:]) for shape in first)
        raise ValueError(
            f"images are of {len(first)} different sizes: {found[0]}, {found[1]}; choose one, such "
            f"as --size {smallest} (size={smallest}), to which the middle of each is resized"
        )
