"""Networks: sizes, symmetries, what they compute at first, and that curvature covers them."""

import math

import pytest
import torch
from builders import randomised
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twins import central_differences

import laplace_invariance as li
from laplace_invariance.curvature import (
    AugmentedGGN,
    check_model,
)
from laplace_invariance.layers import (
    FixupResNet,
    GroupConv2d,
    Standardise,
    cnn,
    equivariant_cnn,
    lenet,
    mlp,
)
from laplace_invariance.metrics import (
    equivariance_error,
)


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


def test_lenet_has_as_many_parameters_as_in_the_paper():
    net = lenet((1, 28, 28), 10)
    assert sum(weight.numel() for weight in net.parameters()) == 61_706
    assert net(torch.rand(2, 1, 28, 28)).shape == (2, 10)
    assert lenet((3, 12, 17), 7)(torch.rand(2, 3, 12, 17)).shape == (2, 7)
    with pytest.raises(ValueError, match=r"at least 12 x 12, got \[1, 11, 12\]"):
        lenet((1, 11, 12), 10)


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


KINDS = [
    "fc",
    "conv",
    "fc+conv",
    "f_fc",
    "f_fc+conv",
    "s_fc",
    "s_conv",
    "s_fc+s_conv",
    "f_fc+conv+gconv",
    "gconv",
    "s_fc+s_conv+s_gconv",
]


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("conv", 338_770),
        ("fc", 133_635_690),
        ("fc+conv", 133_865_010),
        ("f_fc", 1_542_625),
        ("f_fc+conv", 1_771_945),
        ("s_fc", 831_820),
        ("gconv", 338_770),
    ],
)
def test_has_as_many_parameters_as_in_the_paper(kind, expected):
    with torch.device(
        "meta" if "fc" in kind and kind != "s_fc" else "cpu"
    ):  # only counted, where it is large
        assert size(equivariant_cnn(kind, 3, 10)) == expected


@pytest.mark.parametrize(
    ("kernel", "width", "printed", "n_biases"),
    [
        ("full", 10, 1_025_380, 0),
        ("separable", 10, 214_550, 1),
        ("separable", 13, 358_463, 1),
        ("depthwise", 16, 346_215, 2),
    ],
)
def test_kernels_have_as_many_parameters_as_in_the_paper(kernel, width, printed, n_biases):
    """But for its first layer, a group convolution of copies of the image, and inner biases."""
    net = equivariant_cnn("gconv", 3, 10, width, kernel=kernel)
    first = GroupConv2d(3, width, 3, kernel=kernel)
    inner_biases = n_biases * (3 + 29 * width)  # one per input channel of each layer
    found = size(net) - size(net.layer1) + size(first) + inner_biases
    assert found == printed


def test_elements_as_positions_need_fewer_weights():
    channels, positions = (
        equivariant_cnn("f_fc+gconv", 1, 3, width=1, elements=elements)
        for elements in ("channels", "positions")
    )
    second = [net.layer2.f_fc.layer for net in (channels, positions)]
    n_weights = [layer.theta_1.weight.numel() + layer.theta_2.weight.numel() for layer in second]
    assert n_weights[0] == 4 * n_weights[1]


def test_widths_of_basis_functions_may_be_weights():
    fixed, learnt = (
        equivariant_cnn("s_fc+s_conv", 1, 3, width=1, omega=omega) for omega in ("fixed", "weight")
    )
    names = {name for name, _ in learnt.named_parameters()}
    added = names - {name for name, _ in fixed.named_parameters()}
    assert len(added) == 8 * 3  # of 8 layers: one of the convolution, two of the factored path
    assert all(name.endswith("omega") for name in added)
    assert check_model(learnt)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_maps_images_to_outputs_and_has_curvature(kind):
    net = equivariant_cnn(kind, 2, 3, width=1)
    x, y = torch.randn(2, 2, 32, 32), torch.tensor([0, 2])
    assert net(x).shape == (2, 3)
    assert check_model(net)
    loss, kron = AugmentedGGN(net, "classification", output_rank=1).kron(x, y, N=2)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(net(x), y, reduction="sum"))
    assert len(kron) == len(list(net.parameters()))


@pytest.mark.parametrize("kind", ["conv", "s_conv", "gconv", "s_gconv"])
def test_equivariant_networks_are_invariant(kind):
    net, x = equivariant_cnn(kind, 2, 3, width=1), torch.randn(3, 2, 32, 32)
    assert equivariance_error(net, "shifts", x[:1]) < 1e-10
    together = net(x)
    torch.testing.assert_close(
        torch.cat([net(image.unsqueeze(0)) for image in x]), together, rtol=1e-10, atol=1e-12
    )
    turned = equivariance_error(net, "p4", x)
    assert turned < 1e-10 if "gconv" in kind else turned > 1e-2


def test_group_network_stays_equivariant_with_other_kernels():
    x = torch.randn(2, 1, 32, 32)
    for kernel in ("full", "separable", "pairwise", "depthwise"):
        net = equivariant_cnn("gconv", 1, 3, width=1, kernel=kernel)
        assert equivariance_error(net, ("shifts", "p4"), x, max_elements=20) < 1e-10
    assert (
        equivariance_error(equivariant_cnn("gconv", 1, 3, width=1, group="p4m"), "p4m", x) < 1e-10
    )


def test_convolutions_beside_group_convolutions_are_subsampled_with_them():
    net, x = equivariant_cnn("conv+gconv", 1, 3, width=1, scale=1.0), torch.randn(2, 1, 32, 32)
    assert equivariance_error(net, "shifts", x, max_elements=100) < 1e-10
    assert equivariance_error(net, "p4", x) > 1e-2


@pytest.mark.parametrize("kind", ["fc", "f_fc", "s_fc", "f_fc+conv"])
def test_free_paths_break_the_symmetry(kind):
    net, x = equivariant_cnn(kind, 1, 3, width=1, scale=1.0), torch.randn(2, 1, 32, 32)
    assert equivariance_error(net, "shifts", x, max_elements=10) > 1e-2


def test_free_paths_start_near_zero_beside_an_equivariant_one():
    torch.manual_seed(0)
    both, alone = (
        equivariant_cnn("f_fc+conv", 1, 3, width=4),
        equivariant_cnn("f_fc", 1, 3, width=4),
    )
    x = torch.randn(20, 1, 32, 32)
    for net, expected in ((both, 0.01), (alone, math.sqrt(2))):
        layer = net.layer1.f_fc
        assert 0.7 < layer(x).std() / expected < 1.4
    assert 0.7 < both.layer1.conv(x).std() / math.sqrt(2) < 1.4


def test_larger_images_and_bad_arguments():
    net = equivariant_cnn("f_fc+conv", 1, 3, width=1, in_shape=(32, 64))
    assert net(torch.randn(2, 1, 32, 64)).shape == (2, 3)
    for arguments, message in (
        (("cnv",), r"one or more of gconv, s_gconv, .*got 'cnv' in 'cnv'"),
        (("conv+conv",), "a path twice"),
        (("conv", 1, 3, 0), "width must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            equivariant_cnn(*(arguments + (1, 3)[len(arguments) - 1 :]))
    with pytest.raises(ValueError, match="multiples of 32, got 28"):
        equivariant_cnn("conv", 1, 3, in_shape=28)
    with pytest.raises(ValueError, match=r"FactoredLinear2d was built for \[n, 1, 32, 32\]"):
        equivariant_cnn("f_fc", 1, 3, width=1)(torch.randn(2, 1, 64, 64))
