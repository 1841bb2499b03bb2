"""Augmentations with ranges: what is learnt, constrained, correlated, drawn and reported."""

import math

import pytest
import torch

import laplace_invariance as li
from laplace_invariance.augmentations import BoxAugmentation
from laplace_invariance.hyper import differentiable

IMAGES = (3, 2, 7, 5)


def test_draws_replay_and_are_fresh():
    augmentation = li.AffinePoints(init=0.5)
    x, draws = torch.randn(4, 2), augmentation.sample(4, 3)
    torch.testing.assert_close(
        augmentation.transform(x, draws), augmentation.transform(x, draws), rtol=0, atol=0
    )
    assert not torch.equal(draws, augmentation.sample(4, 3))
    assert not torch.equal(draws[0], draws[1])
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    assert torch.equal(*(augmentation.sample(4, 3, generator) for generator in generators))


def test_grids_are_even_and_cover_at_most_two_generators():
    one = li.AffineImage(init=0.1, learn="rotation", draws="grid")
    torch.testing.assert_close(one.sample(3, 4)[0, :, 2], torch.tensor([-0.75, -0.25, 0.25, 0.75]))
    assert one.sample(3, 4)[..., [0, 1, 3, 4, 5]].abs().max() == 0
    two = li.AffineImage(init=0.1, learn=("x_translation", "y_translation"), draws="grid")
    points = two.sample(3, 9)[0, :, :2]
    assert len({tuple(p.tolist()) for p in points}) == 9
    with pytest.raises(ValueError, match="square number"):
        two.sample(3, 8)
    with pytest.raises(ValueError, match="one or two generators"):
        li.AffineImage(draws="grid")


def test_a_grid_of_width_zero_is_the_identity():
    augmentation, x = li.AffineImage(learn="rotation", draws="grid"), torch.randn(IMAGES)
    samples = augmentation.transform(x, augmentation.sample(len(x), 4))
    torch.testing.assert_close(samples, x.unsqueeze(1).expand_as(samples))


def test_only_what_is_learnt_has_a_gradient():
    augmentation = li.AffinePoints(init=[0.1] * 6, learn=("rotation", "shear"))
    with differentiable():
        augmentation.transform(
            torch.randn(5, 2), augmentation.sample(5, 3)
        ).square().sum().backward()
    has_gradient = augmentation.eta.grad != 0
    assert has_gradient.tolist() == [False, False, True, False, False, True]


@pytest.mark.parametrize("constraint", ["softplus", "tanh"])
def test_constraints_start_at_init_and_stay_in_range(constraint):
    augmentation = li.AffineImage(init=0.3, constraint=constraint)
    torch.testing.assert_close(augmentation.half_widths(), torch.full((6,), 0.3))
    augmentation.eta.data.fill_(50.0)
    if constraint == "tanh":
        assert augmentation.magnitudes()["rotation"] <= math.pi + 1e-9
        assert augmentation.magnitudes()["x_translation"] <= 1 + 1e-9
    augmentation.eta.data.fill_(-50.0)
    if constraint == "softplus":
        assert 0 <= augmentation.magnitudes()["shear"] < 1e-9


@pytest.mark.parametrize("constraint", [None, "softplus", "tanh"])
def test_what_is_not_learnt_stays_at_init(constraint):
    augmentation = li.AffineImage(
        init={"rotation": 0.3, "shear": -0.2}, learn="rotation", constraint=constraint
    )
    expected = torch.tensor([0, 0, 0.3, 0, 0, -0.2])
    torch.testing.assert_close(augmentation.half_widths(), expected)


def test_mixing_scales_both_axes_together():
    augmentation = li.AffinePoints(init={"x_scale": 0.5}, correlated=True)
    x, y = augmentation.names.index("x_scale"), augmentation.names.index("y_scale")
    augmentation.mixing.data[y, x] = 0.5
    coefficients = augmentation.coefficients(augmentation.sample(50, 2))
    torch.testing.assert_close(coefficients[..., x], coefficients[..., y])
    assert augmentation.magnitudes()["y_scale"] == pytest.approx(0.5)


def test_ranges_have_a_default_wording():
    augmentation = BoxAugmentation(("first", "second"), (math.inf, 0.5), init=0.25)
    assert augmentation.ranges() == {"first": "±0.250", "second": "±0.250"}


REJECTED = {
    "learn": (lambda: li.AffineImage(learn="spin"), "no generator 'spin'"),
    "init by name": (lambda: li.AffineImage(init={"spin": 1.0}), "no generator 'spin'"),
    "init of two": (lambda: li.AffineImage(init=[1.0, 2.0]), "one number or 6"),
    "init of nan": (lambda: li.AffineImage(init=float("nan")), "finite"),
    "constraint": (lambda: li.AffineImage(constraint="exp"), "unknown constraint"),
    "draws": (lambda: li.AffineImage(draws="halton"), "unknown draws"),
    "init beyond tanh": (lambda: li.AffineImage(init=1.5, constraint="tanh"), "below"),
    "no samples": (lambda: li.AffineImage().sample(3, 0), "positive integer"),
    "draws of another size": (
        lambda: li.AffineImage().transform(torch.randn(IMAGES), torch.zeros(3, 4, 5)),
        r"\[n or 1, n_samples, 6\]",
    ),
    "draws for other inputs": (
        lambda: li.AffineImage().transform(torch.randn(IMAGES), torch.zeros(2, 4, 6)),
        "n = 3 inputs",
    ),
}


@pytest.mark.parametrize(("build", "match"), REJECTED.values(), ids=REJECTED)
def test_bad_arguments_are_explained(build, match):
    with pytest.raises(ValueError, match=match):
        build()


def test_other_options_are_rejected_by_name():
    with pytest.raises(TypeError, match="unexpected keyword argument 'drawn'"):
        li.AffineImage(drawn="sobol")
