"""What holds for every augmentation: identity at zero, replayed draws, gradients, dtypes."""

import math

import pytest
import torch
from torch import nn
from twins import central_differences, relative_error

from laplace_invariance import hyperparameters, named_hyperparameters
from laplace_invariance.augmentations import (
    AffineImage,
    AffinePoints,
    Augmentation,
    Colour,
    Compose,
    FiniteGroup,
    LieGroup,
    Sequence,
)
from laplace_invariance.draws import recording, replaying
from laplace_invariance.hyper import differentiable

IMAGES, SIGNALS, POINTS = (2, 3, 7, 5), (2, 3, 11), (5, 7, 2)
SAMPLES = 4


def two(kind, first, second):
    """Return a function that makes a composition of two augmentations of a kind."""

    def make(**options):
        return Compose(kind(**{"init": first, **options}), kind(**{"init": second, **options}))

    return make


def colour_and_affine(**options):
    return Compose(Colour(**{"init": 0.3, **options}), AffineImage(**{"init": 0.2, **options}))


def circular(**options):
    return Sequence(**{"init": [0.3, -0.4], "padding": "circular", **options})


AUGMENTATIONS = {
    "image": (lambda **options: AffineImage(**{"init": 0.2, **options}), IMAGES),
    "point": (lambda **options: AffinePoints(**{"init": 0.2, **options}), (3, 2)),
    "points": (lambda **options: AffinePoints(**{"init": 0.2, **options}), POINTS),
    "points in 3-D": (lambda **options: AffinePoints(3, **{"init": 0.2, **options}), (5, 7, 3)),
    "colour": (lambda **options: Colour(**{"init": [0.3, -0.4, 0.5], **options}), IMAGES),
    "signal": (lambda **options: Sequence(**{"init": [0.3, -0.4], **options}), SIGNALS),
    "circular signal": (circular, SIGNALS),
    "composed images": (colour_and_affine, IMAGES),
    "composed points": (two(AffinePoints, 0.3, 0.2), POINTS),
    "composed signals": (two(Sequence, 0.3, 0.1), SIGNALS),
}
every_augmentation = pytest.mark.parametrize(
    ("make", "shape"), AUGMENTATIONS.values(), ids=AUGMENTATIONS
)


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize(
    "options",
    [{}, {"correlated": True}, {"draws": "sobol"}],
    ids=["independent", "correlated", "sobol"],
)
def test_identity_at_zero(name, options):
    make, shape = AUGMENTATIONS[name]
    augmentation, x = make(init=0.0, **options), torch.rand(shape)
    expected = x.unsqueeze(1).expand(-1, SAMPLES, *shape[1:])
    exact = {"rtol": 0, "atol": 0}
    if "image" in name:  # linspace rounds
        exact = {}
    draws = augmentation.sample(len(x), SAMPLES)
    torch.testing.assert_close(augmentation.transform(x, draws), expected, **exact)
    torch.testing.assert_close(augmentation(x), x, **exact)


@every_augmentation
def test_one_set_of_draws_for_all_inputs(make, shape):
    augmentation, x = make(), torch.rand(shape)
    draws = augmentation.fixed(SAMPLES)
    assert draws.shape == (1, SAMPLES, len(augmentation.names))
    expected = augmentation.transform(x, draws.expand(len(x), -1, -1))
    torch.testing.assert_close(augmentation.transform(x, draws), expected)
    torch.testing.assert_close(augmentation.weights(SAMPLES), torch.full((SAMPLES,), 1 / SAMPLES))


@pytest.mark.parametrize("has_range", [True, False], ids=["and a range", "alone"])
def test_weights_are_fractions_though_a_buffer_is_an_integer(has_range):
    augmentation = Augmentation()
    augmentation.register_buffer("n_calls", torch.tensor(7))
    if has_range:
        augmentation.register_hyperparameter("eta", torch.tensor(0.4, dtype=torch.float32))
    found = augmentation.weights(5)
    assert found.dtype == (torch.float32 if has_range else torch.float64)
    torch.testing.assert_close(found, torch.full_like(found, 0.2))


@every_augmentation
@pytest.mark.parametrize(
    "options",
    [{}, {"constraint": "tanh"}, {"correlated": True}],
    ids=["unconstrained", "tanh", "correlated"],
)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("correlated", [False, True], ids=["", "correlated"])
@every_augmentation
def test_half_precision_rounds_inputs_ranges_and_samples_only(make, shape, correlated, dtype):
    augmentation = make(init=1.5, correlated=correlated).to(dtype)
    x = torch.rand(shape).to(dtype)
    draws = augmentation.sample(len(x), SAMPLES)
    assert draws.dtype == torch.float32
    with differentiable():
        samples = augmentation.transform(x, draws)
    weights = torch.randn_like(samples)
    tensors = list(hyperparameters(augmentation))
    gradients = torch.autograd.grad(samples, tensors, weights)
    samples = samples.detach()
    twin = augmentation.double()
    with differentiable():
        expected = twin.transform(x.double(), draws.double())
    slopes = torch.autograd.grad(expected, tensors, weights.double())
    assert samples.dtype == dtype
    assert relative_error(samples.double(), expected.detach()) < torch.finfo(dtype).eps
    for gradient, slope in zip(gradients, slopes, strict=True):
        # sums that cancel, more or less so by draws that differ among versions of torch
        assert relative_error(gradient.double(), slope) < 5 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_augmentation
def test_autocast_changes_nothing(make, shape, dtype):
    augmentation, x = make(correlated=True).float(), torch.rand(shape).float()
    draws = augmentation.sample(len(x), SAMPLES)
    expected = augmentation.transform(x, draws)
    with torch.autocast("cpu", dtype):
        assert torch.equal(augmentation.transform(x, draws), expected)
        with replaying([draws[:, :1].expand(len(x), -1, -1)]):
            torch.testing.assert_close(augmentation(x), expected[:, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_of_elements_are_not_rounded(dtype):
    group = FiniteGroup("all", init=0.3).to(dtype)
    expected = group.double().weights(6)
    torch.testing.assert_close(group.to(dtype).weights(6).double(), expected)


def test_integers_are_no_coordinates():
    with pytest.raises(TypeError, match="floating-point coordinates"):
        AffinePoints().transform(torch.ones(3, 2, dtype=torch.long), torch.zeros(1, 1, 6))


@pytest.mark.parametrize(
    "augmentation",
    [AffineImage(init=0.3), FiniteGroup("flips", init=1.0)],
    ids=["image", "flips"],
)
def test_a_call_is_recorded_and_replayed(augmentation):
    x, tape = torch.randn(IMAGES), []
    with recording(tape):
        first = augmentation(x)
    with replaying(tape):
        assert torch.equal(augmentation(x), first)
    assert len(tape) == 1


def test_fits_into_a_sequential_and_follows_its_dtype():
    model = nn.Sequential(AffineImage(init=0.1), nn.Flatten(), nn.Linear(35, 2)).float()
    assert model(torch.randn(3, 1, 7, 5, dtype=torch.float32)).dtype == torch.float32


def test_a_group_of_ones_own_composes():
    class Scaling(LieGroup):
        def __init__(self, **kwargs):
            super().__init__(["scale"], torch.eye(2).unsqueeze(0), [math.inf], **kwargs)

        def transform_by(self, x, coefficients):
            return x.unsqueeze(1) @ self.exponential(coefficients).mT.to(x.dtype)

    composed = Compose(Scaling(init=math.log(2)), AffinePoints(init={"x_scale": math.log(3)}))
    samples = composed.transform(torch.ones(1, 5, 2), torch.ones(1, 1, 7))
    torch.testing.assert_close(samples, torch.tensor([6.0, 2.0]).expand(1, 1, 5, 2))
