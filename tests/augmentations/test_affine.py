"""Affine transformations of images and points are those that the documentation describes."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F

import laplace_invariance as li
from laplace_invariance.augmentations.affine import warn_of_bright_borders

IMAGES = (3, 2, 7, 5)


def unit(augmentation, name, value=1.0):
    """Draws that are zero for all generators but one."""
    draws = torch.zeros(1, 1, len(augmentation.names))
    draws[..., augmentation.names.index(name)] = value
    return draws


def test_affine_image_equals_affine_grid():
    augmentation = li.AffineImage(init=[0.1, -0.2, 0.3, 0.15, -0.25, 0.05])
    x, draws = torch.randn(IMAGES), torch.rand(3, 4, 6) * 2 - 1
    maps = torch.linalg.matrix_exp(
        torch.einsum("nsk,kij->nsij", draws * augmentation.eta, augmentation.generators)
    )
    grid = F.affine_grid(maps.flatten(0, 1)[:, :2].detach(), (12, *IMAGES[1:]), align_corners=True)
    expected = F.grid_sample(x.repeat_interleave(4, 0), grid, align_corners=True).view(
        3, 4, *IMAGES[1:]
    )
    torch.testing.assert_close(augmentation.transform(x, draws), expected)


def test_image_signs_are_those_of_the_documentation():
    x = torch.zeros(1, 1, 9, 9)
    x[0, 0, 4, 6] = 1  # right of the centre
    rotated = li.AffineImage(init={"rotation": math.pi / 2})
    bright = rotated.transform(x, unit(rotated, "rotation"))[0, 0, 0].argmax()
    assert divmod(bright.item(), 9) == (2, 4)  # counter-clockwise: above the centre
    translated = li.AffineImage(init={"x_translation": 0.5})
    bright = translated.transform(x, unit(translated, "x_translation"))[0, 0, 0].argmax()
    assert divmod(bright.item(), 9) == (4, 4)  # to the left, by a quarter of the image


def test_points_rotate_counter_clockwise_and_scale():
    rotation = li.AffinePoints(init={"rotation": math.pi / 2})
    torch.testing.assert_close(
        rotation.transform(torch.tensor([[1.0, 0.0]]), unit(rotation, "rotation"))[0, 0],
        torch.tensor([0.0, 1.0]),
    )
    scale = li.AffinePoints(init={"x_scale": math.log(2)})
    torch.testing.assert_close(
        scale.transform(torch.tensor([[3.0, 1.0]]), unit(scale, "x_scale"))[0, 0],
        torch.tensor([6.0, 1.0]),
    )
    about_z = li.AffinePoints(3, init={"z_rotation": math.pi / 2})
    rotated = about_z.transform(torch.tensor([[1.0, 0.0, 5.0]]), unit(about_z, "z_rotation"))
    torch.testing.assert_close(rotated[0, 0], torch.tensor([0.0, 1.0, 5.0]))


def test_three_dimensional_generators_are_twelve_and_independent():
    augmentation = li.AffinePoints(3)
    assert len(augmentation.names) == 12
    assert torch.linalg.matrix_rank(augmentation.generators.flatten(1)) == 12


def test_ranges_speak_in_units():
    words = li.AffineImage(init={"rotation": math.pi / 2, "x_scale": math.log(2)}).ranges()
    assert words["rotation"] == "±90.0 degrees"
    assert words["x_scale"] == "factor 0.50 to 2.00"
    assert "rotation: ±90.0 degrees" in repr(li.AffineImage(init={"rotation": -math.pi / 2}))


def test_integer_images_are_rejected():
    with pytest.raises(TypeError, match="floating point"):
        li.AffineImage()(torch.zeros(2, 1, 4, 4, dtype=torch.uint8))


REJECTED = {
    "dimensions": (lambda: li.AffinePoints(4), "2 or 3 dimensions"),
    "no batch": (
        lambda: li.AffineImage().transform(torch.randn(3, 7, 5), torch.zeros(3, 4, 6)),
        "channels, height, width",
    ),
    "points in 3-D": (
        lambda: li.AffinePoints().transform(torch.randn(3, 3), torch.zeros(3, 4, 6)),
        r"\[n, 2\]",
    ),
}


@pytest.mark.parametrize(("build", "match"), REJECTED.values(), ids=REJECTED)
def test_bad_input_is_explained(build, match):
    with pytest.raises(ValueError, match=match):
        build()


def test_ranges_are_said_in_units_of_the_image():
    augmentation = li.AffineImage(
        init={"x_translation": 0.5, "y_translation": 0.5, "rotation": 1.0, "shear": 0.1}
    )
    assert augmentation.ranges((3, 9, 33)) == {
        "x_translation": "±8.0 pixels",
        "y_translation": "±2.0 pixels",
        "rotation": "±57.3 degrees",
        "x_scale": "factor 1.00 to 1.00",
        "y_scale": "factor 1.00 to 1.00",
        "shear": "factor 0.90 to 1.11 along the diagonals",
    }
    assert augmentation.ranges()["x_translation"] == "±0.500 half-widths"


def test_a_translation_in_pixels_moves_the_image_by_so_many():
    image = torch.zeros(1, 1, 9, 33)
    image[0, 0, 4, 16] = 1
    coefficients = torch.zeros(1, 1, 6)
    coefficients[..., 0] = 0.5  # 8.0 pixels, as it is said
    moved = li.AffineImage().transform_by(image, coefficients)
    assert moved[0, 0, 0, 4].argmax() == 16 - 8


def test_a_shear_stretches_one_diagonal_and_shrinks_the_other():
    augmentation = li.AffineImage()
    matrix = augmentation.exponential(torch.tensor([0, 0, 0, 0, 0, 0.1]))[:2, :2]
    diagonals = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    factors = torch.tensor([0.1, -0.1]).exp()
    torch.testing.assert_close(matrix @ diagonals, diagonals * factors)


@pytest.mark.parametrize("angle", [90, -3.2])
def test_angles_beyond_half_a_turn_are_refused(angle):
    with pytest.raises(ValueError, match=r"rotation must be at most pi.*math\.radians\(90\)"):
        li.AffineImage(init={"rotation": angle})
    assert li.AffineImage(init={"rotation": math.pi}).magnitudes()["rotation"] <= math.pi + 1e-6


def test_a_bright_background_is_warned_of():
    images = torch.rand(4, 1, 6, 6) * 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_bright_borders(images)
    with pytest.warns(UserWarning, match="bright borders.*1 - x"):
        warn_of_bright_borders(1 - images / 2)
