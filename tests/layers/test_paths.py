"""Kinds of paths: one entry is all that a new kind needs."""

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_invariance import plots
from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.layers import (
    PATHS,
    Group,
    Linear2d,
    OnGroup,
    PathKind,
    PolyphasePool2d,
    ResidualPathway,
    closed_paths,
    convert,
    equivariant_cnn,
    pathway,
)
from laplace_invariance.layers.paths import label_of, parse_kind
from laplace_invariance.metrics import layer_report


class Toy(Linear2d):
    """A fully connected layer under another name."""


class Shallow(nn.Conv2d):
    """A 1 x 1 convolution under another name."""


def toy(spec):
    return Toy(spec.n_in, spec.n_out, spec.in_shape, spec.out_shape, scale=spec.gain)


@pytest.fixture
def _toy(monkeypatch):
    kind = PathKind("TOY", "gold", "a free toy", toy, (Toy,), free=True)
    monkeypatch.setitem(PATHS, "toy", kind)


@pytest.fixture
def _shallow(monkeypatch):
    def build(spec):
        return Shallow(spec.n_in, spec.n_out, 1)

    monkeypatch.setitem(PATHS, "shallow", PathKind("1x1", "gold", "pixels", build, (Shallow,)))


@pytest.mark.usefixtures("_toy")
def test_a_new_kind_is_a_path_of_networks():
    layer = pathway("toy+conv", 2, 3, (4, 6), pool=2)
    assert list(layer.paths) == ["conv", "toy"]
    assert isinstance(layer.toy, Toy)
    assert layer.toy.out_shape == (2, 3)  # maps to the smaller size itself
    assert layer(torch.randn(5, 2, 4, 6)).shape == (5, 3, 2, 3)
    net = equivariant_cnn("toy+conv", 1, 3, width=1)
    assert net(torch.randn(2, 1, 32, 32)).shape == (2, 3)
    assert all(isinstance(net.get_submodule(f"layer{i}.toy"), Toy) for i in range(1, 9))
    assert any("toy" in name for name in closed_paths(net))


@pytest.mark.usefixtures("_toy")
def test_a_new_free_kind_can_be_put_beside_convolutions():
    net = convert(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), (1, 4, 4), "conv+toy")
    assert isinstance(net[0].toy, Toy)
    assert (net[0].toy.in_shape, net[0].toy.out_shape) == ((4, 4), (2, 2))


@pytest.mark.usefixtures("_toy")
def test_a_new_kind_is_known_to_reports_and_pictures():
    paths = pathway("toy+conv", 1, 2, (4, 4))
    model = nn.Sequential(paths, nn.Flatten(), nn.Linear(32, 3))
    x, y = torch.randn(6, 1, 4, 4), torch.randint(3, (6,))
    options = {"subset_of_weights": "all", "hessian_structure": "kron", "backend": AugmentedGGN}
    la = Laplace(model, "classification", **options)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=3))
    report = layer_report(la)
    assert [row.kind for row in report.rows] == ["CONV", "TOY"]
    ax = plots.layer_shares(report, plots.figure((3, 3)).subplots())
    colours = {line.get_label(): line.get_color() for line in ax.get_lines()}
    assert colours == {"CONV": PATHS["conv"].colour, "TOY": "gold"}


@pytest.mark.usefixtures("_shallow")
def test_a_new_kind_with_a_symmetry_comes_before_free_ones():
    assert parse_kind("fc+shallow+conv") == ["conv", "shallow", "fc"]
    layer = pathway("f_fc+shallow", 2, 3, (4, 4), pool=2)
    assert list(layer.paths) == ["shallow", "f_fc"]
    assert isinstance(layer.pool, PolyphasePool2d)
    with pytest.raises(ValueError, match="one or more of f_fc, s_fc, fc, joined"):
        convert(nn.Conv2d(1, 2, 3), (1, 4, 4), "conv+shallow")


@pytest.mark.usefixtures("_shallow")
def test_elements_of_a_group_are_further_channels_of_a_new_kind():
    layer = pathway("shallow+gconv", 2, 3, (4, 4), group=Group.of("p4"))
    assert isinstance(layer.shallow, OnGroup)
    assert (layer.shallow.layer.in_channels, layer.shallow.layer.out_channels) == (8, 12)
    assert layer(torch.randn(5, 2, 4, 4, 4)).shape == (5, 3, 4, 4, 4)


@pytest.mark.parametrize("lift", [True, False])
def test_factors_may_depend_on_element_and_position(lift):
    layer = pathway(
        "f_fc+gconv", 2, 3, (4, 4), 2, group=Group.of("p4"), lift=lift, elements="positions"
    )
    x = torch.randn(5, 2, 4, 4) if lift else torch.randn(5, 2, 4, 4, 4)
    x_points = x.flatten(2)  # every element and position is a point
    f_fc = layer.f_fc.layer
    theta_1 = f_fc.theta_1.weight.unflatten(1, (3, 2))  # [x', c', c]
    theta_2 = f_fc.theta_2.weight.unflatten(1, (2, -1))  # [c', c, x]
    expected = torch.einsum("pdc,dcq,ncq->ndp", theta_1, theta_2, x_points)
    torch.testing.assert_close(layer.f_fc(x), expected.unflatten(2, (4, 2, 2)))
    assert layer(x).shape == (5, 3, 4, 2, 2)


def test_dense_paths_are_the_same_for_elements_as_channels_and_as_positions():
    x = torch.randn(5, 2, 4, 2, 3)
    positions, channels = (Linear2d(2, 3, (8, 3)), Linear2d(8, 12, (2, 3)))
    channels.load_state_dict(positions.state_dict())
    torch.testing.assert_close(
        OnGroup(positions, 4, "positions")(x), OnGroup(channels, 4, "channels")(x)
    )


def test_elements_are_channels_or_positions():
    with pytest.raises(ValueError, match="one of channels, positions, got 'rows'"):
        pathway("f_fc+gconv", 2, 3, (4, 4), group=Group.of("p4"), elements="rows")


def test_group_convolutions_need_a_group():
    with pytest.raises(ValueError, match=r"needs a group: pathway\(..., group="):
        pathway("gconv", 2, 3, (4, 4))
    with pytest.raises(ValueError, match="full or pointwise, got 'depthwise'"):
        pathway("s_gconv", 2, 3, (4, 4), group=Group.of("p4"), kernel="depthwise")


def test_kinds_are_sorted_from_the_strictest_to_the_freest():
    assert parse_kind("fc+s_fc+f_fc+s_conv+conv+s_gconv+gconv") == list(PATHS)
    assert [PATHS[name].free for name in PATHS] == [False] * 4 + [True] * 3


@pytest.mark.parametrize(
    ("path", "label"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(2, 3)), "FC"),
        (OnGroup(nn.Conv2d(1, 2, 3), 4), "CONV"),
        (ResidualPathway(nn.Identity()), "ResidualPathway"),
        (Toy(1, 2, 3), "FC"),
        (Shallow(1, 2, 3), "Shallow"),
    ],
    ids=["within", "on a group", "unknown", "made of a known one", "subclass"],
)
def test_labels_are_those_of_the_first_layer_of_a_known_kind(path, label):
    assert label_of(path) == label
