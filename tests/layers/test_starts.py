"""How far free paths are open at the start: prior precisions, and scales of weights."""

import re

import pytest
import torch
from torch import nn

from laplace_invariance.layers import (
    START_LEVELS,
    FactoredLinear2d,
    Linear2d,
    ResidualPathway,
    SparseLinear2d,
    closed_paths,
    equivariant_cnn,
    free_paths,
    rescale_paths,
    start_precisions,
)


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


# Levels.


def two_layers(scale=0.3):
    first = ResidualPathway(
        conv=nn.Conv2d(1, 3, 3, padding=1),
        f_fc=FactoredLinear2d(1, 3, 4, scale=scale),
        fc=Linear2d(1, 3, 4, scale=scale),
    )
    second = ResidualPathway(conv=nn.Conv2d(3, 2, 1), f_fc=FactoredLinear2d(3, 2, 4, scale=scale))
    return nn.Sequential(first, nn.Tanh(), second, ResidualPathway(nn.Flatten()))


def test_all_paths_but_the_first_are_free():
    found = free_paths(two_layers())
    assert {place: list(paths) for place, paths in found.items()} == {
        "0": ["f_fc", "fc"],
        "2": ["f_fc"],
    }


def test_a_pathway_in_a_free_path_is_a_part_of_it():
    inner = ResidualPathway(conv=nn.Conv2d(1, 2, 1), wide=nn.Conv2d(1, 2, 3, padding=1))
    strict = ResidualPathway(one=nn.Conv2d(1, 2, 1), two=nn.Conv2d(1, 2, 1))
    model = nn.Sequential(ResidualPathway(conv=strict, free=inner))
    assert {place: list(paths) for place, paths in free_paths(model).items()} == {
        "0": ["free"],
        "0.conv": ["two"],
    }
    rescale_paths(model, {"0": "off", "0.conv": "closed"})
    assert not any(parameter.any() for parameter in inner.parameters())


@pytest.mark.parametrize("level", START_LEVELS)
def test_weights_are_rescaled_whatever_they_were_built_with(level):
    torch.manual_seed(0)
    small = two_layers(0.3)
    torch.manual_seed(0)
    large = two_layers(0.7)
    before = {name: tensor.clone() for name, tensor in large.named_parameters()}
    levels = {"0": level, "2": "closed"}
    for model in (small, large):
        rescale_paths(model, levels)
    after = dict(large.named_parameters())
    for name, tensor in small.named_parameters():
        torch.testing.assert_close(tensor, after[name])
    scale = START_LEVELS[level].scale
    for name, fan_in in (("0.f_fc.theta_1", 1), ("0.fc.linear", 16)):
        weight = after[f"{name}.weight"]
        assert weight.square().mean().sqrt().item() * fan_in**0.5 == pytest.approx(scale)
    assert after["2.f_fc.theta_1.weight"].std().item() == pytest.approx(0.01 / 3**0.5, rel=0.3)
    kept = ["0.conv.weight", "0.conv.bias", "2.f_fc.theta_2.weight"]
    if level != "off":
        kept.append("0.f_fc.theta_2.weight")
    for name in kept:
        assert torch.equal(after[name], before[name])
    if level == "off":
        assert not any(p.any() for n, p in after.items() if n.startswith(("0.f_fc", "0.fc")))


def test_levels_have_prior_precisions():
    model = two_layers()
    closed = start_precisions(model, {"0": "closed", "2": "closed"})
    assert {re.escape(name): value for name, value in closed.items()} == closed_paths(model)
    found = start_precisions(model, {"0": "half open", "2": "open"})
    assert found["0.f_fc.theta_2.weight"] == 4 * 16
    assert found["0.f_fc.theta_1.weight"] == found["0.fc.linear.bias"] == 1.0
    assert {value for name, value in found.items() if name.startswith("2.")} == {1.0}
    shared = start_precisions(model, {"0": "closed", "2": "half open"}, shared=True)
    assert set(shared.values()) == {1e3, 1.0}


def test_what_cannot_be_started_is_refused():
    model = two_layers()
    with pytest.raises(ValueError, match="'1' has no free paths; places that have some: 0, 2"):
        rescale_paths(model, {"1": "open"})
    with pytest.raises(ValueError, match=r"a level is one of off, closed, .* got 'ajar'"):
        start_precisions(model, {"0": "ajar"})
    rescale_paths(model, {"2": "off"})
    with pytest.raises(ValueError, match=r"2\.f_fc\.theta_1\.weight is zero"):
        rescale_paths(model, {"2": "open"})
