"""Colours, signals and compositions: each against a slow twin, and differentiable in every hyperparameter."""

import math

import numpy as np
import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twins import central_differences, relative_error

from laplace_invariance import InvariantModel, learning, named_hyperparameters
from laplace_invariance.augmentations import (
    AffineImage,
    AffinePoints,
    Colour,
    Compose,
    FiniteGroup,
    LieGroup,
    Sequence,
)
from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.hyper import differentiable

IMAGES, SIGNALS, POINTS = (2, 3, 7, 5), (2, 3, 11), (5, 7, 2)
SAMPLES = 4


def sobol_pair():
    return Compose(AffineImage(init=0.2, draws="sobol"), Colour(init=0.3, draws="sobol"))


AUGMENTATIONS = {
    "colour": (lambda **kw: Colour(**{"init": [0.3, -0.4, 0.5], **kw}), IMAGES),
    "zeros": (lambda **kw: Sequence(**{"init": [0.3, -0.4], **kw}), SIGNALS),
    "circular": (
        lambda **kw: Sequence(**{"init": [0.3, -0.4], "padding": "circular", **kw}),
        SIGNALS,
    ),
    "images": (
        lambda **kw: Compose(Colour(**{"init": 0.3, **kw}), AffineImage(**{"init": 0.2, **kw})),
        IMAGES,
    ),
    "points": (
        lambda **kw: Compose(
            AffinePoints(**{"init": 0.3, **kw}), AffinePoints(**{"init": 0.2, **kw})
        ),
        POINTS,
    ),
    "signals": (
        lambda **kw: Compose(Sequence(**{"init": 0.3, **kw}), Sequence(**{"init": 0.1, **kw})),
        SIGNALS,
    ),
}
every_augmentation = pytest.mark.parametrize(
    ("make", "shape"), AUGMENTATIONS.values(), ids=AUGMENTATIONS
)


@every_augmentation
@pytest.mark.parametrize("options", [{}, {"correlated": True}, {"draws": "sobol"}])
def test_identity_at_zero(make, shape, options):
    augmentation, x = make(init=0.0, **options), torch.rand(shape)
    expected = x.unsqueeze(1).expand(-1, SAMPLES, *shape[1:])
    exact = (
        {} if isinstance(augmentation, Compose) else {"rtol": 0, "atol": 0}
    )  # linspace rounds in AffineImage
    torch.testing.assert_close(
        augmentation.transform(x, augmentation.sample(len(x), SAMPLES)), expected, **exact
    )
    torch.testing.assert_close(augmentation(x), x, **exact)


@every_augmentation
def test_one_set_of_draws_for_all_inputs(make, shape):
    augmentation, x = make(), torch.rand(shape)
    draws = augmentation.fixed(SAMPLES)
    assert draws.shape == (1, SAMPLES, len(augmentation.names))
    expected = augmentation.transform(x, draws.expand(len(x), -1, -1))
    torch.testing.assert_close(augmentation.transform(x, draws), expected)
    torch.testing.assert_close(augmentation.weights(SAMPLES), torch.full((SAMPLES,), 1 / SAMPLES))


@every_augmentation
@pytest.mark.parametrize("options", [{}, {"constraint": "tanh"}, {"correlated": True}])
def test_gradient_in_every_hyperparameter_equals_central_differences(make, shape, options):
    augmentation, x = make(**options), torch.rand(shape)
    for name, tensor in named_hyperparameters(augmentation):
        if name.endswith("mixing"):
            tensor.data.copy_(0.1 * torch.randn_like(tensor))
    draws = augmentation.sample(len(x), SAMPLES)
    weights = torch.randn_like(augmentation.transform(x, draws))

    def value():
        return (weights * augmentation.transform(x, draws).square()).sum()

    with differentiable():
        value().backward()
    for name, tensor in named_hyperparameters(augmentation):
        assert relative_error(tensor.grad, central_differences(value, tensor, 1e-7)) < 1e-6, name


@every_augmentation
def test_follows_the_dtype_of_the_input(make, shape):
    augmentation, x = make(), torch.rand(shape, dtype=torch.float32)
    draws = augmentation.sample(len(x), SAMPLES)
    samples = augmentation.transform(x, draws)
    assert samples.dtype == torch.float32
    torch.testing.assert_close(
        samples, augmentation.transform(x.double(), draws).float(), rtol=1e-4, atol=1e-4
    )
    assert augmentation.float()(x).dtype == torch.float32


# colours


def slow_colour(image, brightness, contrast, hue):
    """One image [3, height, width], pixel by pixel; the rotation is the exponential of a cross product."""
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
    expected = torch.stack([
        torch.stack([slow_colour(image, *(draw * colour.eta.detach()).tolist()) for draw in per_image])
        for image, per_image in zip(x, draws, strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(colour.transform(x, draws), expected)


def test_a_third_of_a_turn_takes_red_to_green_and_leaves_grey():
    colour = Colour(init={"hue": 2 * math.pi / 3})
    x = torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.3, 0.7], [0.4, 0.4, 0.4]]).view(3, 3, 1, 1)
    turned = colour.transform(x, torch.ones(1, 1, 3)).flatten(1)
    expected = torch.tensor([[0.0, 1.0, 0.0], [0.7, 0.2, 0.3], [0.4, 0.4, 0.4]])
    torch.testing.assert_close(turned, expected)


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
    words = Colour(
        init={"brightness": math.log(1.25), "contrast": -math.log(2), "hue": math.pi / 6}
    ).ranges()
    assert words == {
        "brightness": "factor 0.80 to 1.25", "contrast": "factor 0.50 to 2.00", "hue": "±30.0 degrees"
    }  # fmt: skip


# signals


def slow_sequence(signal, shift, stretch, padding):
    """One signal [channels, length], position by position, with numpy's interpolation."""
    length = signal.shape[-1]
    centre, known = (length - 1) / 2, np.arange(-1, length + 1)
    result = np.zeros(signal.shape)
    for channel, values in enumerate(signal.numpy()):
        for i in range(length):
            position = centre + math.exp(stretch) * (i - centre) + shift * length / 2
            if padding == "circular":
                result[channel, i] = np.interp(position, known[1:-1], values, period=length)
            else:
                result[channel, i] = np.interp(position, known, np.pad(values, 1), left=0, right=0)
    return torch.from_numpy(result)


@pytest.mark.parametrize("length", [11, 6, 1])
@pytest.mark.parametrize("init", [[0.3, -0.4], [0.9, 0.5], [-5.0, 2.0]])
@pytest.mark.parametrize("padding", ["zeros", "circular"])
def test_sequence_equals_interpolation(padding, init, length):
    sequence, x = Sequence(init=init, padding=padding), torch.randn(2, 3, length)
    draws = sequence.sample(len(x), SAMPLES)
    expected = torch.stack([
        torch.stack([slow_sequence(signal, *(draw * sequence.eta.detach()).tolist(), padding) for draw in per_signal])
        for signal, per_signal in zip(x, draws, strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(sequence.transform(x, draws), expected)


def test_a_shift_of_one_is_half_the_signal():
    x, draws = torch.randn(2, 3, 10), torch.ones(1, 1, 2)
    circular = Sequence(init={"shift": 1.0}, padding="circular").transform(x, draws).squeeze(1)
    torch.testing.assert_close(circular, x.roll(-5, -1))
    zeros = Sequence(init={"shift": 1.0}).transform(x, draws).squeeze(1)
    torch.testing.assert_close(zeros, torch.cat([x[..., 5:], torch.zeros(2, 3, 5)], dim=-1))


def test_only_circular_shifts_are_limited():
    for padding, expected in (("circular", [1.0, 3.0]), ("zeros", [3.0, 3.0])):
        sequence = Sequence(init=3.0, padding=padding)
        sequence.project_()
        assert sequence.eta.tolist() == expected


def test_ranges_of_sequence_speak_in_units():
    words = Sequence(init={"shift": -0.25, "stretch": math.log(2)}).ranges()
    assert words == {"shift": "±0.250 half-lengths", "stretch": "factor 0.50 to 2.00"}


# compositions


@pytest.mark.parametrize("same_draws", [False, True])
def test_composition_applies_one_after_the_other(same_draws):
    first, second, third = (
        AffineImage(init=0.3),
        Colour(init=0.4),
        AffineImage(init={"rotation": 1.0}),
    )
    composed, x = Compose(first, second, third), torch.rand(IMAGES)
    draws = composed.sample(1 if same_draws else len(x), SAMPLES)
    for s in range(SAMPLES):
        expected, one = x, draws[:, [s]]
        expected = first.transform(expected, one[..., :6]).squeeze(1)
        expected = second.transform(expected, one[..., 6:9]).squeeze(1)
        expected = third.transform(expected, one[..., 9:]).squeeze(1)
        torch.testing.assert_close(composed.transform(x, draws)[:, s], expected)


def test_the_order_matters():
    move, turn = (
        AffinePoints(init={"x_translation": 1.0}),
        AffinePoints(init={"rotation": math.pi / 2}),
    )
    origin, draws = torch.zeros(1, 2), torch.ones(1, 1, 12)
    torch.testing.assert_close(
        Compose(move, turn).transform(origin, draws)[0, 0], torch.tensor([0.0, 1.0])
    )
    torch.testing.assert_close(
        Compose(turn, move).transform(origin, draws)[0, 0], torch.tensor([1.0, 0.0])
    )


def test_lists_and_compositions_are_flattened():
    a, b, c = AffineImage(), Colour(), AffineImage()
    for composed in (
        Compose(a, b, c),
        Compose([a, b, c]),
        Compose(Compose(a, b), c),
        Compose((a, Compose([b, c]))),
    ):
        assert list(composed.parts) == [a, b, c]


@pytest.mark.parametrize("draws", ["independent", "sobol"])
def test_parts_are_drawn_for_together(draws):
    parts = [AffineImage(init=0.1, draws=draws), AffineImage(init=0.1, draws=draws)]
    composed = Compose(parts)
    torch.testing.assert_close(
        parts[0].fixed(16), parts[1].fixed(16)
    )  # so the parts' own columns will not do
    for sample in (composed.fixed(16)[0], composed.sample(3, 16)[1]):
        order = sample.argsort(
            0
        ).T  # a shift would hide equal columns from a plain comparison; a rotated order would not
        rotations = {
            tuple(column.roll(shift).tolist()) for column in order[1:] for shift in range(16)
        }
        assert tuple(order[0].tolist()) not in rotations
        assert len({tuple(column.tolist()) for column in order}) == 12


def test_sobol_composition_covers_more_evenly_than_parts_that_draw_alone():
    """Equal columns, each shifted by its own, would put the samples of two parts on a line."""

    def discrepancy(sample):
        return (sample[..., :6] * sample[..., 6:]).mean(1).square().mean()

    parts = [AffineImage(draws="sobol"), AffineImage(draws="sobol")]
    alone = torch.cat([part.sample(500, 16) for part in parts], dim=-1)
    assert discrepancy(Compose(parts).sample(500, 16)) < discrepancy(alone) / 2


@pytest.mark.parametrize("draws", ["independent", "sobol"])
def test_composition_of_one_is_that_one(draws):
    part = Colour(init=0.3, draws=draws)
    composed, seeds = Compose(part), [torch.Generator().manual_seed(3) for _ in range(2)]
    assert torch.equal(composed.sample(5, 4, seeds[0]), part.sample(5, 4, seeds[1]))
    assert torch.equal(composed.fixed(4), part.fixed(4))
    assert composed.ranges() == part.ranges()


def test_names_that_clash_are_numbered():
    composed = Compose(
        AffineImage(init={"rotation": 0.5}),
        Colour(init={"hue": 0.25}),
        AffineImage(init={"rotation": 1}),
    )
    magnitudes = composed.magnitudes()
    assert tuple(magnitudes) == composed.names
    assert (magnitudes["0.rotation"], magnitudes["hue"], magnitudes["2.rotation"]) == (
        0.5,
        0.25,
        1.0,
    )
    assert composed.ranges()["2.rotation"] == f"±{math.degrees(1):.1f} degrees"


def test_learning_steps_and_projects_every_part():
    composed = Compose(
        AffineImage(init={"rotation": 3.1}), Colour(init={"hue": 3.1}, correlated=True)
    )
    assert [name for name, _ in named_hyperparameters(composed)] == [
        "parts.0.eta",
        "parts.1.eta",
        "parts.1.mixing",
    ]
    with learning(composed, lr=1.0, optimizer=torch.optim.SGD) as learner, differentiable():
        (-sum(part.hyperparameter("eta").sum() for part in composed.parts)).backward()
    assert learner.steps == {"parts.0.eta": 1, "parts.1.eta": 1, "parts.1.mixing": 0}
    assert composed.parts[0].eta[2].item() == pytest.approx(math.pi)
    assert composed.parts[1].eta.tolist() == pytest.approx([1.0, 1.0, math.pi])
    composed.parts[1].eta.data.fill_(9.0)
    composed.project_()
    assert composed.magnitudes()["hue"] == pytest.approx(math.pi)


def test_composition_survives_its_state_dict():
    composed, other = (
        Compose(AffineImage(init=0.3), Colour(init=0.2)),
        Compose(AffineImage(), Colour()),
    )
    other.load_state_dict(composed.state_dict())
    assert other.ranges() == composed.ranges()


def image_model(draws):
    warp = AffineImage(init=[0.1, -0.2, 0.3, 0.15, 0.25, 0.05], draws=draws)
    augmentation = Compose(Colour(init=[0.3, -0.2, 0.4], draws=draws), warp)
    return (
        augmentation,
        nn.Sequential(nn.Flatten(), nn.Linear(48, 4), nn.Tanh(), nn.Linear(4, 3)),
        torch.rand(7, 3, 4, 4),
    )


def point_model(draws):
    augmentation = Compose(
        AffinePoints(init=0.2, draws=draws), AffinePoints(init=0.3, constraint="tanh", draws=draws)
    )
    return (
        augmentation,
        nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)),
        torch.randn(11, 2),
    )


def signal_model(draws):
    augmentation = Compose(
        Sequence(init=0.2, padding="circular", draws=draws), Sequence(init=0.1, draws=draws)
    )
    return (
        augmentation,
        nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(15, 3)),
        torch.randn(7, 2, 7),
    )


@pytest.mark.parametrize("make", [image_model, point_model, signal_model])
@pytest.mark.parametrize("draws", ["independent", "sobol"])
def test_gradient_of_the_evidence_equals_central_differences(make, draws):
    augmentation, net, x = make(draws)
    model = InvariantModel(net, augmentation, SAMPLES, generator=torch.Generator())
    loader = DataLoader(TensorDataset(x, torch.randint(3, (len(x),))), batch_size=4)

    def evidence():
        model.generator.manual_seed(1)
        settings = {"prior_precision": 0.5, "subset_of_weights": "all", "hessian_structure": "kron"}
        la = Laplace(model, "classification", backend=AugmentedGGN, **settings)
        la.fit(loader)
        return la.log_marginal_likelihood()

    evidence().backward()
    # points are smooth; interpolation has kinks, of which a small step passes few
    step, tolerance = (1e-5, 1e-6) if make is point_model else (1e-7, 1e-4)
    names = [name for name, _ in named_hyperparameters(model)]
    assert names == ["augmentation.parts.0.eta", "augmentation.parts.1.eta"]
    for name, tensor in named_hyperparameters(model):
        difference = central_differences(lambda: evidence().detach(), tensor, step)
        assert relative_error(tensor.grad, difference) < tolerance, name


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (
            lambda: Colour(learn="saturation"),
            "no generator 'saturation'; choose from brightness, contrast, hue",
        ),
        (lambda: Colour()(torch.rand(2, 4, 7, 5)), r"\[n, 3, height, width\]"),
        (lambda: Colour()(torch.rand(3, 7, 5)), r"\[n, 3, height, width\]"),
        (lambda: Sequence(padding="reflect"), "unknown padding 'reflect'"),
        (lambda: Sequence()(torch.rand(3, 7)), r"\[n, channels, length\]"),
        (lambda: Sequence(init=1.5, padding="circular", constraint="tanh"), "below"),
        (lambda: Compose(), "at least one"),
        (lambda: Compose([]), "at least one"),
        (lambda: Compose(Colour(), AffineImage(draws="sobol")), r"\['independent', 'sobol'\]"),
        (lambda: Compose(AffineImage(learn="rotation", draws="grid")), r"\['grid'\]"),
        (lambda: Compose(AffineImage(), Sequence()), "different kinds: AffineImage, Sequence"),
        (lambda: Compose(Colour()).sample(3, 0), "positive integer"),
        (lambda: Compose(Colour()).fixed(0), "positive integer"),
        (
            lambda: sobol_pair().transform(torch.rand(IMAGES), torch.zeros(2, 4, 8)),
            r"\[n or 1, n_samples, 9\]",
        ),
    ],
)
def test_bad_values_are_refused(build, match):
    with pytest.raises(ValueError, match=match):
        build()


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: Colour()(torch.zeros(IMAGES, dtype=torch.uint8)), "divide by 255"),
        (lambda: Sequence()(torch.zeros(SIGNALS, dtype=torch.long)), "floating point"),
        (
            lambda: Compose(Colour(), FiniteGroup()),
            r"InvariantModel\(InvariantModel\(net, a\), b\)",
        ),
        (lambda: Compose(nn.Identity()), r"Identity\(\) is not one"),
    ],
)
def test_bad_types_are_refused(build, match):
    with pytest.raises(TypeError, match=match):
        build()


def test_a_group_of_ones_own_composes():
    class Scaling(LieGroup):
        def __init__(self, **kwargs):
            super().__init__(["scale"], torch.eye(2).unsqueeze(0), [math.inf], **kwargs)

        def transform_by(self, x, coefficients):
            return x.unsqueeze(1) @ self.exponential(coefficients).mT.to(x.dtype)

    composed = Compose(Scaling(init=math.log(2)), AffinePoints(init={"x_scale": math.log(3)}))
    moved = composed.transform(torch.ones(1, 5, 2), torch.ones(1, 1, 7))
    torch.testing.assert_close(moved, torch.tensor([6.0, 2.0]).expand(1, 1, 5, 2))
