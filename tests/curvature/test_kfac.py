"""The pure functions: Gram matrices, folding, factors, eigenvalues."""

from types import SimpleNamespace

import pytest
import torch
from twins import whole

from laplace_invariance.curvature import eigen, kfac


def symmetric(*shape):
    x = torch.randn(*shape)
    return x + x.mT


def probabilities(*shape):
    """Probabilities of some classes, which leave a part for another."""
    return 0.8 * torch.rand(*shape).softmax(-1)


def dense_weights(p):
    return torch.diag_embed(p) - torch.einsum("bk,bl->bkl", p, p)


LAYOUTS = {
    "dense": (kfac.gram, "bkl,bkrqi,blrqj->ij"),
    "blocks": (kfac.gram_blocks, "bkl,bkrqi,blrqj->qij"),
    "diagonal": (kfac.weighted_diagonal, "bkl,bkrqi,blrqi->i"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_gram_equals_the_sum_of_outer_products(weighted, scale, layout):
    function, equation = LAYOUTS[layout]
    x = torch.randn(2, 3, 5, 4, 7, requires_grad=True)
    weights = probabilities(2, 3).requires_grad_() if weighted else None
    m = dense_weights(weights) if weighted else torch.eye(3).expand(2, 3, 3)
    expected = scale * torch.einsum(equation, m, x, x)
    actual = function(x, weights, scale)
    torch.testing.assert_close(actual, expected)
    inputs = [x, weights] if weighted else [x]
    cotangent = torch.randn_like(expected)  # not symmetric
    torch.testing.assert_close(
        torch.autograd.grad(actual, inputs, cotangent),
        torch.autograd.grad(expected, inputs, cotangent),
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_gram_of_columns_equals_that_of_their_transpose(weighted):
    """As of convolutions, whose positions come last."""
    weights = probabilities(2, 3).requires_grad_() if weighted else None
    x = torch.randn(2, 3, 5, 7, requires_grad=True)
    results = [kfac.gram(x.mT, weights, 0.3), kfac.gram(x.mT.contiguous(), weights, 0.3)]
    torch.testing.assert_close(*results)
    inputs, cotangent = ([x, weights] if weighted else [x]), torch.randn(5, 5)
    torch.testing.assert_close(*[torch.autograd.grad(r, inputs, cotangent) for r in results])
    with kfac.pulling_back(values=False):
        assert kfac.gram(x.mT, weights).shape == (5, 5)


def test_only_short_columns_are_multiplied_as_they_are_stored(monkeypatch):
    found = []
    spy = SimpleNamespace(apply=lambda x, weights, scale, layout: found.append(layout))
    monkeypatch.setattr(kfac, "_Gram", spy)
    short, long = torch.randn(2, 3, 5, 7).mT, torch.randn(2, 3, 7, 5).mT
    for x in (short, short.contiguous(), long):
        kfac.gram(x)
    assert found == ["transposed", "dense", "dense"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("values", [False, True])
def test_gram_under_symmetric_cotangents_has_the_same_gradient(values, layout):
    function, _ = LAYOUTS[layout]
    x = torch.randn(2, 3, 5, 4, 7, requires_grad=True)
    weights = probabilities(2, 3).requires_grad_()
    expected = function(x, weights, 0.3)
    cotangent = torch.randn_like(expected)
    with kfac.pulling_back(values):
        actual = function(x, weights, 0.3)
    assert actual.shape == expected.shape
    assert torch.equal(actual, expected) is values
    pulled = torch.autograd.grad(actual, [x, weights], kfac.symmetrised(cotangent))
    torch.testing.assert_close(pulled, torch.autograd.grad(expected, [x, weights], cotangent))
    assert torch.equal(function(x, weights, 0.3), expected)  # the context has ended


def test_cotangents_are_symmetrised_once():
    cotangent = torch.randn(2, 3, 3)
    once = kfac.symmetrised(cotangent)
    torch.testing.assert_close(once, (cotangent + cotangent.mT) / 2)
    assert kfac.symmetrised(once) is once
    vector = torch.randn(3)
    assert kfac.symmetrised(vector) is vector


@pytest.mark.parametrize("n", [3, 200])
def test_large_symmetric_products_are_complete(n):
    x = torch.randn(n, 700)
    weights = symmetric(n, n)
    torch.testing.assert_close(kfac.symmetric_product(x, weights @ x), x.mT @ weights @ x)


def test_weighted_diagonal_is_that_of_gram():
    x, weights = torch.randn(2, 3, 7), probabilities(2, 3)
    torch.testing.assert_close(kfac.weighted_diagonal(x, weights), kfac.gram(x, weights).diagonal())
    torch.testing.assert_close(kfac.weighted_diagonal(x), kfac.gram(x).diagonal())


@pytest.mark.parametrize("inner", [1, 4])
def test_folding_averages_inputs_and_sums_gradients(inner):
    x, weights = torch.randn(2 * 3 * inner, 5), torch.tensor([0.5, 0.2, 0.3])
    by_sample = x.view(2, 3, inner, 5)
    expected = (by_sample * weights.view(3, 1, 1)).sum(1).flatten(0, 1)
    torch.testing.assert_close(kfac.fold_inputs(x, [(2, weights)]), expected)
    torch.testing.assert_close(
        kfac.fold_gradients(x, [(2, weights)]), by_sample.sum(1).flatten(0, 1)
    )
    assert kfac.fold_inputs(x, ()) is x
    torch.testing.assert_close(
        kfac.fold_inputs(x, [(len(x), torch.tensor([0.25]))]), x / 4
    )  # one of several samples


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_factors_scale_as_documented(approx):
    a, g, p = torch.randn(2, 3, 5), torch.randn(2, 4, 3, 7), probabilities(2, 4)
    outer, inner = kfac.factors(a, g, p, 11, approx)
    weights = dense_weights(p)
    if approx == "expand":
        torch.testing.assert_close(inner, torch.einsum("bri,brj->ij", a, a) / 11)
        torch.testing.assert_close(outer, torch.einsum("bkl,bkro,blrp->op", weights, g, g) / 3)
    else:
        torch.testing.assert_close(inner, torch.einsum("bri,bsj->ij", a, a) / 9 / 11)
        torch.testing.assert_close(outer, torch.einsum("bkl,bkro,blsp->op", weights, g, g))


@pytest.mark.parametrize("d", [1, 7])
def test_slots_are_positions_with_their_own_outputs(d):
    a, g = torch.randn(2, 3, 2, 5), torch.randn(2, 4, 3, 2, d)
    padded = torch.zeros(2, 4, 3, 2, 2 * d)
    padded[..., 0, :d], padded[..., 1, d:] = g[..., 0, :], g[..., 1, :]
    expected = kfac.factors(a.flatten(1, 2), padded.flatten(2, 3), None, 11, "expand")
    actual = kfac.factors(a, g, None, 11, "expand")
    assert actual[0].shape == ((2,) if d == 1 else (2, d, d))
    for factor, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(whole(factor), wanted)


def test_slots_of_columns_share_the_mean_of_their_gradient_factors():
    a, g = torch.randn(2, 3, 4, 5), torch.randn(2, 6, 3, 4, 7)
    outer, inner = kfac.factors(a, g, None, 11, "expand", slotted_columns=True)
    torch.testing.assert_close(inner, torch.einsum("brqi,brqj->qij", a, a) / 11)
    of_each = torch.einsum("bkrqo,bkrqp->qop", g, g) / 3
    torch.testing.assert_close(outer, of_each.mean(0))
    options = {"slotted_columns": True, "per_slot": True}
    torch.testing.assert_close(kfac.factors(a, g, None, 11, "expand", **options), (of_each, inner))


def test_eigenvalues_that_single_precision_gets_wrong_are_computed_in_double(monkeypatch):
    root = torch.randn(3, 5, 4)
    matrices = (root @ root.mT).float()
    expected = torch.linalg.eigvalsh(matrices.double())
    plain = torch.linalg.eigh

    def broken(x):  # as LAPACK does now and then for matrices of low rank: NaN without a word
        values, vectors = plain(x)
        return (
            values.index_fill(-1, torch.tensor(2), float("nan"))
            if x.dtype == torch.float32
            else values
        ), vectors

    def failing(x):
        if x.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return plain(x)

    for eigh in (broken, failing):
        monkeypatch.setattr(torch.linalg, "eigh", eigh)
        values, vectors = eigen.eigh(matrices)
        assert values.dtype == vectors.dtype == torch.float32
        torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            vectors @ values.diag_embed() @ vectors.mT, matrices, rtol=1e-4, atol=1e-4
        )
