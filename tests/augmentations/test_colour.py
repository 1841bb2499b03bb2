"""Changes of colour, against a slow twin."""

import math

import pytest
import torch

from laplace_invariance.augmentations import Colour

IMAGES = (2, 3, 7, 5)
SAMPLES = 4


def slow_colour(image, brightness, contrast, hue):
    """One image [3, height, width], pixel by pixel; rotated by exponentials of cross products."""
    axis = torch.ones(3) / math.sqrt(3)
    rotation = torch.linalg.matrix_exp(hue * torch.linalg.cross(axis.expand(3, 3), torch.eye(3)).mT)
    grey = image.mean()
    result = torch.empty_like(image)
    for i in range(image.shape[1]):
        for j in range(image.shape[2]):
            deviation = rotation @ (image[:, i, j] - grey)
            result[:, i, j] = math.exp(brightness) * (math.exp(contrast) * deviation + grey)
    return result


def test_colour_equals_the_formula():
    colour, x = Colour(init=[0.3, -0.4, 2.5]), torch.rand(IMAGES)
    draws = colour.sample(len(x), SAMPLES)
    coefficients = draws * colour.eta.detach()
    samples = colour.transform(x, draws)
    for n, s in torch.cartesian_prod(torch.arange(len(x)), torch.arange(SAMPLES)).tolist():
        torch.testing.assert_close(samples[n, s], slow_colour(x[n], *coefficients[n, s].tolist()))


def test_a_third_of_a_turn_takes_red_to_green_and_leaves_grey():
    colour = Colour(init={"hue": 2 * math.pi / 3})
    x = torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.3, 0.7], [0.4, 0.4, 0.4]]).view(3, 3, 1, 1)
    rotated = colour.transform(x, torch.ones(1, 1, 3)).flatten(1)
    expected = torch.tensor([[0.0, 1.0, 0.0], [0.7, 0.2, 0.3], [0.4, 0.4, 0.4]])
    torch.testing.assert_close(rotated, expected)


def test_images_of_one_channel_have_brightness_and_contrast_only():
    x = torch.rand(3, 1, 7, 5)
    grey = Colour(init=0.4, learn=("brightness", "contrast"))
    draws = grey.sample(3, SAMPLES)
    as_rgb = grey.transform(x.expand(-1, 3, -1, -1), draws)
    torch.testing.assert_close(grey.transform(x, draws), as_rgb[:, :, :1])
    for colour in (Colour(), Colour(init={"hue": 0.1}, learn="contrast")):
        with pytest.raises(ValueError, match="no hue"):
            colour(x)


def test_ranges_of_colour_speak_in_units():
    init = {"brightness": math.log(1.25), "contrast": -math.log(2), "hue": math.pi / 6}
    assert Colour(init=init).ranges() == {
        "brightness": "factor 0.80 to 1.25",
        "contrast": "factor 0.50 to 2.00",
        "hue": "±30.0 degrees",
    }


REJECTED = {
    "generator": (
        lambda: Colour(learn="saturation"),
        ValueError,
        "no generator 'saturation'; choose from brightness, contrast, hue",
    ),
    "channels": (lambda: Colour()(torch.rand(2, 4, 7, 5)), ValueError, r"\[n, 3, height, width\]"),
    "no batch": (lambda: Colour()(torch.rand(3, 7, 5)), ValueError, r"\[n, 3, height, width\]"),
    "bytes": (lambda: Colour()(torch.zeros(IMAGES).byte()), TypeError, "divide by 255"),
}


@pytest.mark.parametrize(("build", "error", "match"), REJECTED.values(), ids=REJECTED)
def test_bad_input_is_explained(build, error, match):
    with pytest.raises(error, match=match):
        build()
