"""Batch norms that keep their statistics."""

import torch
from torch import nn

from laplace_invariance.layers import FixedStatistics


def network():
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 5))
    for _ in range(3):
        net(2 + torch.randn(7, 2, 5, 5))
    return net


def test_training_and_evaluation_are_the_same_function():
    net, x = network(), torch.randn(4, 2, 5, 5)
    kept = {name: buffer.clone() for name, buffer in net.named_buffers()}
    fixed = FixedStatistics(net)
    trained = fixed.train()(x)
    torch.testing.assert_close(trained, fixed.eval()(x))
    torch.testing.assert_close(dict(net.named_buffers()), kept)
    assert not torch.allclose(trained, net.train()(x))


def test_everything_else_changes_its_mode():
    net = FixedStatistics(nn.Sequential(nn.Dropout(), network()))
    model = nn.Sequential(net, nn.Tanh()).eval().train()
    assert model[0].net[0].training
    assert not model[0].net[1][1].training
    assert model[0].net[1][1].weight.requires_grad
    assert not model.eval()[0].net[0].training
