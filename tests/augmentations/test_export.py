"""Learnt augmentations as transforms of torchvision: the distribution, images, and workers."""

import ast
import math
import pickle
from pathlib import Path

import PIL.Image
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

import laplace_invariance.augmentations
from laplace_invariance import learning, named_hyperparameters
from laplace_invariance.augmentations import (
    AffineImage,
    AffinePoints,
    Colour,
    Compose,
    FiniteGroup,
    LieGroup,
    Sequence,
)
from laplace_invariance.hyper import differentiable

IMAGE, SIGNAL = (3, 7, 5), (3, 11)
CASES = {
    "affine": (lambda: AffineImage(init=0.3), IMAGE),
    "correlated": (lambda: AffineImage(init=0.3, correlated=True, constraint="tanh"), IMAGE),
    "flips": (lambda: FiniteGroup("flips", init=0.5), IMAGE),
    "composed": (lambda: Compose(AffineImage(init=0.3), AffineImage(init=0.1)), IMAGE),
    "point": (lambda: AffinePoints(init=0.3), (2,)),
    "points": (lambda: AffinePoints(3, init=0.3), (7, 3)),
    "signal": (lambda: Sequence(init=0.3), SIGNAL),
}
every_case = pytest.mark.parametrize(("make", "shape"), CASES.values(), ids=CASES)


def seeded(function, *arguments):
    torch.manual_seed(3)
    return function(*arguments)


def picture(mode="RGB"):
    return v2.functional.to_pil_image(
        torch.randint(256, (len(mode), 7, 5), dtype=torch.uint8), mode
    )


def pixels(image):
    return v2.functional.pil_to_tensor(image)


# the distribution


@every_case
def test_a_batch_is_transformed_as_by_the_augmentation(make, shape):
    augmentation, x = make(), torch.rand(5, *shape)
    if shape == (2,):  # a batch of points would be a set of points
        x = torch.rand(5, 7, 2)
    result = seeded(augmentation.to_transform(), x)
    assert torch.equal(result, seeded(augmentation, x))
    assert not torch.equal(result, x)


@every_case
def test_one_input_is_a_batch_of_one(make, shape):
    augmentation, x = make(), torch.rand(shape)
    result = seeded(augmentation.to_transform(), x)
    assert result.shape == x.shape
    assert torch.equal(result, seeded(augmentation, x.unsqueeze(0))[0])


def test_every_element_of_a_batch_gets_its_own_draw():
    x = torch.rand(IMAGE).expand(4, -1, -1, -1)
    result = AffineImage(init=0.3).to_transform()(x)
    assert len({tuple(image.flatten().tolist()) for image in result}) == 4


def largest_gap(values, width):
    """Kolmogorov's distance from the uniform distribution on ``[-width, width]``, times sqrt(n)."""
    n = len(values)
    levels = (values.sort().values / width + 1) / 2
    steps = torch.arange(n + 1) / n
    return math.sqrt(n) * max((levels - steps[:-1]).max(), (steps[1:] - levels).max()).item()


@pytest.mark.parametrize("draws", ["independent", "sobol", "grid"])
def test_angles_are_uniform_in_the_learnt_range(draws):
    """Kolmogorov's distance exceeds 1.95 once in a thousand times."""
    transform = AffinePoints(init={"rotation": 1.2}, learn="rotation", draws=draws).to_transform()
    one_by_one = torch.stack([transform(torch.tensor([1.0, 0.0])) for _ in range(1000)])
    at_once = transform(torch.tensor([1.0, 0.0]).expand(1000, 1, 2)).squeeze(1)
    for points in (one_by_one, at_once):
        angles = torch.atan2(points[:, 1], points[:, 0])
        assert angles.abs().max() <= 1.2
        assert largest_gap(angles, 1.2) < 1.95
        assert largest_gap(angles, 1.5) > 1.95


def test_angles_of_images_are_uniform_in_the_learnt_range():
    across = torch.linspace(-1, 1, 33)
    spot = torch.exp(-50 * ((across - 0.5) ** 2 + across.unsqueeze(1) ** 2))  # right of the centre
    transform = AffineImage(init={"rotation": 1.2}).to_transform()
    rotated = transform(spot.expand(1000, 1, 33, 33)).squeeze(1)
    x, y = (rotated * across).sum((1, 2)), -(rotated * across.unsqueeze(1)).sum((1, 2))
    assert largest_gap(torch.atan2(y, x), 1.2) < 1.95


def test_elements_of_a_group_come_by_their_weight():
    group = FiniteGroup("flips")
    group.eta.data.copy_(torch.tensor([0.5, 0.0, 0.25]))
    x = torch.arange(4.0).view(1, 2, 2)
    first = group.to_transform()(x.expand(4000, 1, 2, 2))[
        :, 0, 0, 0
    ].long()  # tells which element it was
    shares = first.bincount(minlength=4) / 4000
    weights = group.magnitudes()
    expected = [weights["identity"], weights["horizontal_flip"], 0.0, weights["half_turn"]]
    torch.testing.assert_close(shares, torch.tensor(expected), atol=0.03, rtol=0)


# kinds of images


def test_uint8_images_are_rounded():
    augmentation = AffineImage(init=0.3)
    x = torch.randint(256, IMAGE, dtype=torch.uint8)
    result = seeded(augmentation.to_transform(), x)
    assert result.dtype == torch.uint8
    expected = seeded(augmentation, x.float().unsqueeze(0) / 255)[0]
    torch.testing.assert_close(result.float() / 255, expected, atol=0.51 / 255, rtol=0)


@pytest.mark.parametrize("augmentation", [FiniteGroup("flips"), Colour()], ids=["flips", "colour"])
def test_uint8_images_are_kept_by_the_identity(augmentation):
    x = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(3, -1, -1)
    assert torch.equal(augmentation.to_transform()(x), x)


def test_colours_are_clamped():
    colour = Colour(init={"brightness": 2.0, "hue": 2.0})
    x = torch.rand(50, *IMAGE)
    result = seeded(colour.to_transform(), x)
    assert result.min() == 0
    assert result.max() == 1
    torch.testing.assert_close(result, seeded(colour, x).clamp(0, 1))
    as_bytes = (255 * x).round().to(torch.uint8)
    expected = seeded(colour, as_bytes.float() / 255).clamp(0, 1)
    torch.testing.assert_close(
        seeded(colour.to_transform(), as_bytes).float() / 255, expected, atol=0.51 / 255, rtol=0
    )
    for augmentation in (colour, Compose(colour, AffineImage())):
        with pytest.raises(
            ValueError,
            match=r"images in \[0, 1\], got values from -3.00 to 2.00; normalise after it",
        ):
            augmentation.to_transform()(torch.tensor([-3.0, 0.0, 2.0]).view(3, 1, 1))
    unbounded = seeded(AffineImage(init=0.3).to_transform(), 5 * x)
    torch.testing.assert_close(unbounded, 5 * seeded(AffineImage(init=0.3), x))


def test_tv_images_stay_images():
    transform, x = (
        AffineImage(init=0.3).to_transform(),
        tv_tensors.Image(torch.randint(256, IMAGE, dtype=torch.uint8)),
    )
    result = seeded(transform, x)
    assert type(result) is tv_tensors.Image
    assert torch.equal(
        result.as_subclass(torch.Tensor), seeded(transform, x.as_subclass(torch.Tensor))
    )
    assert type(transform(tv_tensors.Image(torch.rand(2, *IMAGE)))) is tv_tensors.Image


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
def test_pil_images_stay_pil_images(mode):
    transform, image = AffineImage(init=0.3).to_transform(), picture(mode)
    result = seeded(transform, image)
    assert isinstance(result, PIL.Image.Image)
    assert (result.mode, result.size) == (mode, image.size)
    assert torch.equal(pixels(result), seeded(transform, pixels(image)))


# samples


@pytest.mark.parametrize(
    "make",
    [picture, lambda: tv_tensors.Image(torch.rand(IMAGE)), lambda: torch.rand(IMAGE)],
    ids=["PIL", "tv_tensor", "tensor"],
)
@pytest.mark.parametrize(
    "label",
    [3, "cat", torch.tensor(3), torch.tensor(0.5), torch.tensor([3, 4]), None],
    ids=["int", "str", "integer tensor", "number", "vector", "none"],
)
def test_labels_pass(make, label):
    transform, image = AffineImage(init=0.3).to_transform(), make()
    result, same = transform(image, label)
    assert same is label
    assert type(result) is type(image) or isinstance(image, PIL.Image.Image)
    sample = transform({"label": label, "image": image})  # first, too
    assert sample["label"] is label
    assert not torch.equal(v2.functional.to_image(sample["image"]), v2.functional.to_image(image))


def test_images_of_one_sample_get_the_same_draw():
    transform, image = AffineImage(init=0.3).to_transform(), picture()
    left, right, third = transform(image, image, tv_tensors.Image(pixels(image)))
    assert torch.equal(pixels(left), pixels(right))
    assert torch.equal(pixels(left), third.as_subclass(torch.Tensor))
    assert not torch.equal(pixels(left), pixels(transform(image)))


def test_works_among_other_transforms():
    shape, colour = AffineImage(init=0.3).to_transform(), Colour(init=0.2).to_transform()
    to_floats = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    pipeline = v2.Compose([shape, *to_floats, colour, v2.Normalize([0.5] * 3, [0.5] * 3)])
    result, label = pipeline(picture(), 3)
    assert result.shape == IMAGE
    assert label == 3


def test_masks_boxes_and_videos_are_rejected():
    boxes = tv_tensors.BoundingBoxes(torch.zeros(1, 4), format="XYXY", canvas_size=(7, 5))
    transform, image = AffineImage(init=0.3).to_transform(), torch.rand(IMAGE)
    for other in (
        boxes,
        tv_tensors.Mask(torch.zeros(7, 5)),
        tv_tensors.Video(torch.zeros(2, *IMAGE)),
    ):
        with pytest.raises(TypeError, match=f"{type(other).__name__} is not supported"):
            transform(image, other)


# a thing of its own


@every_case
def test_later_learning_changes_nothing(make, shape):
    augmentation, x = make(), torch.rand(shape)
    with learning(augmentation, optimizer=torch.optim.SGD), differentiable():
        sum(tensor.sum() for _, tensor in named_hyperparameters(augmentation)).backward()
        transform = augmentation.to_transform()
        expected, words = seeded(transform, x), repr(transform)
        sum(tensor.sum() for _, tensor in named_hyperparameters(augmentation)).backward()
        result = seeded(transform, x)
    assert torch.equal(result, expected)
    assert not result.requires_grad
    assert repr(transform) == words != repr(augmentation.to_transform())
    frozen = [tensor for _, tensor in named_hyperparameters(transform)]
    assert frozen
    assert not any(tensor.requires_grad for tensor in frozen)
    assert all(tensor.requires_grad for _, tensor in named_hyperparameters(augmentation))


def test_a_transform_does_not_touch_what_a_curvature_pass_records():
    from laplace_invariance.draws import recording

    tape = []
    with recording(tape):
        AffineImage(init=0.3).to_transform()(torch.rand(IMAGE))
    assert not tape


@every_case
def test_is_picklable(make, shape):
    transform, x = make().to_transform(torch.Generator().manual_seed(5)), torch.rand(shape)
    copy = pickle.loads(pickle.dumps(transform))
    assert torch.equal(copy(x), transform(x))
    assert repr(copy) == repr(transform)


def test_draws_come_from_the_generator():
    augmentation, x = AffineImage(init=0.3), torch.rand(IMAGE)
    state = torch.get_rng_state()
    one, other = (augmentation.to_transform(torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one(x), other(x))
    assert not torch.equal(one(x), one(x))
    assert torch.equal(torch.get_rng_state(), state)


def test_says_its_ranges():
    transform = Compose(
        AffineImage(init={"rotation": math.pi / 6}), Colour(init={"brightness": math.log(2)})
    ).to_transform()
    assert isinstance(transform, v2.Transform)
    assert "rotation: ±30.0 degrees" in transform.extra_repr()
    assert repr(transform) == f"LearntTransform({transform.extra_repr()})"
    assert "brightness: factor 0.50 to 2.00" in repr(v2.Compose([transform]))


class Digits(Dataset):
    """Like MNIST: pairs of a PIL image and a label; the same image every time."""

    def __init__(self, transform):
        self.image = PIL.Image.fromarray(torch.randint(256, (28, 28), dtype=torch.uint8).numpy())
        self.transform = v2.Compose(
            [transform, v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
        )

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return self.transform(self.image), index


def test_workers_of_a_data_loader_draw_differently():
    loader = DataLoader(Digits(AffineImage(init=0.3).to_transform()), batch_size=3, num_workers=2)
    seen = set()
    for _ in range(2):  # epochs differ, too
        for images, labels in loader:
            assert images.shape == (3, 1, 28, 28)
            assert labels.shape == (3,)
            seen.update((image.sum().item(), image.square().sum().item()) for image in images)
    assert len(seen) == 24


class Errors(Digits):
    """What the transform says against its use."""

    def __getitem__(self, index):
        with pytest.raises(RuntimeError) as caught:
            super().__getitem__(index)
        return str(caught.value)


def test_a_generator_in_workers_is_rejected():
    transform = AffineImage(init=0.3).to_transform(torch.Generator())
    for (message,) in DataLoader(Errors(transform), num_workers=1):
        assert "workers would repeat each other" in message


def test_torchvision_is_imported_by_the_export_only():
    def imported(body):
        for node in body:
            if isinstance(node, ast.ImportFrom):
                yield node.module
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)

    folder = Path(laplace_invariance.augmentations.__file__).parent
    found = {
        path.stem
        for path in folder.glob("*.py")
        if any(
            "torchvision" in name or name.endswith(".export")
            for name in imported(ast.parse(path.read_text()).body)
        )
    }
    assert found == {"export"}


class Doubling(LieGroup):
    def __init__(self):
        super().__init__(["scale"], torch.eye(2).unsqueeze(0), [math.inf])


def batches():
    return [tv_tensors.Image(torch.rand(n, *IMAGE)) for n in (2, 3)]


REJECTED = {
    "no input_ndims": (lambda: Doubling().to_transform(), ValueError, "set input_ndims"),
    "no channels": (
        lambda: AffineImage().to_transform()(torch.rand(7, 5)),
        ValueError,
        "3 dimensions, or of 4 with a batch",
    ),
    "four dimensions": (
        lambda: AffinePoints().to_transform()(torch.rand(2, 5, 7, 2)),
        ValueError,
        "1 or 2 dimensions, or of 3 with",
    ),
    "integers": (
        lambda: AffineImage().to_transform()(torch.zeros(IMAGE).long()),
        TypeError,
        "nothing to transform",
    ),
    "integer signals": (
        lambda: Sequence().to_transform()(torch.zeros(SIGNAL).long()),
        TypeError,
        "floating-point tensors",
    ),
    "signals of bytes": (
        lambda: Sequence().to_transform()(torch.zeros(SIGNAL).byte()),
        TypeError,
        "floating-point tensors",
    ),
    "picture for a signal": (
        lambda: Sequence().to_transform()(picture()),
        TypeError,
        "Sequence does not transform images",
    ),
    "palette": (
        lambda: AffineImage().to_transform()(picture().convert("P")),
        TypeError,
        "got 'P'; convert",
    ),
    "batch sizes": (
        lambda: AffineImage().to_transform()(batches()),
        ValueError,
        r"batches of \[2, 3\]",
    ),
}


@pytest.mark.parametrize(("call", "error", "match"), REJECTED.values(), ids=REJECTED)
def test_bad_input_is_rejected(call, error, match):
    with pytest.raises(error, match=match):
        call()
