"""Finite groups: their tables, and how they act on images and features."""

import itertools

import pytest
import torch
from builders import N_ROTATIONS, act, after_inverse
from cases import THREE, cycle, hue

from laplace_invariance.layers.symmetry import Group


@pytest.mark.parametrize("name", list(N_ROTATIONS))
def test_named_groups_are_rotations_and_flips(name):
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


def test_groups_without_quarter_turns_act_on_any_size():
    x = torch.randn(3, 5)
    assert torch.equal(Group.of("pm").transform(x, 1), x.flip(-1))
    assert torch.equal(Group.of("p2").transform(x, 1), x.flip(-1, -2))
    upside_down = Group.from_matrices("upside down", [[[1, 0], [0, 1]], [[-1, 0], [0, 1]]])
    assert torch.equal(upside_down.transform(x, 1), x.flip(-2))
    assert torch.equal(hue().transform(x, 2), x)
    assert torch.equal(cycle().transform(x.T[:3, :1], 1), x.T[:3, :1].roll(1, 0))


TWO, SWAP = [[0, 1], [1, 0]], [[0, -1], [1, 0]]
IDENTITY = [[1, 0], [0, 1]]
LOOP = [[0, 1, 2, 3, 4], [1, 0, 3, 4, 2], [2, 4, 0, 1, 3], [3, 2, 4, 0, 1], [4, 3, 1, 2, 0]]
ERRORS = {
    "no such name": (lambda: Group.of("p3"), "no group 'p3'; choose from p1, p2, p4, pm, p4m"),
    "not square": (lambda: Group("odd", [[0, 1]]), r"square and .* got torch.int64 \[1, 2\]"),
    "floating point": (
        lambda: Group("odd", [[0.0, 1.0], [1.0, 0.0]]),
        r"square and hold integers, got torch.float\d\d",
    ),
    "identity not first": (
        lambda: Group("odd", IDENTITY),
        "element 0 of group 'odd' is not the identity",
    ),
    "column": (
        lambda: Group("odd", [[0, 1, 2], [1, 2, 0], [2, 1, 0]]),
        "a column of the table .* does not hold every",
    ),
    "row": (
        lambda: Group("odd", [[0, 1, 2], [1, 0, 1], [2, 2, 0]]),
        "a (row|column) of the table .* does not hold every",
    ),
    "not associative": (lambda: Group("loop", LOOP), "not associative"),
    "permutations of another shape": (
        lambda: Group("odd", THREE, permutations={(3, 1): [[0, 1, 2]]}),
        r"needs permutations \[3, 3\]",
    ),
    "no permutations": (
        lambda: Group("odd", THREE, permutations={(3, 1): [[0, 1, 2]] * 2 + [[0, 0, 1]]}),
        "does not permute",
    ),
    "permutations of another table": (
        lambda: Group("odd", THREE, permutations={(1, 2): [[0, 1], [1, 0], [0, 1]]}),
        "do not multiply as",
    ),
    "matrices of another table": (
        lambda: Group("odd", TWO, [IDENTITY, SWAP]),
        "do not multiply as",
    ),
    "no signed permutations": (
        lambda: Group("odd", TWO, [IDENTITY, [[1, 1], [0, 1]]]),
        "signed permutation",
    ),
    "both": (
        lambda: Group("odd", [[0]], [IDENTITY], {(1, 1): [[0]]}),
        "matrices and permutations",
    ),
    "not closed": (
        lambda: Group.from_matrices("odd", [IDENTITY, SWAP]),
        "product of two is missing",
    ),
    "quarter turn of a rectangle": (
        lambda: Group.of("p4").transform(torch.randn(3, 5), 1),
        "height and width must agree, got 3 x 5",
    ),
    "another size": (
        lambda: cycle().taps(2, 2),
        "no permutations of 2 x 2 positions, only of 3 x 1",
    ),
    "another order": (
        lambda: Group.of("p4").transform_features(torch.randn(2, 3, 5, 4, 4), 1),
        r"\[n, channels, 4, height, width\]",
    ),
}


@pytest.mark.parametrize(("build", "match"), ERRORS.values(), ids=ERRORS)
def test_errors_say_what_was_found(build, match):
    with pytest.raises(ValueError, match=match):
        build()
