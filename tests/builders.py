"""Small models and data that many tests share."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_invariance import FiniteGroup, InvariantModel


class Gain(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(n) + 0.5)

    def forward(self, x):
        return self.gain * x


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
