"""Sums of paths: what they compute, their curvature, and how free ones start closed."""

import re

import pytest
import torch
from builders import place_of
from torch import nn
from twins import block_diagonal, ggn

from laplace_invariance.curvature import (
    AugmentedGGN,
)
from laplace_invariance.layers import (
    FactoredLinear2d,
    ResidualPathway,
    SparseLinear2d,
    closed_paths,
    equivariant_cnn,
)


def test_a_pathway_is_the_sum_of_its_paths():
    conv, fc = nn.Conv2d(2, 3, 3, padding=1), FactoredLinear2d(2, 3, 4)
    x = torch.randn(5, 2, 4, 4)
    torch.testing.assert_close(ResidualPathway(conv, fc)(x), conv(x) + fc(x))
    named = ResidualPathway(conv=conv, f_fc=fc)
    assert list(named.paths) == ["conv", "f_fc"]
    assert "f_fc.theta_1.weight" in dict(named.named_parameters())
    with pytest.raises(
        ValueError, match=r"same shape, got conv: \[5, 3, 4, 4\], f_fc: \[5, 3, 2, 2\]"
    ):
        ResidualPathway(conv=conv, f_fc=FactoredLinear2d(2, 3, 4, 2))(x)
    torch.testing.assert_close(ResidualPathway(conv, conv)(x), 2 * conv(x))
    with pytest.raises(ValueError, match="'0' is given in order and by name"):
        ResidualPathway(conv, **{"0": fc})
    with pytest.raises(ValueError, match="at least one path"):
        ResidualPathway()
    with pytest.raises(TypeError, match="'1' must be a module, got int"):
        ResidualPathway(conv, 3)


def test_paths_that_keep_the_size_are_pooled_together():
    first, second, fc = (
        nn.Conv2d(2, 3, 3, padding=1),
        nn.Conv2d(2, 3, 1),
        FactoredLinear2d(2, 3, 4, 2),
    )
    pool, x = nn.MaxPool2d(2), torch.randn(5, 2, 4, 4)
    pathway = ResidualPathway(first, second, fc, pool=pool)
    torch.testing.assert_close(pathway(x), pool(first(x) + second(x)) + fc(x))
    assert list(pathway.paths) == ["0", "1", "2"]
    torch.testing.assert_close(
        ResidualPathway(first, second, pool=pool)(x), pool(first(x) + second(x))
    )
    with pytest.raises(ValueError, match=r"pooled 0: \[5, 3, 2, 2\], 1: \[5, 3, 3, 3\]"):
        ResidualPathway(first, FactoredLinear2d(2, 3, 4, 3), pool=pool)(x)


def test_the_curvature_of_a_pathway_is_that_of_its_paths():
    paths = ResidualPathway(conv=nn.Conv2d(2, 3, 3, padding=1), f_fc=FactoredLinear2d(2, 3, 4))
    model = nn.Sequential(paths, nn.Flatten(), nn.Linear(48, 4))
    x, y = torch.randn(3, 2, 4, 4), torch.randint(4, (3,))
    _, matrix = AugmentedGGN(model, "classification").full(x, y)
    torch.testing.assert_close(matrix, ggn(model, model(x), "classification").detach())
    _, kron = AugmentedGGN(model, "classification").kron(x, y, N=3)
    exact = block_diagonal(matrix, model)
    for name in ("0.conv.bias", "0.f_fc.theta_1.bias", "0.f_fc.theta_2.bias"):
        part = place_of(model, name)
        torch.testing.assert_close(kron.to_matrix()[part, part], exact[part, part])


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


def test_a_layer_declares_what_closes_it():
    class Scaled(nn.Module):
        own_prior_parameters = ("width",)
        closed_precisions = {"first": 7.0}  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
            self.width = nn.Parameter(torch.ones(1))

    model = nn.Sequential(ResidualPathway(nn.Identity(), own=nn.Sequential(Scaled())))
    assert closed_paths(model) == {
        r"0\.own\.0\.first\.weight": 7.0,
        r"0\.own\.0\.first\.bias": 7.0,
        r"0\.own\.0\.second\.weight": 1e3,
    }
    assert set(closed_paths(model, 5.0, shared=True).values()) == {5.0}


def test_widths_of_basis_functions_are_not_closed():
    conv, free = nn.Conv2d(1, 2, 1), SparseLinear2d(1, 2, 4, learn_omega="weight")
    found = closed_paths(ResidualPathway(conv=conv, s_fc=free))
    assert {name: value for name, value in found.items() if "theta_2" in name} == {
        r"s_fc\.theta_2\.weight": 4 * 8
    }
    assert not any("omega" in name for name in found)
    assert free.basis_in.own_prior_parameters == ("omega",)
