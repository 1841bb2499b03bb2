"""Signals and points whose labels are invariant as far as they say."""

import pytest
import torch
from builders import seeded_generator

from laplace_invariance import datasets
from laplace_invariance.augmentations import Sequence


def test_circular_waves_are_labelled_by_how_far_they_are_shifted():
    x, y = datasets.waves(3000, 0.25, n_classes=4, length=16, noise=0.0).tensors
    assert x.shape == (3000, 1, 16)
    assert y.dtype == torch.int64
    assert set(y.tolist()) == {0, 1, 2, 3}
    assert (y == 0).double().mean().item() == pytest.approx(0.75, abs=0.03)


def test_circular_shifts_roll():
    def shifted(by):
        return datasets.waves(
            6, 0.6, length=16, noise=0.0, shifts=torch.full((6,), by), generator=seeded_generator()
        ).tensors

    (still, labels), (half_shifted, same), (_, far) = shifted(0.0), shifted(0.5), shifted(0.75)
    torch.testing.assert_close(half_shifted, still.roll(4, dims=-1))  # half of half the length
    assert labels.min() > 0
    assert torch.equal(same, labels)
    assert far.eq(0).all()
    torch.testing.assert_close(still.std(-1, correction=0), torch.ones(6, 1))


@pytest.mark.parametrize("padding", ["circular", "zeros"])
def test_waves_are_shifted_as_the_augmentation_shifts_them(padding):
    still, shifted = (
        datasets.waves(
            5,
            length=16,
            noise=0.0,
            padding=padding,
            shifts=torch.full((5,), by),
            generator=seeded_generator(),
        )[:][0]
        for by in (0.0, 0.25)
    )
    augmentation = Sequence(init={"shift": 0.25}, padding=padding)
    torch.testing.assert_close(
        augmentation.transform(still, torch.tensor([[[-1.0, 0.0]]])).squeeze(1), shifted
    )


def test_waves_with_zeros_are_cut_and_keep_their_label():
    def shifted(by):
        shifts = torch.full((6,), by)
        return datasets.waves(
            6,
            n_classes=3,
            length=16,
            noise=0.0,
            padding="zeros",
            shifts=shifts,
            generator=seeded_generator(),
        ).tensors

    (still, labels), (later, same) = shifted(0.0), shifted(0.25)
    assert torch.equal(same, labels)
    torch.testing.assert_close(later[..., 2:], still[..., :-2])
    torch.testing.assert_close(later[..., :2], torch.zeros(6, 1, 2))
    assert still[..., [0, -1]].abs().max() < 0.3 < 1 < still.abs().max()
    _, many = datasets.waves(500, n_classes=3, padding="zeros").tensors
    assert set(many.tolist()) == {0, 1, 2}


def test_the_shapes_of_waves_have_a_seed_of_their_own():
    def still(generator_seed, shapes_seed):
        shifts = torch.zeros(50)
        x, y = datasets.waves(
            50,
            noise=0.0,
            shifts=shifts,
            shapes_seed=shapes_seed,
            generator=seeded_generator(generator_seed),
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
    ids=["max_shift", "padding", "n_classes"],
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


def test_shapes_are_labelled_by_how_far_they_are_rotated():
    x, y = datasets.rotated_shapes(500, 1.0, n_shapes=3, noise=0.0).tensors
    assert x.shape == (500, 6, 2)
    assert set(y.tolist()) == {0, 1, 2, 3}
    assert (y == 0).double().mean().item() == pytest.approx(1 - 1 / torch.pi, abs=0.07)
    upright, labels = datasets.rotated_shapes(
        500, 1.0, n_shapes=3, noise=0.0, angles=torch.zeros(500)
    ).tensors
    assert labels.min() == 1
    first = upright[labels == 1]
    torch.testing.assert_close(first, first[:1].expand_as(first))
    with pytest.raises(ValueError, match="max_angle"):
        datasets.rotated_shapes(5, 4.0)
