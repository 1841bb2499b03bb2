"""Data sets are read as they are stored, and bad files are explained."""

import io
import struct
import sys
import zipfile

import numpy as np
import pytest
import torch

from laplace_invariance.datasets import load


def rows(images):
    return {tuple(row) for row in images.flatten(1).tolist()}


def test_digits_are_split_once_and_for_all():
    first, second = load("digits"), load("digits", seed=3)
    assert first.x_train.shape == (1198, 1, 8, 8)
    assert first.x_test.shape == (599, 1, 8, 8)
    assert first.x_train.min() == 0
    assert first.x_train.max() == 1
    assert first.x_train.dtype == torch.get_default_dtype()
    assert first.y_train.dtype == first.y_test.dtype == torch.int64
    assert (first.in_shape, first.n_classes, first.name) == ((1, 8, 8), 10, "digits")
    assert not rows(first.x_train) & rows(first.x_test)
    for key in ("x_train", "y_train", "x_test", "y_test"):
        assert torch.equal(getattr(first, key), getattr(second, key))


def test_digits_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        load("digits")


def arrays(n_train=6, n_test=4, shape=(5, 7), **changes):
    """Images whose every pixel is their number, and labels that are it too."""
    found = {}
    for part, n in (("train", n_train), ("test", n_test)):
        numbers = np.arange(n, dtype=np.uint8)
        found[f"x_{part}"] = np.broadcast_to(numbers.reshape(-1, *[1] * len(shape)), (n, *shape))
        found[f"y_{part}"] = numbers
    return found | changes


def saved(directory, found):
    np.savez(directory / "mine.npz", **found)
    return directory / "mine.npz"


@pytest.mark.parametrize(
    ("shape", "in_shape"),
    [((5, 7), (1, 5, 7)), ((5, 7, 1), (1, 5, 7)), ((5, 7, 3), (3, 5, 7)), ((3, 5, 7), (3, 5, 7))],
    ids=["no channels", "one channel last", "channels last", "channels second"],
)
def test_npz_files_of_all_layouts(tmp_path, shape, in_shape):
    split = load(saved(tmp_path, arrays(shape=shape)))
    assert split.in_shape == in_shape
    assert (split.name, split.n_classes) == ("mine", 6)
    assert split.y_test.tolist() == [0, 1, 2, 3]
    assert split.y_test.dtype == torch.int64
    torch.testing.assert_close(
        split.x_train, (torch.arange(6) / 255).view(6, 1, 1, 1).expand(6, *in_shape)
    )


def test_channels_are_transposed_and_not_reshaped(tmp_path):
    images = np.random.default_rng(0).random((6, 5, 7, 3), dtype=np.float32)
    split = load(str(saved(tmp_path, arrays(shape=(5, 7, 3), x_train=images))))
    torch.testing.assert_close(split.x_train[:, 1], torch.tensor(images[..., 1]).double())


def test_subsets_are_decided_by_the_seed(tmp_path):
    path = saved(tmp_path, arrays(200, 100))
    first, again, other = (load(path, n_train=20, n_test=10, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.y_train, again.y_train)
    assert not torch.equal(first.y_train, other.y_train)
    assert len(set(first.y_train.tolist())) == 20
    assert len(set(first.y_test.tolist())) == 10
    torch.testing.assert_close(
        first.x_train[:, 0, 0, 0], first.y_train / 255
    )  # images keep their labels
    assert first.n_classes == 200
    assert torch.equal(load(path, n_train=30).y_train[:20], first.y_train)
    assert len(load(path, n_train=30).y_test) == 100


BAD_ARRAYS = {
    "fewer labels": (
        {"y_test": np.zeros(3, np.uint8)},
        "x_test has 4 images, but y_test has 3 labels",
    ),
    "nan": ({"x_train": np.full((6, 5, 7), np.nan)}, "x_train holds NaN"),
    "floats to 255": (
        {"x_train": np.full((6, 5, 7), 255.0)},
        r"x_train goes from 255 to 255, .*in \[0, 1\]",
    ),
    "int32": ({"x_train": np.zeros((6, 5, 7), np.int32)}, "x_train must be uint8.*int32"),
    "rows": (
        {"x_train": np.zeros((6, 35), np.uint8)},
        r"x_train must be \[n, h, w\].*got shape \[6, 35\]",
    ),
    "four channels": (
        {"x_train": np.zeros((6, 5, 7, 4), np.uint8)},
        r"one or three channels, got shape \[6, 5, 7, 4\]",
    ),
    "either axis": ({"x_train": np.zeros((6, 3, 7, 3), np.uint8)}, r"got shape \[6, 3, 7, 3\]"),
    "another shape": (
        {"x_train": np.zeros((6, 5, 8), np.uint8)},
        r"differ in shape, \[1, 5, 8\] and \[1, 5, 7\]",
    ),
    "no images": ({"x_train": np.zeros((0, 5, 7), np.uint8)}, "x_train is empty"),
    "no labels": ({"y_train": np.zeros(0, np.uint8)}, "y_train is empty"),
    "labels in a column": (
        {"y_train": np.zeros((6, 1), np.uint8)},
        r"y_train must be \[n\].*got shape \[6, 1\]",
    ),
    "labels of floats": ({"y_train": np.zeros(6)}, "y_train .*float64"),
    "labels from 1": (
        {"y_train": np.array([1, 2, 3, 1, 2, 3])},
        "y_train has the labels 1, 2, 3, but 3 classes are labelled 0 to 2, .*searchsorted",
    ),
    "labels with a gap": (
        {"y_train": np.array([0, 1, 3, 0, 1, 3])},
        "y_train has the labels 0, 1, 3, but 3 classes",
    ),
    "one class": ({"y_train": np.zeros(6, np.uint8)}, "y_train has one class"),
    "other test labels": (
        {"y_test": np.array([0, 1, 8, 9])},
        "y_test has labels that y_train has not: 8, 9",
    ),
    "names of files": ({"x_train": np.array(["a"] * 6)}, "x_train must be uint8.*got <U1"),
    "negative labels": ({"y_train": np.full(6, -1)}, "y_train .*from -1 on"),
    "objects": ({"y_train": np.array([None] * 6)}, "plain array"),
    "no pixels": ({"x_train": np.zeros((6, 0, 0))}, r"no pixels, shape \[6, 0, 0\]"),
    "a number": ({"x_train": np.array(3.0)}, "x_train must be images .* got a number"),
    "one label": ({"y_train": np.array(3)}, r"y_train must be \[n\].*got shape \[\]"),
    "words": ({"y_train": np.array(["a"] * 6)}, "y_train must be .*, of integers .* of <U1"),
    "a large label": ({"y_train": np.array([0, 1, 2_000_000_000] * 2)}, "3 classes are labelled"),
}


@pytest.mark.parametrize(("changes", "match"), BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_bad_arrays_are_explained(tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        load(saved(tmp_path, arrays(**changes)))


@pytest.mark.parametrize(
    ("shape", "match"),
    [((80_000_000_000_000,), "does not fit into memory, or"), ((6, 5, 7), "is not a plain array")],
    ids=["huge", "short"],
)
def test_arrays_that_are_not_in_the_file_are_refused(tmp_path, shape, match):
    """By their header, they have numbers that do not follow."""
    path = saved(tmp_path, arrays())
    header = io.BytesIO()
    content = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, content)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    entries["x_train.npy"] = header.getvalue()
    with zipfile.ZipFile(path, "w") as archive:
        for name, entry in entries.items():
            archive.writestr(name, entry)
    with pytest.raises(ValueError, match=f"x_train {match}"):
        load(path)


def test_bad_files_and_sources_are_explained(tmp_path):
    found = arrays()
    del found["y_test"]
    with pytest.raises(
        ValueError, match=r"lacks y_test; it needs x_train, .*, and has x_train, y_train, x_test"
    ):
        load(saved(tmp_path, found))
    with pytest.raises(FileNotFoundError, match=r"no file .*absent\.npz"):
        load(tmp_path / "absent.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(ValueError, match="not an archive"):
        load(tmp_path / "text.npz")
    with pytest.raises(
        ValueError,
        match="unknown source 'imagenet'; choose from digits, mnist, fashion-mnist, cifar10",
    ):
        load("imagenet")


@pytest.mark.parametrize("size", [0, 7])
def test_subsets_are_no_larger_than_the_set(tmp_path, size):
    with pytest.raises(ValueError, match=f"n_train must be between 1 and 6.*got {size}"):
        load(saved(tmp_path, arrays()), n_train=size)


@pytest.mark.parametrize("source", ["mnist", "fashion_mnist", "cifar10"])
def test_torchvision_sets_are_not_fetched_unasked(tmp_path, source):
    with pytest.raises(FileNotFoundError, match=r"download=True \(--download\).*npz"):
        load(source, root=tmp_path)


def test_mnist_is_read_from_the_files_of_torchvision(tmp_path):
    found = arrays(shape=(28, 28))
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part, stem in (("train", "train"), ("test", "t10k")):
        x, y = found[f"x_{part}"], found[f"y_{part}"]
        (folder / f"{stem}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 0x803, len(x), 28, 28) + x.tobytes()
        )
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, len(y)) + y.tobytes()
        )
    split = load("mnist", root=tmp_path)
    assert (split.in_shape, split.name) == ((1, 28, 28), "mnist")
    assert split.y_train.tolist() == list(range(6))
    torch.testing.assert_close(split.x_test[:, 0, 3, 4], torch.arange(4) / 255)


def test_cifar_is_read_with_channels_second(monkeypatch):
    import torchvision

    class Fake:
        def __init__(self, root, train, download):
            self.data = np.full((2 + train, 32, 32, 3), 51, np.uint8)
            self.targets = [1] * (2 + train)

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Fake)
    split = load("cifar10")
    assert split.x_train.shape == (3, 3, 32, 32)
    assert split.y_test.tolist() == [1, 1]
    torch.testing.assert_close(split.x_train, torch.full((3, 3, 32, 32), 0.2))
