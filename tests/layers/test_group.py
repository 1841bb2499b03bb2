"""Group convolutions equal their formula, their rules equal autograd, and pooling keeps what it says."""

import itertools

import pytest
import torch
from cases import GROUP, THREE, cycle, hue, name_of
from torch import nn

from laplace_invariance.curvature import check_model
from laplace_invariance.curvature.rules import rules
from laplace_invariance.layers.group import GroupConv2d, LiftingConv2d
from laplace_invariance.layers.pooling import GroupPool, PolyphasePool2d
from laplace_invariance.layers.symmetry import Group

TURNS = {"p1": 1, "p2": 2, "p4": 4, "pm": 1, "p4m": 4}


def act(group, element, x):
    """An element on images, with torch's own turns and flips."""
    if group.name not in TURNS:
        return x if group.name == "hue" else x.roll(element, -2)
    flips, turns = divmod(element, TURNS[group.name])
    return (x.flip(-1) if flips else x).rot90(turns * 4 // TURNS[group.name], (-2, -1))


def after_inverse(group, r, s):
    """``r^-1 s``: the element which, followed by ``r``, is ``s``."""
    if group.name not in TURNS:
        return (s - r) % 3
    probe = torch.arange(9).view(3, 3)
    (found,) = [
        q
        for q in range(group.order)
        if torch.equal(act(group, r, act(group, q, probe)), act(group, s, probe))
    ]
    return found


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
    """Obviously correct, but slow: the matrix of a layer, entry by entry from the formulas of its docstring."""
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


def test_separable_is_full_with_the_product_as_its_filter():
    separable = GroupConv2d(
        6, 4, 3, kernel="separable", padding=1, padding_mode="circular", groups=2
    )
    full = GroupConv2d(6, 4, 3, padding=1, padding_mode="circular", groups=2)
    with torch.no_grad():
        full.weight.copy_(separable.spatial.weight * separable.mixing.weight)
        full.bias.copy_(separable.spatial.bias)
    x = torch.randn(2, 6, 4, 5, 7)
    torch.testing.assert_close(separable(x), full(x))


def test_separable_leaves_all_parameters_to_its_parts():
    separable = GroupConv2d(3, 5, 3, kernel="separable")
    assert [name for name, _ in separable.named_parameters()] == [
        "mixing.weight",
        "spatial.weight",
        "spatial.bias",
    ]
    assert list(rules()[GroupConv2d](separable)) == []
    assert check_model(separable)


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
    layer = GroupConv2d(4, 50, 3, kernel="separable")
    layer.reset_parameters(0.5)
    assert layer.mixing.weight.abs().max() > 0.98 / 4
    assert layer.spatial.weight.abs().max() <= 0.5 / 3


def test_layers_print_their_settings_and_survive_copies():
    import copy

    layer = GroupConv2d(3, 5, 3, group="p4m", kernel="pointwise")
    assert "kernel_size=(3, 3)" in repr(layer)
    assert "group='p4m', kernel='pointwise'" in repr(layer)
    x = torch.randn(2, 3, 8, 4, 4)
    twin = GroupConv2d(3, 5, 3, group="p4m", kernel="pointwise")
    twin.load_state_dict(copy.deepcopy(layer).state_dict())
    assert set(twin.state_dict()) == {"weight", "bias"}
    assert torch.equal(twin(x), layer(x))


# ----------------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("name", list(TURNS))
def test_named_groups_are_turns_and_flips(name):
    group, x = Group.of(name), torch.randn(2, 4, 4)
    assert group.order == {"p1": 1, "p2": 2, "p4": 4, "pm": 2, "p4m": 8}[name]
    for g in range(group.order):
        torch.testing.assert_close(group.transform(x, g), act(group, g, x))
        assert group.table[g, group.inverse[g]] == 0
        for h in range(group.order):
            product = group.transform(x, int(group.table[g, h]))
            assert torch.equal(group.transform(group.transform(x, h), g), product)


def test_groups_act_on_features():
    group, x = Group.of("p4m"), torch.randn(2, 3, 8, 4, 4)
    for g, h in itertools.product(range(8), range(8)):
        moved = group.transform_features(x, g)
        torch.testing.assert_close(
            moved[:, :, h], act(group, g, x[:, :, after_inverse(group, g, h)])
        )
        twice, product = (
            group.transform_features(moved, h),
            group.transform_features(x, int(group.table[h, g])),
        )
        assert torch.equal(twice, product)


def test_groups_without_turns_act_on_any_size():
    x = torch.randn(3, 5)
    assert torch.equal(Group.of("pm").transform(x, 1), x.flip(-1))
    assert torch.equal(Group.of("p2").transform(x, 1), x.flip(-1, -2))
    upside_down = Group.from_matrices("upside down", [[[1, 0], [0, 1]], [[-1, 0], [0, 1]]])
    assert torch.equal(upside_down.transform(x, 1), x.flip(-2))
    assert torch.equal(hue().transform(x, 2), x)
    assert torch.equal(cycle().transform(x.T[:3, :1], 1), x.T[:3, :1].roll(1, 0))


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: Group.of("p3"), "no group 'p3'; choose from p1, p2, p4, pm, p4m"),
        (lambda: Group("odd", [[0, 1]]), r"square and hold integers, got torch.int64 \[1, 2\]"),
        (lambda: Group("odd", [[0.0, 1.0], [1.0, 0.0]]), r"square and hold integers, got torch.float\d\d"),
        (lambda: Group("odd", [[1, 0], [0, 1]]), "element 0 of group 'odd' is not the identity"),
        (lambda: Group("odd", [[0, 1, 2], [1, 2, 0], [2, 1, 0]]), "a column of the table .* does not hold every"),
        (lambda: Group("odd", [[0, 1, 2], [1, 0, 1], [2, 2, 0]]), "a (row|column) of the table .* does not hold every"),
        (
            lambda: Group(
                "loop", [[0, 1, 2, 3, 4], [1, 0, 3, 4, 2], [2, 4, 0, 1, 3], [3, 2, 4, 0, 1], [4, 3, 1, 2, 0]]
            ),
            "not associative",
        ),
        (lambda: Group("odd", THREE, permutations={(3, 1): [[0, 1, 2]]}), r"needs permutations \[3, 3\]"),
        (lambda: Group("odd", THREE, permutations={(3, 1): [[0, 1, 2]] * 2 + [[0, 0, 1]]}), "does not permute"),
        (lambda: Group("odd", THREE, permutations={(1, 2): [[0, 1], [1, 0], [0, 1]]}), "do not multiply as"),
        (lambda: Group("odd", [[0, 1], [1, 0]], [[[1, 0], [0, 1]], [[0, -1], [1, 0]]]), "do not multiply as"),
        (lambda: Group("odd", [[0, 1], [1, 0]], [[[1, 0], [0, 1]], [[1, 1], [0, 1]]]), "signed permutation"),
        (lambda: Group("odd", [[0]], [[[1, 0], [0, 1]]], {(1, 1): [[0]]}), "matrices and permutations"),
        (lambda: Group.from_matrices("odd", [[[1, 0], [0, 1]], [[0, -1], [1, 0]]]), "product of two is missing"),
        (lambda: Group.of("p4").transform(torch.randn(3, 5), 1), "height and width must agree, got 3 x 5"),
        (lambda: cycle().taps(2, 2), "no permutations of 2 x 2 positions, only of 3 x 1"),
        (lambda: Group.of("p4").transform_features(torch.randn(2, 3, 5, 4, 4), 1), r"\[n, channels, 4, height, width\]"),
        (lambda: LiftingConv2d(3, 5, (3, 5)), r"kernel_size must be the same in both directions, got \(3, 5\)"),
        (lambda: LiftingConv2d(3, 5, 3, padding=(1, 2)), "padding must be the same in both directions"),
        (lambda: LiftingConv2d(3, 5, 3, stride=2), "PolyphasePool2d"),
        (lambda: LiftingConv2d(3, 5, 0), "kernel_size must be one or two integers of at least 1, got 0"),
        (lambda: LiftingConv2d(3, 5, 2, padding="same"), "padding='same' would pad one side more"),
        (lambda: LiftingConv2d(3, 5, 3, padding="most"), "padding must be one or two integers"),
        (lambda: LiftingConv2d(3, 5, 3, padding_mode="mirror"), "padding_mode must be one of .*, got 'mirror'"),
        (lambda: LiftingConv2d(3, 5, 3, group="p6"), "no group 'p6'"),
        (lambda: LiftingConv2d(3, 5, 3)(torch.randn(3, 6, 6)), r"\[n, 3, height, width\], got shape \[3, 6, 6\]"),
        (lambda: LiftingConv2d(3, 5, 3)(torch.randn(2, 4, 6, 6)), r"got shape \[2, 4, 6, 6\]"),
        (lambda: LiftingConv2d(3, 5, 3, group=cycle()), "no permutations of 3 x 3 positions"),
        (lambda: GroupConv2d(3, 4, 3, groups=2), "channels that groups divide, got 3 and 4 with groups=2"),
        (lambda: GroupConv2d(3, 5, 3, kernel="sparse"), "kernel must be one of full, pointwise, separable, got 'sparse'"),
        (lambda: GroupConv2d(3, 5, 3)(torch.randn(2, 3, 6, 6)), r"\[n, 3, 4, height, width\], got shape \[2, 3, 6, 6\]"),
        (lambda: GroupConv2d(3, 5, 3)(torch.randn(2, 3, 8, 6, 6)), r"got shape \[2, 3, 8, 6, 6\]"),
        (lambda: PolyphasePool2d(0), "stride must be a positive integer, got 0"),
        (lambda: PolyphasePool2d(3)(torch.randn(2, 3, 6, 8)), "stride 3 must divide height and width, got 6 x 8"),
        (lambda: PolyphasePool2d()(torch.randn(3, 6, 8)), r"PolyphasePool2d needs .* got shape \[3, 6, 8\]"),
        (lambda: GroupPool("sum"), "reduce must be one of mean, max, got 'sum'"),
        (lambda: GroupPool()(torch.randn(2, 3, 6, 8)), r"GroupPool needs .* got shape \[2, 3, 6, 8\]"),
    ],
)  # fmt: skip
def test_errors_say_what_was_found(build, match):
    with pytest.raises(ValueError, match=match):
        build()


# ---------------------------------------------------------------------------------------------------------- pooling


@pytest.mark.parametrize("shape", [(5, 3, 6, 9), (5, 2, 4, 6, 9)])
def test_polyphase_pool_keeps_the_largest_component_of_each_image(shape):
    x = torch.randn(shape)
    kept = PolyphasePool2d(3)(x)
    chosen = set()
    for image, result in zip(x, kept, strict=True):
        components = [image[..., i::3, j::3] for i, j in itertools.product(range(3), range(3))]
        best = max(range(9), key=lambda k, parts=components: float(parts[k].abs().max()))
        assert torch.equal(result, components[best])
        chosen.add(best)
    assert len(chosen) > 1  # or images would not be told apart


def test_polyphase_pool_breaks_ties_by_the_l2_norm():
    x = torch.ones(1, 1, 4, 6)
    x[0, 0, :, ::2] = 0.5  # components (i, 0) have less
    x[0, 0, 0, 0] = 1.0  # and yet all but one of them share the largest value
    x[0, 0, 2, 3] = 0.0
    assert torch.equal(PolyphasePool2d()(x), x[..., 1::2, 1::2])


def test_polyphase_pool_takes_ties_up_to_rounding():
    x = torch.ones(1, 1, 4, 4)
    x[..., ::2, 1::2] += torch.finfo(x.dtype).eps
    x[0, 0, 0, 1] = 0.0
    x[0, 0, 0, 0] = x[0, 0, 1, 0] = 0.5
    assert torch.equal(PolyphasePool2d()(x), x[..., 1::2, 1::2])


def test_gradients_flow_through_the_kept_component():
    x = torch.randn(2, 3, 4, 6, requires_grad=True)
    y = PolyphasePool2d()(x)
    weights = torch.randn_like(y)
    (gradient,) = torch.autograd.grad(y, x, weights)
    torch.testing.assert_close(gradient[gradient != 0].sum(), weights.sum())
    assert (gradient != 0).sum() == weights.numel()
    assert torch.autograd.gradcheck(PolyphasePool2d(), x)


def test_group_pool():
    x = torch.randn(2, 3, 4, 5, 7)
    assert torch.equal(GroupPool()(x), x.mean(2))
    assert torch.equal(GroupPool("max")(x), x.max(2)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_pools_by_the_largest_value_as_well(dtype):
    x = torch.zeros(1, 1, 16, 16)
    x[0, 0, 0, 0] = 1
    x[0, 0, 1::2, 1::2] = 0.25  # of a larger l2 norm
    assert PolyphasePool2d(2)(x.to(dtype)).max() == 1
