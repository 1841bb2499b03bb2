"""Small models and data that many tests share."""

import dataclasses
import inspect
import math
import random
import typing

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance import FiniteGroup, InvariantModel
from laplace_invariance.marglik import Evidence, Refit
from laplace_invariance.marglik.settings import Settings


class Gain(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(n) + 0.5)

    def forward(self, x):
        return self.gain * x


class Stretch(li.Augmentation):
    """Inputs times ``1 + e * eta``; tokens, which cannot be stretched, are counted on."""

    def __init__(self):
        super().__init__()
        self.register_hyperparameter("eta", torch.tensor(0.4))

    def sample(self, n, n_samples, generator=None):
        return torch.rand(n, n_samples, generator=generator, dtype=torch.float64) * 2 - 1

    def fixed(self, n_samples):
        return torch.linspace(-1, 1, n_samples + 2)[1:-1].unsqueeze(0)

    def transform(self, x, draws):
        if not x.is_floating_point():
            return torch.stack([(x + s) % 11 for s in range(draws.shape[1])], dim=1)
        factors = 1 + draws * self.hyperparameter("eta")
        return x.unsqueeze(1) * factors.view(*factors.shape, *[1] * (x.ndim - 1))


# Training of small networks on points in the plane.


def labelled_points(n=30, classes=3):
    """Points in the plane, labelled by angle and radius; without classes, with their radius."""
    x = torch.randn(n, 2)
    radius = x.norm(dim=1)
    if not classes:
        return TensorDataset(x, radius.unsqueeze(1))
    return TensorDataset(x, (x[:, 0] > 0).long() + (radius > 1.3).long())


def shuffled(data, batch_size=7, **kwargs):
    return DataLoader(data, batch_size=batch_size, shuffle=True, **kwargs)


def plain_network(outputs=3):
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs))


def invariant_network(outputs=3, **kwargs):
    augmentation = li.AffinePoints(init={"rotation": 0.2}, learn="rotation", **kwargs)
    return li.InvariantModel(plain_network(outputs), augmentation, n_samples=3)


def training_settings(train_loader, **changes):
    """The settings that ``marglik_training`` would make of these arguments."""
    parameters = inspect.signature(li.marglik_training).parameters.values()
    arguments = {parameter.name: parameter.default for parameter in parameters}
    arguments |= {"train_loader": train_loader, "objective": Evidence(), "estimator": Refit()}
    arguments |= changes
    groups = {}
    for name, kind in typing.get_type_hints(Settings).items():
        if name == "ranks":  # one process
            continue
        names = [field.name for field in dataclasses.fields(kind)]
        groups[name] = kind(**{name: arguments[name] for name in names})
    return Settings(**groups)


class NoisyPoints(torch.utils.data.Dataset):
    """Points with noise from numpy's global generator, from Python's, and from one of its own."""

    def __init__(self):
        self.data = labelled_points()
        self.rng = np.random.default_rng(3)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        x, y = self.data[i]
        noise = np.random.randn() + random.random() + self.rng.normal()  # noqa: NPY002
        return x + 0.01 * noise, y


def noisy_run(directory, name="run", **options):
    """A run with every kind of randomness: loader, draws, dropout, choice of batches, callbacks."""
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002
    random.seed(7)
    data = torch.utils.data.Subset(NoisyPoints(), range(25))
    net = nn.Sequential(
        nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3)
    )
    augmentation = li.AffinePoints(init={"rotation": 0.2}, learn=("rotation", "x_scale"))
    arguments = {
        "n_epochs": 6,
        "n_hypersteps": 2,
        "estimator": Refit(n_hyper_batches=2, generator=torch.Generator().manual_seed(5)),
        "scheduler_cls": torch.optim.lr_scheduler.CosineAnnealingLR,
        "scheduler_kwargs": {"T_max": 30},
        "lr_aug_min": 0.01,
        "optimizer_kwargs": {"lr": np.float64(1e-2)},
        "checkpoint": directory / f"{name}.pt",
        "history": directory / f"{name}.jsonl",
    }
    arguments |= options
    arguments["callbacks"] = [lambda record, model: torch.rand(3), *options.get("callbacks", [])]
    return li.marglik_training(
        li.InvariantModel(net, augmentation, 3, generator=torch.Generator().manual_seed(4)),
        shuffled(data, generator=torch.Generator().manual_seed(3)),
        **arguments,
    )


def without_times(history):
    return [{key: value for key, value in record.items() if key != "seconds"} for record in history]


class Bad(nn.Module):
    """Passes its input on, but is not finite while ``when(self)`` says so."""

    def __init__(self, when):
        super().__init__()
        self.when = when
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * float("nan") if self.when(self) else x


def assert_drawn(path):
    """Raise unless a figure is an image with many colours that is not mostly blank."""
    import numpy as np
    from matplotlib.image import imread

    pixels = imread(path)[::3, ::3, :3]
    assert min(pixels.shape[:2]) > 100
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 30
    assert (pixels < 0.9).any(-1).mean() > 0.01


def write_images(path, size, seed=0):
    """Write random images in three classes, 50 to train on and 20 to test on; return the path."""
    import numpy as np

    source = np.random.default_rng(seed)
    arrays = {}
    for part, n in (("train", 50), ("test", 20)):
        arrays[f"x_{part}"] = source.integers(0, 256, (n, size, size), dtype=np.uint8)
        arrays[f"y_{part}"] = source.integers(0, 3, n)
    np.savez(path, **arrays)
    return str(path)


def affine_matrix(layer, shape):
    """Return matrix and offset of an affine layer for inputs of a shape, from unit vectors."""
    units = torch.eye(torch.Size(shape).numel()).unflatten(1, shape)
    offset = layer(torch.zeros(1, *shape)).detach().flatten()
    return layer(units).detach().flatten(1).T - offset.unsqueeze(1), offset


def place_of(model, name):
    """Return where a parameter is in the vector of all parameters."""
    start = 0
    for found, parameter in model.named_parameters():
        if found == name:
            return slice(start, start + parameter.numel())
        start += parameter.numel()
    raise AssertionError(name)


def randomised(net, size=0.3):
    """Leave the initialisation, where much is zero."""
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=size)
    return net


def images(n=7, size=5):
    """Return noise with two channels."""
    return torch.randn(n, 2, size, size, dtype=torch.float64)


def quarter_turned(x):
    """Return the orbit of quarter turns, without the identity, by torch's own function."""
    return [x.rot90(k, (-2, -1)) for k in (1, 2, 3)]


def small_cnn(size=5, n_out=3):
    """Return a network for such images that is not invariant to anything."""
    n_features = 4 * (size - 2) ** 2
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(n_features, n_out))


def bright_or_dark(n=60):
    """Return images whose class is the brightness of their centre, which rotations keep."""
    x = images(n)
    return DataLoader(TensorDataset(x, (x[:, :, 2, 2].sum(1) > 0).long()), batch_size=20), x


def averaged_cnn():
    """Return the network averaged over quarter turns."""
    group = FiniteGroup("quarter_turns", init=1.0)
    return InvariantModel(small_cnn(), group)


# Number of rotations of the named groups.
N_ROTATIONS = {"p1": 1, "p2": 2, "p4": 4, "pm": 1, "p4m": 4}


def act(group, element, x):
    """Return images under an element of a group, by torch's own rotations and flips."""
    if group.name not in N_ROTATIONS:
        return x if group.name == "hue" else x.roll(element, -2)
    flips, rotations = divmod(element, N_ROTATIONS[group.name])
    flipped = x.flip(-1) if flips else x
    return flipped.rot90(rotations * 4 // N_ROTATIONS[group.name], (-2, -1))


def after_inverse(group, r, s):
    """Return ``r^-1 s``, the element which, followed by ``r``, is ``s``."""
    if group.name not in N_ROTATIONS:
        return (s - r) % 3
    probe = torch.arange(9).view(3, 3)
    (found,) = [
        q
        for q in range(group.order)
        if torch.equal(act(group, r, act(group, q, probe)), act(group, s, probe))
    ]
    return found


def twin_basis(kind, omega, anchors, height, width):
    """Return ``Phi`` of a basis, one entry at a time."""
    points = [
        (i - (height - 1) / 2, j - (width - 1) / 2) for i in range(height) for j in range(width)
    ]

    def kernel(a, b):
        return math.exp(-(omega**2) * ((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) / 2)

    k_zt = torch.tensor([[kernel(z, t) for t in points] for z in anchors])
    if kind == "exponential":
        return k_zt
    k_zz = torch.tensor([[kernel(z, y) for y in anchors] for z in anchors])
    return torch.linalg.inv(k_zz + 1e-4 * torch.eye(len(k_zz))) @ k_zt


def seeded_generator(seed=0):
    return torch.Generator().manual_seed(seed)
