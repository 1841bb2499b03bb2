"""Data sets: what was done to them is what they say, and bad files are explained."""

import math
import struct
import sys

import numpy as np
import pytest
import torch

from laplace_invariance import AffineImage, datasets
from laplace_invariance.augmentations import Colour, Sequence
from laplace_invariance.augmentations.affine import warp_images
from laplace_invariance.datasets import load, transformed, true_ranges

HALF_TURN = torch.tensor([[-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# Images, moved.


def test_a_half_turn_flips_both_axes():
    images = torch.rand(3, 2, 5, 7)
    torch.testing.assert_close(datasets.warp(images, HALF_TURN.expand(3, 2, 3)), images.flip(2, 3))


def test_a_translation_reads_from_beside_and_has_zeros_outside():
    images = torch.rand(2, 1, 4, 5)
    one_pixel = torch.tensor([[1.0, 0.0, 2 / 4], [0.0, 1.0, 0.0]]).expand(2, 2, 3)
    expected = torch.cat([images[..., 1:], torch.zeros(2, 1, 4, 1)], dim=-1)
    torch.testing.assert_close(datasets.warp(images, one_pixel), expected)


def test_warp_needs_a_map_per_image():
    with pytest.raises(
        ValueError, match=r"2 images need maps of shape \[2, 2, 3\], got \[1, 2, 3\]"
    ):
        datasets.warp(torch.rand(2, 1, 4, 4), torch.zeros(1, 2, 3))


def test_warping_in_parts_changes_nothing(monkeypatch):
    images, maps = torch.rand(7, 1, 4, 5), torch.randn(7, 2, 3)
    whole = datasets.warp(images, maps)
    monkeypatch.setattr(datasets.images, "_WARPED_AT_ONCE", 3)
    torch.testing.assert_close(datasets.warp(images, maps), whole)


def test_images_are_moved_as_the_augmentation_moves_them():
    """What data generation calls a range is what AffineImage calls it."""
    images, augmentation = torch.rand(4, 1, 9, 9), AffineImage(init=[0.2, 0.3, 0.5, 0.0, 0.0, 0.0])
    matrices = augmentation.matrices(augmentation.sample(4, 1))
    expected = warp_images(images, matrices[..., :2, :]).squeeze(1)
    torch.testing.assert_close(datasets.warp(images, matrices[:, 0, :2]), expected)
    assert list(true_ranges("original")) == list(augmentation.names)


@pytest.fixture
def maps_of(monkeypatch):
    """Return what transformed() would do to 4,000 images."""
    monkeypatch.setattr(datasets.images, "warp", lambda images, maps: maps)
    return lambda kind: transformed(torch.rand(4000, 1, 2, 2), kind, seeded())


def fills(values, limit):
    """Tell whether values are uniform within plus or minus the limit, as far as moments and extremes tell."""
    return (
        0.99 * limit < values.max() <= limit
        and -limit <= values.min() < -0.99 * limit
        and abs(values.mean()) < 0.05 * limit
        and abs(values.std() - limit / 3**0.5) < 0.03 * limit
    )


@pytest.mark.parametrize(
    ("kind", "limit"), [("fully_rotated", math.pi), ("partially-rotated", math.pi / 2)]
)
def test_rotations(maps_of, kind, limit):
    maps = maps_of(kind)
    angles = torch.atan2(maps[:, 1, 0], maps[:, 0, 0])
    assert fills(angles, limit)
    cos, sin, zeros = angles.cos(), angles.sin(), torch.zeros_like(angles)
    torch.testing.assert_close(
        maps.flatten(1), torch.stack([cos, -sin, zeros, sin, cos, zeros], -1)
    )


def test_translations(maps_of):
    maps = maps_of("translated")
    assert fills(maps[:, 0, 2], 4 / 7)
    assert fills(maps[:, 1, 2], 4 / 7)
    assert abs(torch.corrcoef(maps[:, :, 2].T)[0, 1]) < 0.05
    torch.testing.assert_close(maps[:, :, :2], torch.eye(2).expand(4000, 2, 2))


def test_scalings_are_of_both_axes_together(maps_of):
    maps = maps_of("scaled")
    assert fills(maps[:, 0, 0].log(), math.log(2))
    torch.testing.assert_close(maps, maps[:, :1, :1] * torch.eye(2, 3))


def test_translations_are_of_eight_pixels_at_28_by_28():
    images = torch.zeros(500, 1, 29, 29)  # of which half is 14 pixels
    images[:, :, 14, 14] = 1
    moved = transformed(images, "translated", seeded())
    torch.testing.assert_close(moved.sum((1, 2, 3)), torch.ones(500))
    steps = torch.arange(29.0) - 14
    for axis in (2, 3):
        centres = (moved.sum((1, 5 - axis)) * steps).sum(-1)
        assert fills(centres, 8.0)


def test_original_images_stay():
    images = torch.rand(2, 1, 4, 4)
    assert transformed(images, "original") is images


def test_draws_are_repeated_by_the_generator_only():
    images = torch.rand(3, 1, 6, 6)
    first, second, other = (transformed(images, "fully_rotated", seeded(s)) for s in (1, 1, 2))
    torch.testing.assert_close(first, second)
    assert not torch.allclose(first, other)
    same = transformed(images[:1].expand(3, -1, -1, -1), "fully_rotated", seeded())
    assert not torch.allclose(same[0], same[1])  # each image has its own draw


@pytest.mark.parametrize(
    ("kind", "moved"),
    [
        ("fully_rotated", {"rotation": math.pi}),
        ("partially_rotated", {"rotation": math.pi / 2}),
        ("translated", {"x_translation": 4 / 7, "y_translation": 4 / 7}),
        ("scaled", {"x_scale": math.log(2), "y_scale": math.log(2)}),
        ("original", {}),
    ],
)
def test_true_ranges(kind, moved):
    assert kind in datasets.KINDS
    assert true_ranges(kind) == dict.fromkeys(AffineImage().names, 0.0) | moved
    assert true_ranges(kind.replace("_", "-")) == true_ranges(kind)


@pytest.mark.parametrize(
    ("images", "kind", "match"),
    [
        (
            torch.zeros(2, 1, 4, 4),
            "sheared",
            "unknown kind 'sheared'; choose from fully_rotated, .*original",
        ),
        (torch.zeros(2, 4, 4), "scaled", r"got shape \[2, 4, 4\]"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), "scaled", "uint8"),
        (torch.full((2, 1, 4, 4), -1.0), "scaled", "values from -1 to -1.*Standardise"),
        (torch.full((2, 1, 4, 4), math.nan), "scaled", "nan"),
    ],
)
def test_transformed_explains_bad_arguments(images, kind, match):
    with pytest.raises(ValueError, match=match):
        transformed(images, kind)


def test_a_third_of_a_turn_of_hue_permutes_the_channels(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **kwargs: torch.ones(shape))
    images = torch.linspace(0, 1, 2 * 3 * 4 * 5).view(2, 3, 4, 5)
    torch.testing.assert_close(
        datasets.hue_rotated(images, 2 * math.pi / 3), images.roll(1, dims=1)
    )


def test_hue_is_turned_as_the_augmentation_turns_it(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **kwargs: torch.ones(shape))
    images = torch.linspace(0, 1, 2 * 3 * 4 * 5).view(2, 3, 4, 5)
    expected = Colour(init={"hue": 0.7}).transform(images, torch.ones(1, 1, 3)).squeeze(1)
    torch.testing.assert_close(datasets.hue_rotated(images, 0.7), expected)


def test_hue_keeps_grey_and_fills_its_range():
    red = torch.zeros(2000, 3, 1, 1)
    red[:, 0] = 1
    turned = datasets.hue_rotated(red, 1.0, seeded()).flatten(1)
    torch.testing.assert_close(turned.sum(1), torch.ones(2000))
    torch.testing.assert_close(turned.norm(dim=1), torch.ones(2000))
    angles = torch.atan2(
        3**0.5 * (turned[:, 1] - turned[:, 2]), 2 * turned[:, 0] - turned[:, 1] - turned[:, 2]
    )
    assert fills(angles, 1.0)
    grey = torch.rand(2, 1, 4, 5).expand(-1, 3, -1, -1)
    torch.testing.assert_close(datasets.hue_rotated(grey, math.pi), grey)


@pytest.mark.parametrize(
    ("channels", "angle", "match"), [(1, 1.0, "RGB"), (3, 4.0, "between 0 and pi, got 4.0")]
)
def test_hue_explains_bad_arguments(channels, angle, match):
    with pytest.raises(ValueError, match=match):
        datasets.hue_rotated(torch.rand(2, channels, 4, 4), angle)


# Signals and points.


def test_circular_waves_are_labelled_by_how_far_they_are_shifted():
    x, y = datasets.waves(3000, 0.25, n_classes=4, length=16, noise=0.0).tensors
    assert x.shape == (3000, 1, 16)
    assert y.dtype == torch.int64
    assert set(y.tolist()) == {0, 1, 2, 3}
    assert (y == 0).double().mean().item() == pytest.approx(0.75, abs=0.03)


def test_circular_shifts_roll():
    def shifted(by):
        return datasets.waves(
            6, 0.6, length=16, noise=0.0, shifts=torch.full((6,), by), generator=seeded()
        ).tensors

    (still, labels), (moved, same), (_, far) = shifted(0.0), shifted(0.5), shifted(0.75)
    torch.testing.assert_close(moved, still.roll(4, dims=-1))  # half of half the length
    assert labels.min() > 0
    assert torch.equal(same, labels)
    assert far.eq(0).all()
    torch.testing.assert_close(still.std(-1, correction=0), torch.ones(6, 1))


@pytest.mark.parametrize("padding", ["circular", "zeros"])
def test_waves_are_shifted_as_the_augmentation_shifts_them(padding):
    still, moved = (
        datasets.waves(
            5,
            length=16,
            noise=0.0,
            padding=padding,
            shifts=torch.full((5,), by),
            generator=seeded(),
        )[:][0]
        for by in (0.0, 0.25)
    )
    augmentation = Sequence(init={"shift": 0.25}, padding=padding)
    torch.testing.assert_close(
        augmentation.transform(still, torch.tensor([[[-1.0, 0.0]]])).squeeze(1), moved
    )


def test_waves_with_zeros_are_cut_and_keep_their_label():
    def shifted(by):
        shifts = torch.full((6,), by)
        return datasets.waves(
            6, n_classes=3, length=16, noise=0.0, padding="zeros", shifts=shifts, generator=seeded()
        ).tensors

    (still, labels), (moved, same) = shifted(0.0), shifted(0.25)
    assert torch.equal(same, labels)
    torch.testing.assert_close(moved[..., 2:], still[..., :-2])
    torch.testing.assert_close(moved[..., :2], torch.zeros(6, 1, 2))
    assert still[..., [0, -1]].abs().max() < 0.3 < 1 < still.abs().max()
    _, many = datasets.waves(500, n_classes=3, padding="zeros").tensors
    assert set(many.tolist()) == {0, 1, 2}


def test_the_shapes_of_waves_have_a_seed_of_their_own():
    def still(generator_seed, shapes_seed):
        shifts = torch.zeros(50)
        x, y = datasets.waves(
            50, noise=0.0, shifts=shifts, shapes_seed=shapes_seed, generator=seeded(generator_seed)
        ).tensors
        return x[y == 1][0]

    torch.testing.assert_close(still(0, 0), still(1, 0))
    assert not torch.allclose(still(0, 0), still(0, 1))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_shift": 1.5}, "max_shift"),
        ({"padding": "reflect"}, "circular or zeros"),
        ({"n_classes": 1}, "n_classes"),
    ],
)
def test_waves_explain_bad_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        datasets.waves(5, **arguments)


def test_regression_targets_are_decided_by_the_radius():
    x, y = datasets.rotation_regression(400, 0.0).tensors
    assert x.shape == (400, 2)
    torch.testing.assert_close(y, (2 * (x**2).sum(1, keepdim=True).sqrt()).cos())
    x, y = datasets.rotation_regression(4000, 0.2).tensors
    assert (y - (2 * x.norm(dim=1, keepdim=True)).cos()).std().item() == pytest.approx(
        0.2, abs=0.01
    )


# Images, read.


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


def test_channels_are_moved_and_not_reshaped(tmp_path):
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


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"y_test": np.zeros(3, np.uint8)}, "x_test has 4 images, but y_test has 3 labels"),
        ({"x_train": np.full((6, 5, 7), np.nan)}, "x_train holds NaN"),
        ({"x_train": np.full((6, 5, 7), 255.0)}, r"x_train goes from 255 to 255, .*in \[0, 1\]"),
        ({"x_train": np.zeros((6, 5, 7), np.int32)}, "x_train must be uint8.*int32"),
        (
            {"x_train": np.zeros((6, 35), np.uint8)},
            r"x_train must be \[n, h, w\].*got shape \[6, 35\]",
        ),
        (
            {"x_train": np.zeros((6, 5, 7, 4), np.uint8)},
            r"one or three channels, got shape \[6, 5, 7, 4\]",
        ),
        ({"x_train": np.zeros((6, 3, 7, 3), np.uint8)}, r"got shape \[6, 3, 7, 3\]"),
        (
            {"x_train": np.zeros((6, 5, 8), np.uint8)},
            r"differ in shape, \[1, 5, 8\] and \[1, 5, 7\]",
        ),
        ({"x_train": np.zeros((0, 5, 7), np.uint8)}, "x_train is empty"),
        ({"y_train": np.zeros((6, 1), np.uint8)}, r"y_train must be \[n\].*got shape \[6, 1\]"),
        ({"y_train": np.zeros(6)}, "y_train .*float64"),
        ({"y_train": np.full(6, -1)}, "y_train .*from -1 on"),
        ({"y_train": np.array([None] * 6)}, "plain arrays"),
    ],
)
def test_bad_arrays_are_explained(tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        load(saved(tmp_path, arrays(**changes)))


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
