"""Compositions: order, common draws, names, learning, and the gradient of the evidence."""

import math

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
    Sequence,
)
from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.hyper import differentiable

IMAGES = (2, 3, 7, 5)
SAMPLES = 4


@pytest.mark.parametrize("same_draws", [False, True], ids=["own draws", "same draws"])
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
    translate, rotate = (
        AffinePoints(init={"x_translation": 1.0}),
        AffinePoints(init={"rotation": math.pi / 2}),
    )
    origin, draws = torch.zeros(1, 2), torch.ones(1, 1, 12)
    torch.testing.assert_close(
        Compose(translate, rotate).transform(origin, draws)[0, 0], torch.tensor([0.0, 1.0])
    )
    torch.testing.assert_close(
        Compose(rotate, translate).transform(origin, draws)[0, 0], torch.tensor([1.0, 0.0])
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
    # the parts' own columns are equal, so that they will not do
    torch.testing.assert_close(parts[0].fixed(16), parts[1].fixed(16))
    for sample in (composed.fixed(16)[0], composed.sample(3, 16)[1]):
        # a shift would hide equal columns from a plain comparison; a rotated order would not
        first, *others = sample.argsort(0).T
        for other in others:
            assert not any(torch.equal(other.roll(shift), first) for shift in range(16))
        assert len({tuple(column.tolist()) for column in (first, *others)}) == 12


def test_sobol_composition_covers_more_evenly_than_parts_that_draw_alone():
    """Equal columns, each shifted by its own, would put the samples of two parts on a line."""

    def discrepancy(sample):
        return (sample[..., :6] * sample[..., 6:]).mean(1).square().mean()

    parts = [AffineImage(), AffineImage()]
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


@pytest.mark.parametrize(
    "make", [image_model, point_model, signal_model], ids=["images", "points", "signals"]
)
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


def wrong_draws():
    parts = (AffineImage(init=0.2), Colour(init=0.3))
    return Compose(parts).transform(torch.rand(IMAGES), torch.zeros(2, 4, 8))


REJECTED = {
    "nothing": (lambda: Compose(), "at least one"),
    "empty list": (lambda: Compose([]), "at least one"),
    "different draws": (
        lambda: Compose(Colour(draws="independent"), AffineImage()),
        r"\['independent', 'sobol'\]",
    ),
    "grid": (lambda: Compose(AffineImage(learn="rotation", draws="grid")), r"\['grid'\]"),
    "different inputs": (
        lambda: Compose(AffineImage(), Sequence()),
        "different kinds: AffineImage, Sequence",
    ),
    "no samples": (lambda: Compose(Colour()).sample(3, 0), "positive integer"),
    "no fixed samples": (lambda: Compose(Colour()).fixed(0), "positive integer"),
    "draws of another size": (wrong_draws, r"\[n or 1, n_samples, 9\]"),
}


@pytest.mark.parametrize(("build", "match"), REJECTED.values(), ids=REJECTED)
def test_bad_values_are_explained(build, match):
    with pytest.raises(ValueError, match=match):
        build()


def test_only_augmentations_with_ranges_are_composed():
    with pytest.raises(TypeError, match=r"InvariantModel\(InvariantModel\(net, a\), b\)"):
        Compose(Colour(), FiniteGroup())
    with pytest.raises(TypeError, match=r"Identity\(\) is not one"):
        Compose(nn.Identity())
