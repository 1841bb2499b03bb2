"""Sums of paths: what they compute, and their curvature."""

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


def test_paths_can_be_left_out_of_the_sum():
    first, second, fc = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 3, 1), FactoredLinear2d(2, 3, 4, 2)
    pool, x = nn.MaxPool2d(2), torch.randn(5, 2, 4, 4)
    pathway = ResidualPathway(first, second, fc=fc, pool=pool)
    whole = pathway(x)
    with pathway.without("0"):
        torch.testing.assert_close(pathway(x), pool(second(x)) + fc(x))
        with pathway.without("1", "fc"):
            assert not pathway(x).any()
        torch.testing.assert_close(pathway(x), pool(second(x)) + fc(x))
    assert torch.equal(pathway(x), whole)
    with pytest.raises(RuntimeError, match="inside"), pathway.without("fc"):
        raise RuntimeError("inside")
    assert torch.equal(pathway(x), whole)
    with (
        pytest.raises(ValueError, match="no path '3', only 0, 1, fc"),
        pathway.without("3"),
    ):
        pass
