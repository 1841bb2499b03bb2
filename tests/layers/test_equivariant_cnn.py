"""The network whose layers are sums of paths: its sizes, its symmetries, its curvature, and what is reported of it."""

import copy
import json
import math
import re

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twins import ggn

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN, check_model
from laplace_invariance.layers import (
    FactoredLinear2d,
    ResidualPathway,
    closed_paths,
    convert,
    equivariant_cnn,
)
from laplace_invariance.metrics import effective_parameters, equivariance_error, layer_report

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


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_maps_images_to_outputs_and_has_curvature(kind):
    net = equivariant_cnn(kind, 2, 3, width=1)
    x, y = torch.randn(2, 2, 32, 32), torch.tensor([0, 2])
    assert net(x).shape == (2, 3)
    assert check_model(net)
    loss, kron = AugmentedGGN(net, "classification", output_rank=1).kron(x, y, N=2)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(net(x), y, reduction="sum"))
    assert len(kron) == len(list(net.parameters()))


@pytest.mark.parametrize("kind", ["conv", "s_conv", "gconv"])
def test_equivariant_networks_are_invariant(kind):
    net, x = equivariant_cnn(kind, 2, 3, width=1), torch.randn(3, 2, 32, 32)
    assert equivariance_error(net, "shifts", x[:1]) < 1e-10
    together = net(x)
    torch.testing.assert_close(
        torch.cat([net(image.unsqueeze(0)) for image in x]), together, rtol=1e-10, atol=1e-12
    )
    turned = equivariance_error(net, "p4", x)
    assert turned < 1e-10 if kind == "gconv" else turned > 1e-2


def test_group_network_stays_equivariant_with_other_kernels():
    x = torch.randn(2, 1, 32, 32)
    for kernel in ("full", "separable"):
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


def test_paths_but_the_first_start_closed():
    net = nn.Sequential(equivariant_cnn("f_fc+conv+gconv", 1, 3, width=2))
    found = closed_paths(net, 50.0)
    names = [name for name, _ in net.named_parameters()]
    by_name = {
        n: next((v for pattern, v in found.items() if re.fullmatch(pattern, n)), None)
        for n in names
    }
    assert {n for n, v in by_name.items() if v is None} == {
        n for n in names if ".gconv." in n or "layer9" in n or "layer10" in n
    }
    assert (
        by_name["0.layer1.conv.layer.weight"] == by_name["0.layer1.f_fc.layer.theta_1.bias"] == 50.0
    )
    assert (
        by_name["0.layer1.f_fc.layer.theta_2.weight"] == 4 * 1024
    )  # the inverse of its initial variance
    assert by_name["0.layer8.f_fc.layer.theta_2.weight"] == 4 * 4
    assert set(closed_paths(net, 50.0, shared=True).values()) == {50.0}
    assert closed_paths(equivariant_cnn("conv", 1, 3, width=1)) == {}


def test_larger_images_and_bad_arguments():
    net = equivariant_cnn("f_fc+conv", 1, 3, width=1, in_shape=(32, 64))
    assert net(torch.randn(2, 1, 32, 64)).shape == (2, 3)
    for arguments, message in (
        (("cnv",), r"one or more of gconv, conv, .*got 'cnv' in 'cnv'"),
        (("conv+conv",), "a path twice"),
        (("conv", 1, 3, 0), "width must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            equivariant_cnn(*(arguments + (1, 3)[len(arguments) - 1 :]))
    with pytest.raises(ValueError, match="multiples of 32, got 28"):
        equivariant_cnn("conv", 1, 3, in_shape=28)
    with pytest.raises(ValueError, match=r"FactoredLinear2d was built for \[n, 1, 32, 32\]"):
        equivariant_cnn("f_fc", 1, 3, width=1)(torch.randn(2, 1, 64, 64))


# Reports.


def small():
    paths = ResidualPathway(conv=nn.Conv2d(1, 2, 3, padding=1), f_fc=FactoredLinear2d(1, 2, 4))
    return nn.Sequential(paths, nn.Tanh(), nn.Flatten(), nn.Linear(32, 3))


def fitted(structure="kron", model=None, backend=AugmentedGGN):
    model = small() if model is None else model
    x, y = torch.randn(10, 1, 4, 4), torch.randint(3, (10,))
    la = Laplace(
        model,
        "classification",
        subset_of_weights="all",
        hessian_structure=structure,
        backend=backend,
    )
    la.fit(DataLoader(TensorDataset(x, y), batch_size=4))
    return la, x, y


def test_effective_parameters_are_the_trace_of_curvature_times_covariance():
    la, x, _ = fitted("full")
    sizes = [parameter.numel() for parameter in la.model.parameters()]
    precision = torch.rand(len(sizes)) + 0.5
    la.prior_precision = precision
    exact = ggn(la.model, la.model(x), "classification").detach()
    shares = (
        exact @ torch.linalg.inv(exact + precision.repeat_interleave(torch.tensor(sizes)).diag())
    ).diagonal()
    found = effective_parameters(la)
    assert list(found) == [name for name, _ in la.model.named_parameters()]
    torch.testing.assert_close(
        torch.tensor(list(found.values())), torch.stack([p.sum() for p in shares.split(sizes)])
    )


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_effective_parameters_of_other_structures(structure):
    la, _, _ = fitted(structure)
    la.prior_precision = torch.rand(len(list(la.model.parameters()))) + 0.5
    matrix = la.H_facs.to_matrix() if structure == "kron" else la.H.diag()
    sizes = [parameter.numel() for parameter in la.model.parameters()]
    delta = la.prior_precision.repeat_interleave(torch.tensor(sizes)).diag()
    shares = (matrix @ torch.linalg.inv(matrix + delta)).diagonal().split(sizes)
    found = torch.tensor(list(effective_parameters(la).values()))
    torch.testing.assert_close(found, torch.stack([share.sum() for share in shares]))


def test_effective_parameters_of_a_stock_backend_agree():
    from laplace.curvature import CurvlinopsGGN

    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    ours, x, y = fitted(model=model)
    stock = Laplace(
        model,
        "classification",
        subset_of_weights="all",
        hessian_structure="kron",
        backend=CurvlinopsGGN,
    )
    stock.fit(DataLoader(TensorDataset(x, y), batch_size=4))
    assert effective_parameters(stock) == pytest.approx(effective_parameters(ours))


def test_layer_report_says_which_path_is_in_use():
    la, _, _ = fitted()
    names = [name for name, _ in la.model.named_parameters()]
    off = torch.tensor([1e6 if ".f_fc." in name else 0.1 for name in names])
    la.prior_precision = off
    report = layer_report(la)
    assert report.chosen == {"0": "CONV"}
    conv, f_fc = report.rows
    effective = effective_parameters(la)
    assert conv.effective == pytest.approx(effective["0.conv.weight"] + effective["0.conv.bias"])
    assert conv.parameters == 20
    assert conv.normalised == pytest.approx(conv.effective / 20)
    assert conv.relative == pytest.approx(conv.normalised / (conv.normalised + f_fc.normalised))
    assert conv.relative + f_fc.relative == pytest.approx(1)
    assert f_fc.precision == pytest.approx(1e6)
    assert f_fc.precisions["theta_1.weight"] == pytest.approx(1e6)
    path = la.model[0].f_fc
    assert f_fc.norm == pytest.approx(
        torch.cat([p.flatten() for p in path.parameters()]).norm().item()
    )
    lines = str(report).splitlines()
    assert len(lines) == 3
    assert "conv (CONV)" in lines[1]
    assert lines[1].endswith("CONV")
    assert json.loads(json.dumps(report.as_dict()))["0"]["f_fc"]["kind"] == "F-FC"
    la.prior_precision = torch.tensor([1e6 if ".conv." in name else 0.1 for name in names])
    assert layer_report(la).chosen == {"0": "F-FC"}
    la.prior_precision = 2.0
    report = layer_report(la)
    assert report.rows[0].precision == 2.0
    assert min(row.relative for row in report.rows) > 0.05
    assert report.chosen == {"0": "CONV+F-FC"}
    assert str(report).splitlines()[1].endswith("CONV+F-FC")


def test_layer_report_needs_paths_and_a_fit():
    la, _, _ = fitted(model=nn.Sequential(nn.Flatten(), nn.Linear(16, 3)))
    with pytest.raises(ValueError, match="no ResidualPathway"):
        layer_report(la)
    for structure in ("kron", "diag", "full"):
        unfitted = Laplace(
            small(), "classification", subset_of_weights="all", hessian_structure=structure
        )
        with pytest.raises(TypeError, match=r"need a fitted Laplace.*before fit\(\)"):
            layer_report(unfitted)
    last = Laplace(
        nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), "classification", hessian_structure="kron"
    )
    for wrong in (last, small()):
        with pytest.raises(TypeError, match=f"need a fitted Laplace.*{type(wrong).__name__}"):
            layer_report(wrong)


def test_layer_report_does_not_choose_where_a_path_is_frozen():
    model = small()
    model[0].conv.requires_grad_(False)
    report = layer_report(fitted(model=model)[0])
    conv, f_fc = report.rows
    assert conv.effective is conv.relative is f_fc.relative is None
    assert f_fc.effective > 0
    assert report.chosen == {}
    assert "frozen" in str(report).splitlines()[1]


def test_layer_report_counts_a_shared_path_wherever_it_is():
    conv = nn.Conv2d(1, 1, 3, padding=1)
    first, second = (ResidualPathway(conv=conv, f_fc=FactoredLinear2d(1, 1, 4)) for _ in range(2))
    model = nn.Sequential(first, nn.Tanh(), second, nn.Flatten(), nn.Linear(16, 3))
    places = layer_report(fitted(model=model)[0]).places
    assert (
        [row.path for row in places["0"]] == [row.path for row in places["2"]] == ["conv", "f_fc"]
    )
    assert places["0"][0].effective == places["2"][0].effective > 0


# From existing networks.


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
