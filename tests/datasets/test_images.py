"""Images are warped and recoloured as their kind says."""

import math

import pytest
import torch
from builders import seeded_generator

from laplace_invariance import AffineImage, datasets
from laplace_invariance.augmentations import Colour
from laplace_invariance.augmentations.affine import warp_images
from laplace_invariance.datasets import transformed, true_ranges
from laplace_invariance.datasets.images import sample_maps

HALF_TURN = torch.tensor([[-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])


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


def test_many_images_are_warped_in_parts():
    images, maps = torch.rand(4100, 1, 2, 3), torch.randn(4100, 2, 3)
    parts = [datasets.warp(images[part], maps[part]) for part in (slice(1000), slice(1000, None))]
    torch.testing.assert_close(datasets.warp(images, maps), torch.cat(parts))


def test_images_are_warped_as_the_augmentation_warps_them():
    """What data generation calls a range is what AffineImage calls it."""
    images, augmentation = torch.rand(4, 1, 9, 9), AffineImage(init=[0.2, 0.3, 0.5, 0.0, 0.0, 0.0])
    matrices = augmentation.matrices(augmentation.sample(4, 1))
    expected = warp_images(images, matrices[..., :2, :]).squeeze(1)
    torch.testing.assert_close(datasets.warp(images, matrices[:, 0, :2]), expected)
    assert list(true_ranges("original")) == list(augmentation.names)


def maps_of(kind):
    return sample_maps(torch.rand(4000, 1, 2, 2), kind, seeded_generator())


def fills(values, limit):
    """Return whether moments and extremes are those of a uniform distribution up to the limit."""
    return (
        0.99 * limit < values.max() <= limit
        and -limit <= values.min() < -0.99 * limit
        and abs(values.mean()) < 0.05 * limit
        and abs(values.std() - limit / 3**0.5) < 0.03 * limit
    )


@pytest.mark.parametrize(
    ("kind", "limit"), [("fully_rotated", math.pi), ("partially-rotated", math.pi / 2)]
)
def test_rotations(kind, limit):
    maps = maps_of(kind)
    angles = torch.atan2(maps[:, 1, 0], maps[:, 0, 0])
    assert fills(angles, limit)
    cos, sin, zeros = angles.cos(), angles.sin(), torch.zeros_like(angles)
    torch.testing.assert_close(
        maps.flatten(1), torch.stack([cos, -sin, zeros, sin, cos, zeros], -1)
    )


def test_translations():
    maps = maps_of("translated")
    limits = true_ranges("translated", (2, 2))
    assert fills(maps[:, 0, 2], limits["x_translation"])
    assert fills(maps[:, 1, 2], limits["y_translation"])
    assert abs(torch.corrcoef(maps[:, :, 2].T)[0, 1]) < 0.05
    torch.testing.assert_close(maps[:, :, :2], torch.eye(2).expand(4000, 2, 2))


def test_scalings_are_of_both_axes_together():
    maps = maps_of("scaled")
    assert fills(maps[:, 0, 0].log(), math.log(2))
    torch.testing.assert_close(maps, maps[:, :1, :1] * torch.eye(2, 3))


@pytest.mark.parametrize(("size", "pixels"), [(28, 8.0), (32, 8.0), (14, 4.0)])
def test_translations_are_of_eight_pixels_where_images_are_large(size, pixels):
    first = size // 2
    images = torch.zeros(500, 1, size, size)
    images[:, :, first, first] = 1
    translated = transformed(images, "translated", seeded_generator())
    steps = torch.arange(float(size)) - first
    for axis in (2, 3):
        centres = (translated.sum((1, 5 - axis)) * steps).sum(-1)
        assert fills(centres[translated.sum((1, 2, 3)) > 1 - 1e-9], pixels)


def test_original_images_stay():
    images = torch.rand(2, 1, 4, 4)
    assert transformed(images, "original") is images


def test_draws_are_repeated_by_the_generator_only():
    images = torch.rand(3, 1, 6, 6)
    first, second, other = (
        transformed(images, "fully_rotated", seeded_generator(s)) for s in (1, 1, 2)
    )
    torch.testing.assert_close(first, second)
    assert not torch.allclose(first, other)
    same = transformed(images[:1].expand(3, -1, -1, -1), "fully_rotated", seeded_generator())
    assert not torch.allclose(same[0], same[1])  # each image has its own draw


@pytest.mark.parametrize(
    ("kind", "ranges"),
    [
        ("fully_rotated", {"rotation": math.pi}),
        ("partially_rotated", {"rotation": math.pi / 2}),
        ("translated", {"x_translation": 16 / 27, "y_translation": 16 / 27}),
        ("scaled", {"x_scale": math.log(2), "y_scale": math.log(2)}),
        ("original", {}),
        ("rotated_scaled", {"rotation": math.pi, "x_scale": math.log(2), "y_scale": math.log(2)}),
        (
            "translated_scaled",
            {
                "x_translation": 16 / 27,
                "y_translation": 16 / 27,
                "x_scale": math.log(2),
                "y_scale": math.log(2),
            },
        ),
        (
            "rotated_translated",
            {"rotation": math.pi, "x_translation": 16 / 27, "y_translation": 16 / 27},
        ),
    ],
)
def test_true_ranges(kind, ranges):
    assert kind in datasets.TRANSFORM_KINDS
    assert true_ranges(kind) == dict.fromkeys(AffineImage().names, 0.0) | ranges
    assert true_ranges(kind.replace("_", "-")) == true_ranges(kind)


REJECTED = {
    "kind": (
        torch.zeros(2, 1, 4, 4),
        "sheared",
        "unknown kind 'sheared'; choose from fully_rotated, .*original, rotated_translated",
    ),
    "no channels": (torch.zeros(2, 4, 4), "scaled", r"got shape \[2, 4, 4\]"),
    "bytes": (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), "scaled", "uint8"),
    "negative": (
        torch.full((2, 1, 4, 4), -1.0),
        "scaled",
        "values from -1 to -1.*Standardise",
    ),
    "nan": (torch.full((2, 1, 4, 4), math.nan), "scaled", "nan"),
}


@pytest.mark.parametrize(("images", "kind", "match"), REJECTED.values(), ids=REJECTED)
def test_transformed_explains_bad_arguments(images, kind, match):
    with pytest.raises(ValueError, match=match):
        transformed(images, kind)


def test_hue_is_rotated_as_the_augmentation_rotates_it():
    images = torch.rand(3, 3, 4, 5)
    draws = torch.zeros(3, 1, 3)
    draws[:, 0, 2] = 2 * torch.rand(3, generator=seeded_generator()) - 1
    expected = Colour(init={"hue": 0.7}).transform(images, draws).squeeze(1)
    torch.testing.assert_close(datasets.hue_rotated(images, 0.7, seeded_generator()), expected)


def test_hue_keeps_grey_and_fills_its_range():
    red = torch.zeros(2000, 3, 1, 1)
    red[:, 0] = 1
    rotated = datasets.hue_rotated(red, 1.0, seeded_generator()).flatten(1)
    torch.testing.assert_close(rotated.sum(1), torch.ones(2000))
    torch.testing.assert_close(rotated.norm(dim=1), torch.ones(2000))
    angles = torch.atan2(
        3**0.5 * (rotated[:, 1] - rotated[:, 2]), 2 * rotated[:, 0] - rotated[:, 1] - rotated[:, 2]
    )
    assert fills(angles, 1.0)
    grey = torch.rand(2, 1, 4, 5).expand(-1, 3, -1, -1)
    torch.testing.assert_close(datasets.hue_rotated(grey, math.pi), grey)


@pytest.mark.parametrize(
    ("channels", "angle", "match"),
    [(1, 1.0, "RGB"), (3, 4.0, "between 0 and pi, got 4.0")],
    ids=["grey", "large angle"],
)
def test_hue_explains_bad_arguments(channels, angle, match):
    with pytest.raises(ValueError, match=match):
        datasets.hue_rotated(torch.rand(2, channels, 4, 4), angle)
