"""Networks: what they compute at first, that curvature covers them, and the rules of Fixup's scalars."""

import math

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twins import block_diagonal, central_differences, ggn

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN, check_model
from laplace_invariance.curvature.rules import rules
from laplace_invariance.layers import FixupResNet, ScalarBias, ScalarScale, Standardise, cnn, mlp


def randomised(net, size=0.3):
    """Leave the initialisation, where much is zero."""
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=size)
    return net


def test_standardised_images_have_zero_mean_and_unit_deviation():
    images = torch.rand(50, 2, 4, 5) * torch.tensor([1.0, 0.3]).view(2, 1, 1)
    y = Standardise.of(images)(images)
    torch.testing.assert_close(y.mean((0, 2, 3)), torch.zeros(2))
    torch.testing.assert_close(y.var((0, 2, 3), correction=0), torch.ones(2))


def test_standardise_subtracts_and_divides():
    layer = Standardise([1.0, 2.0], [0.5, 4.0])
    torch.testing.assert_close(layer(torch.tensor([[2.0, 4.0]])), torch.tensor([[2.0, 0.5]]))
    x = torch.rand(3, 2, 5, 7)
    torch.testing.assert_close(layer(x)[:, 1], (x[:, 1] - 2) / 4)
    assert set(layer.state_dict()) == {"mean", "std"}
    assert not list(layer.parameters())
    assert layer.float()(x.float()).dtype == torch.float32


def test_constant_channels_are_not_blown_up():
    layer = Standardise.of(torch.full((5, 1, 4, 4), 0.25))
    torch.testing.assert_close(layer.std, torch.tensor([0.01]))
    torch.testing.assert_close(layer(torch.full((1, 1, 4, 4), 0.26)), torch.ones(1, 1, 4, 4))


@pytest.mark.parametrize(
    ("mean", "std", "match"),
    [
        ([0.0], [1.0, 1.0], r"shapes \[1\] and \[2\]"),
        ([0.0], [0.0], "std positive"),
        ([math.nan], [1.0], "finite"),
    ],
)
def test_standardise_explains_bad_arguments(mean, std, match):
    with pytest.raises(ValueError, match=match):
        Standardise(mean, std)


def test_standardise_refuses_other_channels():
    with pytest.raises(ValueError, match=r"2 channels, got shape \[5, 1, 4, 4\]"):
        Standardise([0.0, 0.0], [1.0, 1.0])(torch.rand(5, 1, 4, 4))


def test_mlp_has_the_layers_that_were_asked_for():
    net = mlp((2, 3, 5), 7, width=11, depth=2, activation=nn.ReLU)
    assert [type(layer) for layer in net] == [
        nn.Flatten,
        nn.Linear,
        nn.ReLU,
        nn.Linear,
        nn.ReLU,
        nn.Linear,
    ]
    assert [tuple(p.shape) for p in net.parameters()] == [
        (11, 30),
        (11,),
        (11, 11),
        (11,),
        (7, 11),
        (7,),
    ]
    assert net(torch.rand(4, 2, 3, 5)).shape == (4, 7)
    assert len(list(mlp((30,), 7, depth=0).parameters())) == 2
    with pytest.raises(ValueError, match="depth must not be negative, got -1"):
        mlp((30,), 7, depth=-1)


@pytest.mark.parametrize("in_shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 9, 17)])
def test_cnn_takes_images_from_8_by_8_on(in_shape):
    assert cnn(in_shape, 7, width=2)(torch.rand(3, *in_shape)).shape == (3, 7)


@pytest.mark.parametrize("in_shape", [(1, 7, 8), (784,)])
def test_cnn_refuses_what_is_too_small_or_no_image(in_shape):
    with pytest.raises(ValueError, match=r"at least 8 x 8, got \["):
        cnn(in_shape, 7)


# Fixup.


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


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 5, 4)])
@pytest.mark.parametrize("build", [ScalarBias, ScalarScale])
def test_rule_equals_autograd(build, shape):
    module, x, g = randomised(build()), torch.randn(shape), torch.randn(shape)
    output = module(x)
    (parameter,) = module.parameters()
    expected = [
        torch.autograd.grad(output[i], parameter, g[i], retain_graph=True)[0] for i in range(2)
    ]
    (block,) = rules()[build](module)
    a = None if block.a is None else block.a(x)
    torch.testing.assert_close(
        block.gradient_map(x, 2)(g), torch.stack(expected)
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


def digits(n=12):
    return DataLoader(TensorDataset(torch.rand(n, 2, 9, 9), torch.arange(n) % 3), batch_size=5)


NETWORKS = {
    "mlp": lambda: mlp((2, 9, 9), 3, width=5),
    "cnn": lambda: cnn((2, 9, 9), 3, width=2),
    "fixup": lambda: FixupResNet(2, 3, depth=8, width=2),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("at_start", [True, False])
def test_curvature_covers_every_parameter(name, at_start):
    net = nn.Sequential(Standardise([0.5, 0.5], [0.3, 0.3]), NETWORKS[name]())
    if not at_start:
        randomised(net)
    assert check_model(net)
    la = Laplace(
        net,
        "classification",
        subset_of_weights="all",
        hessian_structure="kron",
        backend=AugmentedGGN,
    )
    la.fit(digits())
    assert len(la.H_facs.kfacs) == len(list(net.parameters()))
    assert math.isfinite(la.log_marginal_likelihood())


@pytest.mark.parametrize("name", ["cnn", "fixup"])
def test_the_evidence_of_an_invariant_network_has_a_gradient(name):
    net = nn.Sequential(Standardise([0.5, 0.5], [0.3, 0.3]), randomised(NETWORKS[name]()))
    augmentation = li.AffineImage(init={"rotation": 0.3}, learn="rotation")
    model = li.InvariantModel(net, augmentation, n_samples=2)
    loader = digits()

    def evidence():
        torch.manual_seed(1)
        la = Laplace(
            model,
            "classification",
            subset_of_weights="all",
            hessian_structure="kron",
            backend=AugmentedGGN,
        )
        la.fit(loader)
        return la.log_marginal_likelihood()

    evidence().backward()
    expected = central_differences(lambda: evidence().detach(), augmentation.eta, step=1e-6)
    assert augmentation.eta.grad[2].abs() > 1e-3
    torch.testing.assert_close(augmentation.eta.grad[2], expected[2], rtol=1e-3, atol=1e-4)
