"""Images in random quadrants, and images brought to one size."""

import pytest
import torch

from laplace_invariance.datasets import framed, quadrants


def test_quadrants_are_where_the_labels_say():
    images, labels = torch.rand(50, 3, 6, 6), torch.randint(7, (50,))
    x, y = quadrants(images, labels, "both", size=12)
    assert x.shape == (50, 3, 12, 12)
    assert torch.equal(y // 4, labels)
    assert set((y % 4).tolist()) == {0, 1, 2, 3}
    for image, large, place in zip(images, x, (y % 4).tolist(), strict=True):
        top, left = 6 * (place // 2), 6 * (place % 2)
        torch.testing.assert_close(large[:, top : top + 6, left : left + 6], image)
        assert large.sum() == pytest.approx(image.sum().item())  # black elsewhere


def test_quadrants_of_either_task_are_the_same_draws():
    images, labels = torch.rand(9, 1, 5, 7), torch.arange(9)
    x, y = quadrants(images, labels, "digit", torch.Generator().manual_seed(3))
    again, both = quadrants(images, labels, "both", torch.Generator().manual_seed(3))
    assert torch.equal(x, again)
    assert torch.equal(y, labels)
    assert torch.equal(both // 4, labels)
    assert x.shape == (9, 1, 32, 32)
    assert not torch.equal(
        both, quadrants(images, labels, "both", torch.Generator().manual_seed(4))[1]
    )


def test_images_that_shrink_keep_their_mean():
    images = torch.rand(4, 1, 28, 28)
    x, _ = quadrants(images, torch.zeros(4, dtype=torch.long), "digit")
    torch.testing.assert_close(4 * x.mean((1, 2, 3)), images.mean((1, 2, 3)), rtol=0.02, atol=0)
    checkers = (
        (torch.arange(28) % 2).to(x).expand(1, 1, 28, 28)
    )  # alias-free: grey, not stripes of another width
    tile = quadrants(checkers, torch.zeros(1, dtype=torch.long), "digit")[0]
    assert (tile[tile > 0] - 0.5).abs().max() < 0.2


@pytest.mark.parametrize(
    ("images", "labels", "options", "match"),
    [
        (
            torch.rand(2, 1, 4, 4),
            torch.zeros(2).long(),
            {"task": "place"},
            "unknown task 'place'; choose from digit, both",
        ),
        (
            torch.rand(2, 1, 4, 4),
            torch.zeros(2).long(),
            {"size": 15},
            "size must be even and positive.* got 15",
        ),
        (
            torch.rand(2, 4, 4),
            torch.zeros(2).long(),
            {},
            r"\[n, channels, height, width\], got shape \[2, 4, 4\]",
        ),
        (2 + torch.rand(2, 1, 4, 4), torch.zeros(2).long(), {}, r"must be in \[0, 1\]"),
        (
            torch.rand(2, 1, 4, 4),
            torch.zeros(3).long(),
            {},
            r"2 images need labels \[2\] of integers, got shape \[3\]",
        ),
        (torch.rand(2, 1, 4, 4), torch.zeros(2), {}, "of torch.float"),
    ],
)
def test_quadrants_refuses(images, labels, options, match):
    with pytest.raises(ValueError, match=match):
        quadrants(images, labels, **{"task": "digit", **options})


@pytest.mark.parametrize(
    ("shape", "inner"),
    [
        ((28, 28), (slice(2, 30), slice(2, 30))),
        ((8, 8), (slice(0, 32), slice(0, 32))),
        ((10, 10), (slice(1, 31), slice(1, 31))),
        ((5, 15), (slice(11, 21), slice(1, 31))),
        ((64, 32), (slice(0, 32), slice(8, 24))),
        ((32, 32), (slice(0, 32), slice(0, 32))),
    ],
)
def test_framed_images_fill_the_frame_as_far_as_they_fit(shape, inner):
    images = 0.5 + 0.5 * torch.rand(2, 3, *shape)
    x = framed(images)
    assert x.shape == (2, 3, 32, 32)
    filled = torch.zeros(32, 32, dtype=torch.bool)
    filled[inner] = True
    assert torch.equal((x > 0).all(0).all(0), filled)
    assert torch.equal((x > 0).any(0).any(0), filled)
    if max(shape) in (28, 32):
        torch.testing.assert_close(x[:, :, inner[0], inner[1]], images)


def test_framed_refuses():
    with pytest.raises(ValueError, match="got shape"):
        framed(torch.rand(3, 8, 8))
    with pytest.raises(ValueError, match="size must be positive, got 0"):
        framed(torch.rand(2, 1, 8, 8), 0)
