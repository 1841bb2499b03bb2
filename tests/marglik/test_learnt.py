"""One call from a data set to a learnt augmentation, and what it refuses."""

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import laplace_invariance as li
from laplace_invariance.layers import mlp
from laplace_invariance.marglik import learnt as module

QUICK = {"n_epochs": 4, "n_samples": 2, "search": False}
OFTEN = {"n_epochs_burnin": 1, "marglik_frequency": 1}


class Images(Dataset):
    """Images of 8 x 9 pixels, as PIL images of bytes or as tensors, in three classes."""

    def __init__(self, n=24, kind="pil", labels=(0, 1, 2)):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(256, (n, 8, 9), generator=generator, dtype=torch.uint8)
        self.kind = kind
        self.labels = labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        label = self.labels[i % len(self.labels)]
        if self.kind == "pil":
            return Image.fromarray(self.images[i].numpy()), label
        return self.images[i].unsqueeze(0), torch.tensor(label)


def network(outputs=3):
    return mlp((1, 8, 9), outputs, width=5)


@pytest.mark.filterwarnings("ignore:the weights are not at a mode")
@pytest.mark.parametrize("kind", ["pil", "tensor"])
def test_a_data_set_teaches_ranges_that_are_exported(kind):
    augmentation = li.AffineImage(init=0.1, learn="rotation")
    found = li.learn_augmentation(network(), Images(kind=kind), augmentation, **QUICK, **OFTEN)
    assert found.shape == (1, 8, 9)
    assert augmentation.magnitudes()["rotation"] == pytest.approx(0.1)  # it was copied
    assert found.augmentation.magnitudes()["rotation"] != pytest.approx(0.1, abs=1e-6)
    assert found.ranges()["rotation"].endswith(" degrees")
    assert found.ranges()["x_translation"] == "±0.0 pixels"
    assert "rotation        ±" in str(found)
    assert f"log evidence    {found.evidence:.3f} per example" in str(found)
    image = torch.rand(1, 8, 9)
    assert found.to_transform()(image).shape == image.shape
    assert found.model(torch.rand(2, 1, 8, 9)).shape == (2, 3)


def test_the_recipe_is_that_of_the_experiments_and_can_be_changed(monkeypatch):
    seen = {}

    def spy(model, loader, likelihood, **options):
        seen.update(options, loader=loader, model=model)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "marglik_training", spy)
    with pytest.raises(KeyboardInterrupt):
        li.learn_augmentation(network(), Images(), lr_aug=0.2, n_epochs_burnin=7)
    assert seen["search"] is True
    assert (seen["lr_aug"], seen["n_epochs"], seen["n_epochs_burnin"]) == (0.2, 100, 7)
    assert seen["scheduler_kwargs"]["T_max"] == 100
    assert len(seen["loader"]) == 1
    x, y = seen["loader"].dataset.tensors
    assert (x.min() >= 0, x.max() <= 1, y.tolist()[:4]) == (True, True, [0, 1, 2, 0])
    assert seen["model"].augmentation.names == li.AffineImage().names


def differing():
    return [(torch.rand(1, 8, 9), 0), (torch.rand(1, 8, 8), 1)]


class Broken(Images):
    samples = [("photos/a.png", 0)] * 24

    def __getitem__(self, i):
        raise OSError("image file is truncated")


REFUSED = {
    "labels from 1": (
        lambda: Images(labels=(1, 2)),
        "labels are 1, 2, but 2 classes are labelled 0 to 1, without gaps; map them",
    ),
    "gap": (lambda: Images(labels=(0, 1, 3)), "labels are 0, 1, 3, but 3 classes"),
    "one class": (lambda: Images(labels=(0,)), "there is one class"),
    "too many classes": (lambda: Images(labels=(0, 1, 2, 3)), r"4 classes need outputs \[batch, 4"),
    "sizes": (differing, r"differ in shape: \[1, 8, 9\] at first, and \[1, 8, 8\] of example 1;"),
    "empty": (lambda: Images(0), "the data set is empty"),
    "broken": (Broken, r"example 0 \(photos/a.png\) cannot be read: image file is truncated"),
    "floats as labels": (
        lambda: TensorDataset(torch.rand(4, 1, 8, 9), torch.rand(4)),
        "labels must be integers, one per example",
    ),
}


@pytest.mark.parametrize(("build", "match"), REFUSED.values(), ids=REFUSED)
def test_bad_data_are_refused_with_the_reason(build, match):
    with pytest.raises(ValueError, match=match):
        li.learn_augmentation(network(), build(), **QUICK)


def test_what_is_no_data_set_of_pairs_is_refused():
    with pytest.raises(TypeError, match="must be a pair of input and target, got Tensor"):
        li.learn_augmentation(network(), [torch.rand(1, 8, 9)], **QUICK)
    loader = torch.utils.data.DataLoader(Images())
    with pytest.raises(TypeError, match=r"of a DataLoader, give its \.dataset"):
        li.learn_augmentation(network(), loader, **QUICK)
    images = [(torch.rand(1, 8, 9).numpy(), 0)]
    with pytest.raises(TypeError, match="example 0 must be a tensor or a PIL image, got ndarray"):
        li.learn_augmentation(network(), images, **QUICK)
    averaged = li.InvariantModel(network(), li.AffineImage())
    with pytest.raises(ValueError, match="has an augmentation already, itself of class Invariant"):
        li.learn_augmentation(averaged, Images(), **QUICK)


def test_normalised_images_are_warned_about():
    data = TensorDataset(torch.randn(6, 1, 8, 9), torch.arange(6) % 3)
    stop = nn.Sequential(*network(1))  # too few outputs, so that nothing is trained
    with (
        pytest.warns(UserWarning, match="which should be black: leave out normalisation"),
        pytest.raises(ValueError, match="3 classes need outputs"),
    ):
        li.learn_augmentation(stop, data, **QUICK)
