"""Existing networks with freer paths beside their convolutions."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.layers import (
    ResidualPathway,
    convert,
)
from laplace_invariance.metrics import (
    layer_report,
)


def existing():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(4, 3, 1),
        nn.Flatten(),
    )


def test_convert_keeps_weights_and_what_is_computed():
    net, x = existing().eval(), torch.randn(5, 1, 8, 8)
    before = copy.deepcopy(net.state_dict())
    exact, near = convert(net, (1, 8, 8), scale=0.0), convert(net, (1, 8, 8))
    torch.testing.assert_close(exact(x), net(x))
    assert 0 < (near(x) - net(x)).norm() / net(x).norm() < 0.1
    assert isinstance(near[0], ResidualPathway)
    assert isinstance(near[2][0], ResidualPathway)
    assert type(near[4]) is nn.Conv2d  # has one position
    assert torch.equal(near[0].conv.weight, net[0].weight)
    assert near[0].conv.weight is not net[0].weight
    assert (near[0].f_fc.in_shape, near[0].f_fc.out_shape) == ((8, 8), (4, 4))
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert not near.training
    assert convert(net.train(), (1, 8, 8)).training
    assert list(convert(net, (1, 8, 8), kind="conv+s_fc+fc")[0].paths) == ["conv", "s_fc", "fc"]


def test_converted_networks_learn_by_evidence():
    x, y = torch.randn(20, 1, 8, 8), torch.randint(3, (20,))
    net = convert(existing().eval(), (1, 8, 8))
    settings = {"n_epochs": 2, "n_hypersteps": 2, "prior_structure": "path"}
    result = li.marglik_training(net, DataLoader(TensorDataset(x, y), batch_size=10), **settings)
    assert {"0.conv", "0.f_fc", "2.0.conv", "2.0.f_fc"} <= set(result.prior_precisions)
    assert set(layer_report(result.la).chosen) == {"0", "2.0"}


def test_convert_treats_a_convolution_alike_wherever_it_is():
    shared = nn.Conv2d(1, 1, 3, padding=1)
    net = convert(nn.Sequential(shared, nn.ReLU(), shared, nn.Flatten()), (1, 4, 4))
    assert isinstance(net[0], ResidualPathway)
    assert net[0] is net[2]
    assert isinstance(convert(shared, (1, 4, 4)), ResidualPathway)

    class Other(nn.Conv2d):
        pass

    with pytest.warns(UserWarning, match="0: subclasses of nn.Conv2d.*left as they are"):
        net = convert(
            nn.Sequential(Other(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)), (1, 4, 4)
        )
    assert type(net[0]) is Other
    assert isinstance(net[1], ResidualPathway)


def test_convert_refuses_what_it_cannot_do():
    for kind in ("f_fc", "conv", "conv+gconv", "conv+f_fc+f_fc"):
        with pytest.raises(ValueError, match="convert keeps the convolutions"):
            convert(existing(), (1, 8, 8), kind)
    with pytest.raises(ValueError, match="channels, height and width"):
        convert(existing(), (8, 8))
    with pytest.raises(ValueError, match="nothing to convert"):
        convert(nn.Linear(3, 2), (1, 1, 3))
    shared = nn.Conv2d(1, 1, 3)
    with pytest.raises(ValueError, match=r"0 is called with several sizes, \(8, 8\) and \(6, 6\)"):
        convert(nn.Sequential(shared, shared, nn.Flatten()), (1, 8, 8))
