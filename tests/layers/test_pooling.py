"""Polyphase pooling keeps the largest component, and pooling over a group."""

import itertools

import pytest
import torch

from laplace_invariance.layers import (
    GroupPool,
    PolyphasePool2d,
)


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


ERRORS = {
    "no stride": (lambda: PolyphasePool2d(0), "stride must be a positive integer, got 0"),
    "stride that does not divide": (
        lambda: PolyphasePool2d(3)(torch.randn(2, 3, 6, 8)),
        "stride 3 must divide height and width, got 6 x 8",
    ),
    "no batch": (
        lambda: PolyphasePool2d()(torch.randn(3, 6, 8)),
        r"PolyphasePool2d needs .* got shape \[3, 6, 8\]",
    ),
    "unknown": (lambda: GroupPool("sum"), "reduce must be one of mean, max, got 'sum'"),
    "no group": (
        lambda: GroupPool()(torch.randn(2, 3, 6, 8)),
        r"GroupPool needs .* got shape \[2, 3, 6, 8\]",
    ),
}


@pytest.mark.parametrize(("call", "match"), ERRORS.values(), ids=ERRORS)
def test_errors_say_what_was_found(call, match):
    with pytest.raises(ValueError, match=match):
        call()
