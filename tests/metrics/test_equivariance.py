"""Layers that should be equivariant are, to rounding; layers that should not be are found out."""

import itertools

import pytest
import torch
from torch import nn

from laplace_invariance.layers.convert import convert
from laplace_invariance.layers.factored import FactoredLinear2d
from laplace_invariance.layers.group import GroupConv2d, LiftingConv2d
from laplace_invariance.layers.kernels import KERNELS
from laplace_invariance.layers.pooling import GroupPool, PolyphasePool2d
from laplace_invariance.layers.symmetry import Group
from laplace_invariance.metrics import equivariance_error

EXACT = 1e-10
CLEAR = 1e-2
CIRCULAR = {"padding": 1, "padding_mode": "circular"}


class Spatial(nn.Module):
    """Mean over positions."""

    def forward(self, x):
        return x.mean((-2, -1))


def stack(group="p4", kernel="full"):
    return nn.Sequential(
        LiftingConv2d(2, 3, 3, group=group, **CIRCULAR),
        PolyphasePool2d(),
        nn.ReLU(),
        GroupConv2d(3, 5, 3, group=group, kernel=kernel, **CIRCULAR),
        PolyphasePool2d(),
        GroupPool(),
    )


@pytest.mark.parametrize("group", ["p1", "p2", "p4", "pm", "p4m"])
def test_lifting_is_equivariant(group):
    layer = LiftingConv2d(2, 3, 3, group=group, **CIRCULAR)
    assert equivariance_error(layer, ("shifts", group), torch.randn(2, 2, 5, 5)) < EXACT
    unpadded = LiftingConv2d(2, 3, 2, group=group, dilation=2)
    assert equivariance_error(unpadded, group, torch.randn(2, 2, 5, 5)) < EXACT


@pytest.mark.parametrize("group", ["p4", "p4m"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_group_convolutions_are_equivariant(group, kernel):
    x = torch.randn(2, 3, Group.of(group).order, 5, 5)
    layer = GroupConv2d(3, 4, 3, group=group, kernel=kernel, **CIRCULAR)
    assert equivariance_error(layer, ("shifts", group), x) < EXACT
    zeros = GroupConv2d(3, 4, 3, group=group, kernel=kernel, padding=1)
    assert equivariance_error(zeros, group, x) < EXACT
    assert equivariance_error(zeros, "shifts", x) > CLEAR


def test_groups_by_table_are_equivariant():
    table = [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    hue = Group("hue", table)
    assert (
        equivariance_error(
            GroupConv2d(2, 5, 3, group=hue, **CIRCULAR), ["shifts", hue], torch.randn(2, 2, 3, 4, 6)
        )
        < EXACT
    )
    assert (
        equivariance_error(
            nn.Conv3d(2, 5, (3, 1, 1), padding="same"), hue, torch.randn(2, 2, 3, 4, 6)
        )
        > CLEAR
    )
    cycle = Group("cycle", table, permutations={(3, 1): table})
    lifting = LiftingConv2d(2, 5, (3, 1), group=cycle)
    assert equivariance_error(lifting, cycle, torch.randn(2, 2, 3, 1)) < EXACT
    assert (
        equivariance_error(
            nn.Sequential(lifting, Spatial(), nn.Flatten()), cycle, torch.randn(2, 2, 3, 1)
        )
        > CLEAR
    )


@pytest.mark.parametrize(
    ("stride", "shape"), [(2, (3, 2, 6, 6)), (3, (3, 2, 6, 6)), (2, (3, 2, 8, 4, 4))]
)
def test_polyphase_pool_is_equivariant(stride, shape):
    assert (
        equivariance_error(PolyphasePool2d(stride), ("shifts", "p4m"), torch.randn(shape)) < EXACT
    )


def test_polyphase_pool_is_equivariant_where_the_background_has_the_maximum():
    x = torch.ones(2, 1, 8, 8)
    x[:, :, 2:5, 3:5] = torch.rand(2, 1, 3, 2)
    assert equivariance_error(PolyphasePool2d(), ("shifts", "p4m"), x) < EXACT
    # the same behind a convolution, whose background is constant only up to rounding
    layer = nn.Sequential(nn.Conv2d(1, 5, 3, **CIRCULAR), PolyphasePool2d())
    assert equivariance_error(layer, "shifts", x) < EXACT


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_stack_is_equivariant_and_then_invariant(kernel):
    x = torch.randn(2, 2, 8, 8)
    net = stack(kernel=kernel)
    assert equivariance_error(net, ("shifts", "p4"), x) < EXACT
    invariant = nn.Sequential(net, Spatial(), nn.Linear(5, 7))
    assert equivariance_error(invariant, ("shifts", "p4"), x) < EXACT
    assert equivariance_error(invariant, "pm", x) > 1e-4  # its filters have no mirror images
    assert (
        equivariance_error(nn.Sequential(net, nn.Flatten(), nn.Linear(20, 7)), "shifts", x) > CLEAR
    )
    turned_and_shifted = x.rot90(1, (-2, -1)).roll((3, 1), (-2, -1))
    torch.testing.assert_close(invariant(turned_and_shifted), invariant(x))


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_image_does_not_depend_on_its_batch(kernel):
    net, x = stack("p4m", kernel), torch.randn(5, 2, 8, 8)
    together = net(x)
    for i in range(5):
        torch.testing.assert_close(net(x[i : i + 1]), together[i : i + 1])


def test_convolution_knows_shifts_and_nothing_else():
    x = torch.randn(2, 3, 6, 6)
    layer = nn.Conv2d(3, 5, 3, **CIRCULAR)
    assert equivariance_error(layer, "shifts", x) < EXACT
    for group in ("p2", "p4", "pm", "p4m", ("shifts", "p4")):
        assert equivariance_error(layer, group, x) > CLEAR


WITHOUT_SHIFTS = {
    "zero padding": lambda: nn.Conv2d(3, 5, 3, padding=1),
    "no padding": lambda: nn.Conv2d(3, 5, 3),
    "stride": lambda: nn.Conv2d(3, 5, 3, stride=2, **CIRCULAR),
    "max pooling": lambda: nn.MaxPool2d(2),
    "fully connected": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 36, 5)),
    "factored": lambda: FactoredLinear2d(3, 5, 6),
    "factored to another size": lambda: FactoredLinear2d(3, 5, 6, 3),
}


@pytest.mark.parametrize("build", WITHOUT_SHIFTS.values(), ids=WITHOUT_SHIFTS)
def test_layers_without_shifts_are_found_out(build):
    assert equivariance_error(build(), "shifts", torch.randn(2, 3, 6, 6)) > CLEAR


@pytest.mark.parametrize(
    "module",
    [nn.Conv2d(3, 5, 3, padding=1), PolyphasePool2d(), nn.MaxPool2d(2)],
    ids=["conv", "polyphase", "max"],
)
@pytest.mark.parametrize("by_hand", ["shifts", "p4"])
@torch.no_grad()
def test_error_equals_the_one_by_hand(module, by_hand):
    module, x = module.double(), torch.randn(2, 3, 6, 6) + torch.arange(6)
    y = module(x)
    size = y.shape[-1]
    worst = 0.0
    for dy, dx in (
        itertools.product(range(6), range(6))
        if by_hand == "shifts"
        else ((k, None) for k in range(4))
    ):
        for image, target in zip(x, y, strict=True):
            if dx is None:
                output, targets = (
                    module(image.rot90(dy, (-2, -1))[None])[0],
                    [target.rot90(dy, (-2, -1))],
                )
            elif size == 6:
                output, targets = (
                    module(image.roll((dy, dx), (-2, -1))[None])[0],
                    [target.roll((dy, dx), (-2, -1))],
                )
            else:
                output = module(image.roll((dy, dx), (-2, -1))[None])[0]
                targets = [
                    target.roll(shift, (-2, -1))
                    for shift in itertools.product(range(size), range(size))
                ]
            worst = max(worst, min(float((output - one).norm() / target.norm()) for one in targets))
    for batch_size in (1, 5, 1000):
        error = equivariance_error(module, by_hand, x, batch_size=batch_size)
        assert error == pytest.approx(worst, rel=1e-9, abs=1e-12)


def test_a_sample_of_the_shifts():
    seen = []

    class Watched(nn.Module):
        def forward(self, x):
            seen.extend(x[:, 0].flatten(1).argmax(1).tolist())
            return x

    x = torch.zeros(1, 1, 5, 7)
    x[..., 0, 0] = 1
    generator = torch.Generator().manual_seed(0)
    state = torch.get_rng_state()
    assert (
        equivariance_error(
            Watched(), "shifts", x, max_elements=12, batch_size=5, generator=generator
        )
        < EXACT
    )
    assert len(seen) == 1 + 12
    assert len(set(seen[1:])) == 12
    assert torch.equal(torch.get_rng_state(), state)
    seen.clear()
    equivariance_error(Watched(), "shifts", x)
    assert sorted(seen[1:]) == list(range(35))


def test_modes_and_gradients_are_left_alone():
    class Fails(nn.Module):
        def forward(self, x):
            assert not self.training
            assert not torch.is_grad_enabled()
            raise RuntimeError("no")

    net = nn.Sequential(nn.Conv2d(2, 3, 3, **CIRCULAR), nn.BatchNorm2d(3), nn.Dropout())
    net[1].eval()
    x = torch.randn(2, 2, 4, 4)
    assert equivariance_error(net, "shifts", x) < EXACT
    assert [part.training for part in net.modules()] == [True, True, False, True]
    net.append(Fails())
    with pytest.raises(RuntimeError, match="no"):
        equivariance_error(net, "shifts", x)
    assert [part.training for part in net.modules()] == [True, True, False, True, True]
    assert all(parameter.grad is None for parameter in net.parameters())


def test_zero_is_equivariant_and_nan_is_not():
    x = torch.randn(2, 3, 4, 4)
    assert equivariance_error(nn.Threshold(100.0, 0.0), ("shifts", "p4"), x) == 0
    x[1, 0, 2, 1] = float("nan")
    assert not equivariance_error(nn.Identity(), "p4", x) < EXACT


ERRORS = {
    "no such group": ("p6", (2, 3, 4, 4), nn.Identity(), "choose from shifts, p1, p2, p4, pm, p4m"),
    "no groups": ((), (2, 3, 4, 4), nn.Identity(), "at least one group"),
    "no batch": ("shifts", (3, 4, 4), nn.Identity(), r"needs images .* got shape \[3, 4, 4\]"),
    "empty": ("shifts", (0, 3, 4, 4), nn.Identity(), r"got shape \[0, 3, 4, 4\]"),
    "rectangle": ("p4", (2, 3, 4, 5), nn.Identity(), "height and width must agree, got 4 x 5"),
    "order": ("p4", (2, 3, 8, 4, 4), nn.Identity(), r"channels, 4, .* got shape \[2, 3, 8, 4, 4\]"),
    "outputs": ("shifts", (2, 3, 4, 4), nn.Flatten(2), r"must return .* got shape \[2, 3, 16\]"),
    "rows": ("shifts", (2, 3, 4, 4), nn.Flatten(0, 1), r"must return .* got shape \[6, 4, 4\]"),
}


@pytest.mark.parametrize(("group", "shape", "module", "match"), ERRORS.values(), ids=ERRORS)
def test_errors_say_what_was_found(group, shape, module, match):
    with pytest.raises(ValueError, match=match):
        equivariance_error(module, group, torch.randn(shape))


def test_settings_must_be_positive():
    with pytest.raises(ValueError, match="must be positive, got 0 and 256"):
        equivariance_error(nn.Identity(), "shifts", torch.randn(2, 3, 4, 4), max_elements=0)


def test_inputs_are_drawn_if_there_are_none():
    circular = {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}
    assert (
        equivariance_error(nn.Sequential(nn.ReLU(), nn.Conv2d(3, 2, **circular)), "shifts") < 1e-10
    )
    assert equivariance_error(GroupConv2d(3, 2, **circular), "p4") < 1e-10
    assert equivariance_error(FactoredLinear2d(3, 2, (4, 5)), "shifts") > 1e-2
    first, second = (
        equivariance_error(
            FactoredLinear2d(3, 2, 4), "p4", generator=torch.Generator().manual_seed(seed)
        )
        for seed in (0, 1)
    )
    assert first != second
    seen = []
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU())
    converted = convert(net, (1, 6, 5))
    converted.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1:]))
    assert equivariance_error(converted, "shifts") > 1e-2
    assert set(seen) == {(1, 6, 5)}  # which one of the paths takes
    with pytest.raises(ValueError, match="no layer in ReLU says how many channels"):
        equivariance_error(nn.ReLU(), "shifts")
