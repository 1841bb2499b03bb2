"""Group convolutions equal their formula, and their rules share weights as they should."""

import copy
import itertools
import pickle
import re

import pytest
import torch
from builders import act, after_inverse
from cases import GROUP, cycle, name_of
from torch import nn
from twins import block_diagonal, ggn, relative_error

from laplace_invariance.curvature import (
    AugmentedGGN,
    check_model,
)
from laplace_invariance.curvature.rules import rules
from laplace_invariance.layers import (
    GroupConv2d,
    LiftingConv2d,
)
from laplace_invariance.layers.group import MAX_PATCH_INDICES
from laplace_invariance.layers.kernels import FACTORS


def source(position, size, mode):
    """Where padding takes a value from, or None."""
    if 0 <= position < size:
        return position
    beyond = {
        "zeros": None,
        "circular": position % size,
        "replicate": min(max(position, 0), size - 1),
        "reflect": -position if position < 0 else 2 * (size - 1) - position,
    }
    return beyond[mode]


def dense(layer, shape):
    """Obviously correct, but slow: the matrix of a layer, entry by entry from its formula."""
    lifting, group = isinstance(layer, LiftingConv2d), layer.group
    _, n_in, *order_in, height, width = shape
    n_out, order, groups = layer.out_channels, group.order, layer.groups
    full = not lifting and layer.kernel == "full"
    weight = layer.weight.detach().reshape(
        n_out, n_in // groups, order if full else 1, *layer.kernel_size
    )
    (kh, kw), (ph, pw), (dh, dw) = layer.kernel_size, layer.padding, layer.dilation
    out_height, out_width = height + 2 * ph - dh * (kh - 1), width + 2 * pw - dw * (kw - 1)
    matrix = torch.zeros(n_out, order, out_height, out_width, n_in, *order_in, height, width)
    for d, r, c in itertools.product(range(n_out), range(order), range(n_in // groups)):
        channel = d // (n_out // groups) * (n_in // groups) + c
        for s in range(order) if full else [r]:
            filter_ = act(group, r, weight[d, c, after_inverse(group, r, s) if full else 0])
            for i, j, u, v in itertools.product(
                range(out_height), range(out_width), range(kh), range(kw)
            ):
                y = source(i - ph + dh * u, height, layer.padding_mode)
                x = source(j - pw + dw * v, width, layer.padding_mode)
                if y is not None and x is not None:
                    matrix[d, r, i, j][(channel, y, x) if lifting else (channel, s, y, x)] += (
                        filter_[u, v]
                    )
    return matrix.flatten(4).flatten(0, 3), (n_out, order, out_height, out_width)


@pytest.mark.parametrize(("build", "shape"), GROUP, ids=name_of)
def test_layer_equals_its_dense_matrix(build, shape):
    layer = build()
    x = torch.randn(shape)
    matrix, out_shape = dense(layer, shape)
    expected = (x.flatten(1) @ matrix.mT).view(2, *out_shape)
    if layer.bias is not None:
        expected = expected + layer.bias.view(-1, 1, 1, 1)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(("build", "shape"), GROUP, ids=name_of)
def test_weights_are_shared_over_positions_and_elements(
    build, shape
):  # that rules equal autograd is in test_rules.py
    module = build()
    output = module(torch.randn(shape))
    for block in rules()[type(module)](module):
        if block.a is not None:
            a, g = block.a(torch.randn(shape)), block.g(output)
            assert a.shape[:-1] == g.shape[:-1]
            assert a.shape[1] == output.shape[2:].numel()


def test_the_rule_is_differentiable_in_the_input():
    layer = GroupConv2d(2, 3, 3, padding=1, group="p2")
    block = next(iter(rules()[GroupConv2d](layer)))
    assert torch.autograd.gradcheck(block.a, torch.randn(2, 2, 2, 3, 4, requires_grad=True))


def product_filter(layer):
    """The filter ``[D, C / groups, order, height, width]`` of a full layer, entry by entry."""
    n_out, order = layer.out_channels, layer.group.order
    per_group, out_per_group = layer.in_channels // layer.groups, n_out // layer.groups
    filter_ = torch.zeros(n_out, per_group, order, *layer.kernel_size)
    for d, c, s in itertools.product(range(n_out), range(per_group), range(order)):
        channel = d // out_per_group * per_group + c
        spatial = layer.spatial.weight.detach()[channel, 0]
        if layer.kernel == "pairwise":
            pair = channel * out_per_group + d % out_per_group
            spatial = layer.spatial.weight.detach()[pair, 0]
        if layer.kernel == "depthwise":
            mixing = layer.elements.weight[channel, s] * layer.channels.weight[d, c]
        else:
            mixing = layer.mixing.weight[d, c * order + s]
        filter_[d, c, s] = mixing.detach() * act(layer.group, s, spatial)
    return filter_


@pytest.mark.parametrize("kernel", FACTORS)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_product_is_full_with_the_product_as_its_filter(kernel, groups):
    options = {"padding": 1, "padding_mode": "circular", "groups": groups}
    product, full = GroupConv2d(6, 4, 3, kernel=kernel, **options), GroupConv2d(6, 4, 3, **options)
    with torch.no_grad():
        full.weight.copy_(product_filter(product).flatten(1, 2))
        full.bias.copy_(product.factors[-1].bias)
    x = torch.randn(2, 6, 4, 5, 7)
    torch.testing.assert_close(product(x), full(x))


PRODUCTS = {
    "separable": {"spatial.weight": 3 * 9, "mixing.weight": 5 * 12, "mixing.bias": 5},
    "pairwise": {"spatial.weight": 15 * 9, "mixing.weight": 15 * 4, "mixing.bias": 5},
    "depthwise": {
        "spatial.weight": 3 * 9,
        "elements.weight": 3 * 4,
        "channels.weight": 5 * 3,
        "channels.bias": 5,
    },
}


@pytest.mark.parametrize("kernel", FACTORS)
def test_a_product_leaves_all_parameters_to_its_factors(kernel):
    product = GroupConv2d(3, 5, 3, kernel=kernel)
    found = {name: parameter.numel() for name, parameter in product.named_parameters()}
    assert found == PRODUCTS[kernel]
    assert list(rules()[GroupConv2d](product)) == []
    assert check_model(product)


@pytest.mark.parametrize("kernel", FACTORS)
def test_curvature_of_factors_is_exact_where_nothing_is_shared(kernel):
    for group, shape in (("p1", (1, 1, 1, 3, 3)), ("p4", (1, 1, 4, 4, 4))):
        layer = GroupConv2d(1, 1, 3, kernel=kernel, group=group, bias=False)
        model = nn.Sequential(layer, nn.Flatten(), nn.Tanh())
        x = torch.randn(shape)
        _, kron = AugmentedGGN(model, "regression").kron(x, torch.randn_like(model(x)), N=1)
        expected = block_diagonal(ggn(model, model(x), "regression"), model).detach()
        error = relative_error(kron.to_matrix(), expected)
        assert error < 1e-10 if group == "p1" else error > 1e-3


def test_pointwise_is_full_with_zeros():
    pointwise, full = GroupConv2d(3, 5, 3, kernel="pointwise"), GroupConv2d(3, 5, 3)
    with torch.no_grad():
        full.weight.zero_()[:, ::4] = pointwise.weight  # the identity comes first
        full.bias.copy_(pointwise.bias)
    x = torch.randn(2, 3, 4, 5, 7)
    torch.testing.assert_close(pointwise(x), full(x))


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_the_trivial_group_is_a_plain_convolution(mode):
    torch.manual_seed(1)
    plain = nn.Conv2d(4, 6, 3, padding=1, padding_mode=mode, dilation=(1, 1), groups=2)
    torch.manual_seed(1)
    on_group = GroupConv2d(4, 6, 3, padding=1, padding_mode=mode, groups=2, group="p1")
    x = torch.randn(2, 4, 5, 7)
    torch.testing.assert_close(
        on_group(x.unsqueeze(2)).squeeze(2), plain(x)
    )  # initial values agree as well


def test_initial_values_fill_their_range():
    for layer, fan_in in ((LiftingConv2d(4, 50, 3), 36), (GroupConv2d(4, 50, 3), 144)):
        bound = fan_in**-0.5
        assert 0.98 * bound < layer.weight.abs().max() <= bound
        layer.reset_parameters(0.5)
        assert 0.98 * bound < 2 * layer.weight.abs().max() <= bound
    layer = GroupConv2d(40, 50, 3, kernel="separable")
    layer.reset_parameters(0.5)
    assert layer.spatial.weight.abs().max() > 0.98 / 3
    assert layer.mixing.weight.abs().max() <= 0.5 / 160**0.5


def test_layers_print_their_settings_and_survive_copies():
    layer = GroupConv2d(3, 5, 3, group="p4m", kernel="pointwise")
    assert "kernel_size=(3, 3)" in repr(layer)
    assert "group='p4m', kernel='pointwise'" in repr(layer)
    x = torch.randn(2, 3, 8, 4, 4)
    twin = GroupConv2d(3, 5, 3, group="p4m", kernel="pointwise")
    twin.load_state_dict(copy.deepcopy(layer).state_dict())
    assert set(twin.state_dict()) == {"weight", "bias"}
    assert torch.equal(twin(x), layer(x))


LIFTING_ERRORS = {
    "kernel not square": ({"kernel_size": (3, 5)}, r"kernel_size must be the same .* got \(3, 5\)"),
    "padding not square": ({"padding": (1, 2)}, "padding must be the same in both directions"),
    "stride": ({"stride": 2}, "has no stride, .* got 2; subsample by PolyphasePool2d"),
    "no kernel": ({"kernel_size": 0}, "kernel_size must be .* integers of at least 1, got 0"),
    "one side more": ({"kernel_size": 2, "padding": "same"}, "would pad one side more"),
    "padding": ({"padding": "most"}, "padding must be .* integers of at least 0, got 'most'"),
    "padding mode": ({"padding_mode": "mirror"}, "padding_mode must be one of .*, got 'mirror'"),
    "group": ({"group": "p6"}, "no group 'p6'"),
    "permutations": ({"group": cycle()}, "no permutations of 3 x 3 positions"),
    "groups": ({"groups": 2}, "channels that groups divide, got 3 and 5 with groups=2"),
}


@pytest.mark.parametrize(("options", "match"), LIFTING_ERRORS.values(), ids=LIFTING_ERRORS)
@pytest.mark.parametrize("layer", [LiftingConv2d, GroupConv2d])
def test_settings_that_are_not_allowed_are_named(layer, options, match):
    with pytest.raises(ValueError, match=match):
        layer(3, 5, **{"kernel_size": 3} | options)


def test_unknown_options_are_named():
    with pytest.raises(ValueError, match="pairwise, depthwise, got 'sparse'"):
        GroupConv2d(3, 5, 3, kernel="sparse")
    for kernel in ("full", "depthwise"):
        with pytest.raises(TypeError, match="unexpected keyword argument 'omega'"):
            GroupConv2d(3, 5, 3, kernel=kernel, omega=1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'kernel'"):
        LiftingConv2d(3, 5, 3, kernel="full")


@pytest.mark.parametrize("shape", [(3, 6, 6), (2, 4, 6, 6)], ids=str)
def test_lifting_names_shapes_that_do_not_fit(shape):
    found = re.escape(str(list(shape)))
    with pytest.raises(ValueError, match=rf"needs \[n, 3, height, width\], got shape {found}"):
        LiftingConv2d(3, 5, 3)(torch.randn(shape))


@pytest.mark.parametrize("shape", [(2, 3, 6, 6), (2, 3, 8, 6, 6), (2, 4, 4, 6, 6)], ids=str)
def test_group_convolution_names_shapes_that_do_not_fit(shape):
    found = re.escape(str(list(shape)))
    with pytest.raises(ValueError, match=rf"\[n, 3, 4, height, width\], got shape {found}"):
        GroupConv2d(3, 5, 3)(torch.randn(shape))


# The index by which the rule looks entries up.


def test_elements_read_an_image_in_their_own_order():
    numbers = torch.arange(1, 5).view(1, 1, 2, 2)
    index = LiftingConv2d(1, 1, 2).patch_index(numbers)
    assert index.squeeze().tolist() == [[1, 2, 3, 4], [3, 1, 4, 2], [4, 3, 2, 1], [2, 4, 1, 3]]


@pytest.mark.parametrize("kernel", ["full", "pointwise"])
def test_the_index_is_found_once_for_every_shape(kernel):
    layer = GroupConv2d(2, 3, 3, padding=1, kernel=kernel)
    small, large = torch.randn(2, 2, 4, 5, 5), torch.randn(3, 2, 4, 6, 7)
    first, second = layer.patch_index(small), layer.patch_index(large)
    assert first.shape != second.shape
    assert layer.patch_index(small[:1]) is first
    assert layer.patch_index(large) is second


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_copies_find_their_own_index(duplicate):
    layer, x = GroupConv2d(2, 3, 3), torch.randn(2, 2, 4, 5, 5)
    index = layer.patch_index(x)
    twin = duplicate(layer)
    assert twin.patch_index(x) is not index
    assert torch.equal(twin.patch_index(x), index)
    twin.patch_index(x).zero_()
    assert torch.equal(layer.patch_index(x), GroupConv2d(2, 3, 3).patch_index(x))


def test_an_index_found_in_inference_mode_can_be_differentiated_with():
    layer = LiftingConv2d(2, 3, 3)
    (block, _) = rules()[LiftingConv2d](layer)
    x = torch.randn(2, 2, 4, 4, requires_grad=True)
    with torch.inference_mode():
        block.a(x.detach())
    block.a(x).sum().backward()
    assert x.grad.abs().sum() > 0


def test_the_index_is_neither_pickled_nor_in_the_state():
    layer = GroupConv2d(2, 3, 3)
    before = len(pickle.dumps(layer))
    layer.patch_index(torch.randn(1, 2, 4, 9, 9))
    assert len(pickle.dumps(layer)) == before
    assert set(layer.state_dict()) == {"weight", "bias"}


def test_a_layer_keeps_few_indices_of_patches():
    layer = LiftingConv2d(1, 2, 3)
    for size in range(3, 3 + 2 * MAX_PATCH_INDICES):
        x = torch.randn(1, 1, size, size)
        assert torch.equal(layer.patch_index(x), LiftingConv2d(1, 2, 3).patch_index(x))
    assert len(layer._patch_indices) <= MAX_PATCH_INDICES
