"""Double backward passes through single layers: those of autograd, with and without shortcuts."""

import pytest
import torch
from torch import nn

from laplace_invariance.curvature.trace.shortcuts import shortcuts

IMAGES, MAPS = (2, 1, 7, 8), (2, 4, 7, 8)
CASES = {
    "grey": (nn.Conv2d(1, 3, 3), IMAGES),
    "grey, padded": (nn.Conv2d(1, 3, (3, 2), padding=1), IMAGES),
    "grey, padded widely": (nn.Conv2d(1, 3, 3, padding=3), IMAGES),
    "grey, strided": (nn.Conv2d(1, 3, 3, stride=2), IMAGES),
    "grey, strided and dilated": (nn.Conv2d(1, 3, 3, stride=2, dilation=2), IMAGES),
    "channels": (nn.Conv2d(4, 3, 3, stride=(1, 2)), MAPS),
    "groups": (nn.Conv2d(4, 6, 3, padding=1, groups=2), MAPS),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4), MAPS),
    "same": (nn.Conv2d(4, 3, 3, padding="same"), MAPS),
    "circular": (nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"), MAPS),
    "one axis": (nn.Conv1d(4, 3, 3, dilation=2), (2, 4, 7)),
    "three axes": (nn.Conv3d(1, 3, 2), (2, 1, 3, 4, 5)),
    "no batch": (nn.Conv2d(4, 3, 3), (4, 7, 8)),
    "smooth": (nn.GELU(), MAPS),
    "piecewise linear": (nn.LeakyReLU(0.1), MAPS),
    "in place": (nn.Sequential(nn.Conv2d(4, 3, 3), nn.SiLU(inplace=True)), MAPS),
    "pooling": (nn.MaxPool2d(2), MAPS),
    "pooled": (nn.Sequential(nn.Tanh(), nn.MaxPool2d(3, 2, padding=1)), MAPS),
    "pooled, one axis": (nn.Sequential(nn.Tanh(), nn.MaxPool1d(2)), (2, 4, 7)),
}
BY_AUTOGRAD = ("same", "circular", "no batch")


@pytest.mark.parametrize("name", CASES)
def test_derivatives_are_those_of_autograd(name):
    layer, shape = CASES[name]
    x = torch.randn(shape, requires_grad=True)
    found = []
    for modules in ([], list(layer.double().modules())):
        with shortcuts(modules):
            y = layer(x.sin())
        column = torch.linspace(-1, 2, y.numel()).view_as(y)
        first, again = (
            torch.autograd.grad(y, x, direction, create_graph=True)[0]
            for direction in (column, column.cos())
        )
        found.append([y, first, *torch.autograd.grad((first * again).sin().sum(), x)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", CASES)
def test_shortcuts_are_taken_where_they_can_be(name):
    layer, shape = CASES[name]
    x = torch.randn(shape, requires_grad=True)
    single = layer if not isinstance(layer, nn.Sequential) else layer[0]
    with shortcuts(single.modules()):
        kind = type(single.double()(x).grad_fn)
    assert kind.__name__.startswith("_") == (name not in BY_AUTOGRAD)  # as the functions here do


def test_nothing_is_left_behind():
    layer = nn.Conv2d(4, 3, 3)
    with shortcuts([layer]):
        assert layer._forward_hooks
    assert not layer._forward_hooks
    with shortcuts([layer]):
        assert "ConvolutionBackward0" in str(layer(torch.randn(MAPS)).grad_fn)  # of the weights
