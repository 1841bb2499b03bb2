"""The pure functions: directions of the loss Hessian, Gram matrices, folding."""

import pytest
import torch
from torch.autograd import gradcheck

from laplace_invariance.curvature import kfac


def symmetric(*shape):
    x = torch.randn(*shape)
    return x + x.mT


@pytest.mark.parametrize("n", [2, 3, 7])
def test_complement_basis_is_orthonormal_and_sums_to_zero(n):
    basis = kfac.complement_basis(n, torch.zeros(()))
    torch.testing.assert_close(basis.mT @ basis, torch.eye(n - 1))
    torch.testing.assert_close(basis.sum(0), torch.zeros(n - 1))


def test_fixed_directions_give_the_softmax_hessian():
    logits = torch.randn(5, 4)
    hessian = kfac.softmax_hessian(logits)
    basis = kfac.complement_basis(4, logits)
    torch.testing.assert_close(basis @ (basis.mT @ hessian @ basis) @ basis.mT, hessian)
    expected = torch.stack(
        [torch.autograd.functional.hessian(lambda f: f.logsumexp(0), row) for row in logits]
    )
    torch.testing.assert_close(hessian, expected)


def test_leading_directions_keep_the_largest_part():
    hessian = kfac.softmax_hessian(4 * torch.randn(6, 5))
    full, kept, total = kfac.leading_directions(hessian, 4)
    torch.testing.assert_close(full @ (full.mT @ hessian @ full) @ full.mT, hessian)
    torch.testing.assert_close(kept, total)
    one, kept, total = kfac.leading_directions(hessian, 1)
    assert kept < total
    torch.testing.assert_close(kept, torch.linalg.eigvalsh(hessian)[:, -1].sum())
    assert one.shape == (6, 5, 1)


def test_sampled_directions_are_unbiased():
    logits = torch.randn(1, 3)
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3).unsqueeze(
        1
    )  # all of them: the exact expectation
    v = kfac.sampled_directions(logits, signs)
    torch.testing.assert_close(torch.einsum("kbi,kbj->bij", v, v) / 8, kfac.softmax_hessian(logits))


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_gram_equals_the_sum_of_outer_products(weighted, scale):
    x = torch.randn(2, 3, 5, 7, requires_grad=True)
    weights = symmetric(2, 3, 3).requires_grad_() if weighted else None
    m = torch.eye(3).expand(2, 3, 3) if weights is None else weights
    expected = scale * torch.einsum("bkl,bkri,blrj->ij", m, x, x)
    torch.testing.assert_close(kfac.gram(x, weights, scale), expected)

    def of_symmetric(
        x, w
    ):  # the gradient assumes that the weights are symmetric, and so must the check
        return kfac.gram(x, None if w is None else (w + w.mT) / 2, scale)

    assert gradcheck(of_symmetric, (x, weights))


def test_large_symmetric_products_are_complete():
    x = torch.randn(3, 700)
    weights = symmetric(3, 3)
    torch.testing.assert_close(kfac.symmetric_product(x, weights @ x), x.mT @ weights @ x)


def test_weighted_diagonal_is_that_of_gram():
    x, weights = torch.randn(2, 3, 7), symmetric(2, 3, 3)
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
    a, g, weights = torch.randn(2, 3, 5), torch.randn(2, 4, 3, 7), symmetric(2, 4, 4)
    outer, inner = kfac.factors(a, g, weights, 11, approx)
    if approx == "expand":
        torch.testing.assert_close(inner, torch.einsum("bri,brj->ij", a, a) / 11)
        torch.testing.assert_close(outer, torch.einsum("bkl,bkro,blrp->op", weights, g, g) / 3)
    else:
        torch.testing.assert_close(inner, torch.einsum("bri,bsj->ij", a, a) / 9 / 11)
        torch.testing.assert_close(outer, torch.einsum("bkl,bkro,blsp->op", weights, g, g))


def test_slots_are_positions_with_their_own_outputs():
    a, g = torch.randn(2, 3, 2, 5), torch.randn(2, 4, 3, 2, 7)
    padded = torch.zeros(2, 4, 3, 2, 14)
    padded[..., 0, :7], padded[..., 1, 7:] = g[..., 0, :], g[..., 1, :]
    expected = kfac.factors(a.flatten(1, 2), padded.flatten(2, 3), None, 11, "expand")
    for actual, wanted in zip(kfac.factors(a, g, None, 11, "expand"), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


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
        values, vectors = kfac.eigh(matrices)
        assert values.dtype == vectors.dtype == torch.float32
        torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            vectors @ values.diag_embed() @ vectors.mT, matrices, rtol=1e-4, atol=1e-4
        )
