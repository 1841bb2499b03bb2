"""Finite groups: their elements, and the weights of these."""

import pytest
import torch

import laplace_invariance as li


def test_zero_weights_leave_the_identity():
    group, x = li.FiniteGroup("flips"), torch.randn(3, 2, 7, 5)
    samples = group.transform(x, group.sample(len(x), 4))
    torch.testing.assert_close(samples[:, 0], x)
    torch.testing.assert_close(group.weights(4), torch.tensor([1.0, 0, 0, 0]))
    torch.testing.assert_close(group(x), x)


def test_finite_group_elements_and_weights():
    x = torch.randn(2, 1, 5, 5)
    group = li.FiniteGroup("all", init=1.0)
    samples = group.transform(x, group.sample(2, 1))
    assert samples.shape == (2, 6, 1, 5, 5)
    torch.testing.assert_close(samples[:, group.names.index("quarter_turn")], x.rot90(1, (2, 3)))
    torch.testing.assert_close(samples[:, group.names.index("horizontal_flip")], x.flip(3))
    torch.testing.assert_close(group.weights(6), torch.full((6,), 1 / 6))
    assert group.magnitudes() == pytest.approx(dict.fromkeys(group.names, 1 / 6))
    group.eta.data[:2] = torch.tensor([-1.0, 2.0])
    group.project_()
    assert group.eta[:2].tolist() == [0, 1]


REJECTED = {
    "element": (lambda: li.FiniteGroup("mirror"), "no element 'mirror'"),
    "negative init": (lambda: li.FiniteGroup(init=-1), "between 0"),
    "large init": (lambda: li.FiniteGroup(init=1.5), "full invariance"),
    "oblong images": (
        lambda: li.FiniteGroup().transform(torch.randn(3, 2, 7, 5), torch.zeros(1, 6).long()),
        "square images",
    ),
    "number of samples": (lambda: li.FiniteGroup("flips").weights(3), "4 elements"),
}


@pytest.mark.parametrize(("build", "match"), REJECTED.values(), ids=REJECTED)
def test_bad_input_is_explained(build, match):
    with pytest.raises(ValueError, match=match):
        build()
