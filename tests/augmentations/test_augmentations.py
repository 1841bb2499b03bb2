"""Augmentations: identity at zero, the transformations they say, draws that replay."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import laplace_invariance as li

IMAGES = (3, 2, 7, 5)


def unit(augmentation, name, value=1.0):
    """Draws that move one generator only."""
    draws = torch.zeros(1, 1, len(augmentation.names))
    draws[..., augmentation.names.index(name)] = value
    return draws


@pytest.mark.parametrize(
    ("augmentation", "shape"),
    [
        (li.AffineImage(), IMAGES),
        (li.AffineImage(correlated=True), IMAGES),
        (li.AffineImage(draws="sobol"), IMAGES),
        (li.AffineImage(learn="rotation", draws="grid"), IMAGES),
        (li.AffinePoints(), (3, 2)),
        (li.AffinePoints(), (3, 7, 2)),
        (li.AffinePoints(3), (5, 7, 3)),
        (li.FiniteGroup("flips"), IMAGES),
    ],
)
def test_identity_at_zero(augmentation, shape):
    x = torch.randn(shape)
    augmentation.double()
    samples = augmentation.transform(x, augmentation.sample(len(x), 4))
    first = samples[:, 0]  # of a finite group the identity; the others have weight zero
    torch.testing.assert_close(first, x)
    if not isinstance(augmentation, li.FiniteGroup):
        torch.testing.assert_close(samples, x.unsqueeze(1).expand_as(samples))
    else:
        torch.testing.assert_close(augmentation.weights(4), torch.tensor([1.0, 0, 0, 0]))
    torch.testing.assert_close(augmentation(x), x)


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
    turned = li.AffineImage(init={"rotation": math.pi / 2})
    bright = turned.transform(x, unit(turned, "rotation"))[0, 0, 0].argmax()
    assert divmod(bright.item(), 9) == (2, 4)  # counter-clockwise: above the centre
    moved = li.AffineImage(init={"x_translation": 0.5})
    bright = moved.transform(x, unit(moved, "x_translation"))[0, 0, 0].argmax()
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


@pytest.mark.parametrize(
    "augmentation", [li.AffineImage(init=0.3), li.FiniteGroup("flips", init=1.0)]
)
def test_a_call_is_recorded_and_replayed(augmentation):
    from laplace_invariance.draws import recording, replaying

    x, tape = torch.randn(IMAGES), []
    with recording(tape):
        first = augmentation(x)
    with replaying(tape):
        assert torch.equal(augmentation(x), first)
    assert len(tape) == 1


@pytest.mark.parametrize("draws", ["independent", "sobol"])
def test_draws_are_uniform(draws):
    sample = li.AffineImage(draws=draws).sample(4000, 4)
    assert sample.abs().max() <= 1
    torch.testing.assert_close(sample.mean((0, 1)), torch.zeros(6), atol=0.02, rtol=0)
    torch.testing.assert_close(
        sample.square().mean((0, 1)), torch.full((6,), 1 / 3), atol=0.02, rtol=0
    )


@pytest.mark.parametrize("n_samples", [1, 5, 8])
def test_sobol_has_one_draw_in_each_part_of_every_axis(n_samples):
    augmentation = li.AffineImage(draws="sobol")
    draws = torch.cat([augmentation.sample(50, n_samples), augmentation.fixed(n_samples)])
    parts = ((draws + 1) / 2 * n_samples).floor().long()
    assert torch.equal(
        parts.sort(1).values, torch.arange(n_samples).view(1, -1, 1).expand_as(parts)
    )


def test_sobol_is_even_in_two_dimensions():
    """Eight draws in the first two axes: one in each cell of 2 x 4 and of 4 x 2."""
    draws = (li.AffineImage(draws="sobol").sample(50, 8)[..., :2] + 1) / 2
    for cells in ((2, 4), (4, 2)):
        index = (draws * torch.tensor(cells)).floor().long()
        cell = index[..., 0] * cells[1] + index[..., 1]
        assert torch.equal(cell.sort(1).values, torch.arange(8).expand(50, 8))


@pytest.mark.parametrize("n_samples", [5, 8])
def test_sobol_mean_has_the_variance_of_stratified_draws(n_samples):
    """Of one uniform draw it is 1/3; of the mean of one draw in each of n parts, 1 / (3 n^3)."""
    means = li.AffineImage(draws="sobol").sample(20000, n_samples).mean(1)
    torch.testing.assert_close(
        means.var(0), torch.full((6,), 1 / 3 / n_samples**3), rtol=0.05, atol=0
    )


def test_fixed_draws_of_one_sample_are_the_identity():
    assert li.AffineImage(init=0.5).fixed(1).eq(0).all()


def test_sobol_covers_more_evenly():
    def discrepancy(sample):
        return sample.mean(1).square().mean()

    independent, sobol = (li.AffineImage(draws=d).sample(200, 16) for d in ("independent", "sobol"))
    assert discrepancy(sobol) < discrepancy(independent) / 5


def test_grids_are_even_and_refuse_more_than_two():
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


def test_only_what_is_learnt_has_a_gradient():
    from laplace_invariance.hyper import differentiable

    augmentation = li.AffinePoints(init=[0.1] * 6, learn=("rotation", "shear"))
    with differentiable():
        augmentation.transform(
            torch.randn(5, 2), augmentation.sample(5, 3)
        ).square().sum().backward()
    moved = augmentation.eta.grad != 0
    assert moved.tolist() == [False, False, True, False, False, True]


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


def test_integer_images_are_refused():
    with pytest.raises(TypeError, match="floating point"):
        li.AffineImage()(torch.zeros(2, 1, 4, 4, dtype=torch.uint8))


def test_mixing_scales_both_axes_together():
    augmentation = li.AffinePoints(init={"x_scale": 0.5}, correlated=True)
    x, y = augmentation.names.index("x_scale"), augmentation.names.index("y_scale")
    augmentation.mixing.data[y, x] = 0.5
    coefficients = augmentation.coefficients(augmentation.sample(50, 2))
    torch.testing.assert_close(coefficients[..., x], coefficients[..., y])
    assert augmentation.magnitudes()["y_scale"] == pytest.approx(0.5)


def test_ranges_speak_in_units():
    words = li.AffineImage(init={"rotation": math.pi / 2, "x_scale": math.log(2)}).ranges()
    assert words["rotation"] == "±90.0 degrees"
    assert words["x_scale"] == "factor 0.50 to 2.00"
    assert "rotation: ±90.0 degrees" in repr(li.AffineImage(init={"rotation": -math.pi / 2}))


def test_fits_into_a_sequential_and_follows_its_dtype():
    model = nn.Sequential(li.AffineImage(init=0.1), nn.Flatten(), nn.Linear(35, 2)).float()
    assert model(torch.randn(3, 1, 7, 5, dtype=torch.float32)).dtype == torch.float32


def test_finite_group_elements_and_weights():
    x = torch.randn(2, 1, 5, 5)
    group = li.FiniteGroup("all", init=1.0)
    samples = group.transform(x, group.sample(2, 1))
    assert samples.shape == (2, 6, 1, 5, 5)
    torch.testing.assert_close(samples[:, group.names.index("quarter_turn")], x.rot90(1, (2, 3)))
    torch.testing.assert_close(samples[:, group.names.index("horizontal_flip")], x.flip(3))
    torch.testing.assert_close(group.weights(6), torch.full((6,), 1 / 6))
    assert group.magnitudes() == pytest.approx(dict.fromkeys(group.names, 1 / 6))
    group.eta.data[:2] = torch.tensor([-1.0, 2.0])
    group.project_()
    assert group.eta[:2].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: li.AffineImage(learn="spin"), "no generator 'spin'"),
        (lambda: li.AffineImage(init={"spin": 1.0}), "no generator 'spin'"),
        (lambda: li.AffineImage(init=[1.0, 2.0]), "one number or 6"),
        (lambda: li.AffineImage(init=float("nan")), "finite"),
        (lambda: li.AffineImage(constraint="exp"), "unknown constraint"),
        (lambda: li.AffineImage(draws="halton"), "unknown draws"),
        (lambda: li.AffineImage(init=1.5, constraint="tanh"), "below"),
        (lambda: li.AffinePoints(4), "2 or 3 dimensions"),
        (lambda: li.FiniteGroup("mirror"), "no element 'mirror'"),
        (lambda: li.FiniteGroup(init=-1), "between 0"),
        (lambda: li.FiniteGroup(init=1.5), "full invariance"),
        (lambda: li.AffineImage().sample(3, 0), "positive integer"),
        (
            lambda: li.AffineImage().transform(torch.randn(IMAGES), torch.zeros(3, 4, 5)),
            r"\[n or 1, n_samples, 6\]",
        ),
        (
            lambda: li.AffineImage().transform(torch.randn(IMAGES), torch.zeros(2, 4, 6)),
            "n = 3 inputs",
        ),
        (
            lambda: li.AffineImage().transform(torch.randn(3, 7, 5), torch.zeros(3, 4, 6)),
            "channels, height, width",
        ),
        (lambda: li.AffinePoints().transform(torch.randn(3, 3), torch.zeros(3, 4, 6)), r"\[n, 2\]"),
        (
            lambda: li.FiniteGroup().transform(torch.randn(IMAGES), torch.zeros(1, 6).long()),
            "square images",
        ),
    ],
)
def test_bad_input_is_refused(build, match):
    with pytest.raises(ValueError, match=match):
        build()
