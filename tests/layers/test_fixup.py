"""Residual networks without normalisation: their start, and the rules of their scalars."""

import pytest
import torch
from builders import randomised
from torch import nn
from twins import block_diagonal, ggn

from laplace_invariance.curvature import (
    AugmentedGGN,
)
from laplace_invariance.layers import (
    FixupResNet,
    ScalarBias,
    ScalarScale,
)


@pytest.mark.parametrize("size", [8, 13])
def test_fixup_starts_at_zero_with_every_block_linear_in_its_shortcut(size):
    net = FixupResNet(3, 5, depth=8, width=4)
    x = torch.randn(2, 3, size, size)
    assert torch.equal(net(x), torch.zeros(2, 5))
    h = net.start(x)
    torch.testing.assert_close(net.blocks[0](h), h)  # not negative, so that the ReLU keeps it
    for block in net.blocks[1:]:
        expected = block.shortcut(h).relu()
        h = block(h)
        torch.testing.assert_close(h, expected)
        assert h.abs().max() > 0.01


def test_fixup_scales_the_first_convolutions_of_blocks_by_their_number():
    for depth, n_blocks in ((8, 3), (26, 12)):
        net = FixupResNet(1, 2, depth=depth, width=32)
        assert len(net.blocks) == n_blocks
        inner = net.blocks[0].branch[0].weight
        assert inner.std().item() == pytest.approx((2 / (32 * 9)) ** 0.5 * n_blocks**-0.5, rel=0.05)
    assert net.blocks[-1].branch[0].in_channels == 4 * 32


def test_fixup_has_as_many_layers_as_it_says():
    net = FixupResNet(3, 10, depth=14, width=4)
    weights = [
        module
        for module in net.modules()
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3)
    ]
    assert len(weights) + 1 == 14
    for depth in (2, 10, 15):
        with pytest.raises(ValueError, match=rf"8, 14, 20, .*got {depth}"):
            FixupResNet(3, 10, depth=depth)


def test_fixup_trains_from_its_start_and_can_go_back():
    net = FixupResNet(1, 2, depth=8, width=4)
    x = torch.rand(32, 1, 8, 8)
    y = (x[:, 0, :, :4].mean((1, 2)) > x[:, 0, :, 4:].mean((1, 2))).long()
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.4  # log(2) at the start
    net.reset_parameters()
    assert torch.equal(net(x), torch.zeros(32, 2))
    assert all(
        module.bias.item() == 0 for module in net.modules() if isinstance(module, ScalarBias)
    )
    assert all(
        module.scale.item() == 1 for module in net.modules() if isinstance(module, ScalarScale)
    )


def test_scalars_have_exact_blocks():
    net = randomised(
        nn.Sequential(
            nn.Conv2d(1, 2, 3),
            ScalarBias(),
            nn.Tanh(),
            ScalarScale(),
            nn.Flatten(),
            nn.Linear(8, 3),
        )
    )
    x, y = torch.randn(5, 1, 4, 4), torch.randint(3, (5,))
    _, kron = AugmentedGGN(net, "classification").kron(x, y, N=5)
    exact = block_diagonal(ggn(net, net(x), "classification"), net)
    torch.testing.assert_close(kron.kfacs[2][0], exact[20:21, 20:21])
    torch.testing.assert_close(kron.kfacs[3][0], exact[21:22, 21:22])
