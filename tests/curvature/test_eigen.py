"""Decompositions that are made anew only where factors changed enough."""

import pytest
import torch

from laplace_invariance.curvature.eigen import Decompositions, decompose, eigh


def factors():
    roots = [torch.randn(7, 5), torch.randn(3, 7, 4), torch.randn(2, 3)]
    return [*(root.mT @ root for root in roots), torch.rand(6)]


def rebuilt(pair):
    values, vectors = pair
    if vectors is None:
        return values
    return (vectors * values.unsqueeze(-2)) @ vectors.mT


def test_multiples_are_not_decomposed_again():
    first = factors()
    known = Decompositions(0.1)
    known.decompose(first)
    for scale in (0.3, 2.0):
        found = known.decompose([scale * factor for factor in first])
        for pair, factor in zip(found, first, strict=True):
            torch.testing.assert_close(rebuilt(pair), scale * factor)
    assert (known.n_made, known.n_reused) == (4, 8)


def test_what_changed_enough_is_decomposed_and_the_rest_is_near():
    first = factors()
    known = Decompositions(0.1)
    known.decompose(first)
    changed = [factor.clone() for factor in first]
    changed[0] += torch.eye(5) * changed[0].norm()
    changed[1] += 0.01 * changed[1].norm() * torch.eye(4)
    found = known.decompose(changed)
    assert (known.n_made, known.n_reused) == (5, 3)
    torch.testing.assert_close(rebuilt(found[0]), changed[0])
    assert 0 < (rebuilt(found[1]) - changed[1]).norm() <= 0.1 * changed[1].norm()


def test_differences_do_not_add_up():
    """Small steps away from what was decomposed are noticed when they sum up."""
    factor, direction = torch.eye(5), torch.diag(torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0]))
    known = Decompositions(0.1)
    for step in range(10):
        (found,) = known.decompose([factor + 0.03 * step * direction])
        error = (rebuilt(found) - factor - 0.03 * step * direction).norm()
        assert error <= 0.11 * factor.norm()
    assert 1 < known.n_made < 5


def test_a_state_goes_on_as_it_would_have():
    first = factors()
    known, other = Decompositions(0.1), Decompositions(0.1)
    known.decompose(first)
    other.load_state_dict(known.state_dict())
    later = [1.7 * factor + 0.01 * torch.ones_like(factor) for factor in first]
    for ours, theirs in zip(known.decompose(later), other.decompose(later), strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert ours[1] is theirs[1] is None or torch.equal(ours[1], theirs[1])


def test_factors_that_are_not_finite_are_refused():
    known = Decompositions(0.1)
    known.decompose([torch.eye(3)])
    with pytest.raises(torch.linalg.LinAlgError, match="not finite"):
        known.decompose([torch.full((3, 3), torch.nan)])


def test_without_tolerance_everything_is_decomposed():
    first, second = factors(), factors()
    known = Decompositions(0.0)
    known.decompose(first)
    for ours, theirs in zip(known.decompose(second), decompose(second), strict=True):
        torch.testing.assert_close(ours[0], theirs[0])


# Matrices that LAPACK does not decompose.


def with_zero_rows(dtype, scale=1.0):
    """Return matrices of low rank with some rows and columns of zeros, as dead units have them."""
    root = torch.randn(3, 11, 4).relu()
    root[:, [0, 5, 7]] = 0
    return (scale * root @ root.mT).to(dtype)


def failing_unless(is_easy):
    """Return functions in place of LAPACK's that refuse whatever is not easy."""

    def patched(plain):
        def decomposition(matrices):
            if not is_easy(matrices):
                raise torch.linalg.LinAlgError("failed to converge")
            return plain(matrices)

        return decomposition

    return {name: patched(getattr(torch.linalg, name)) for name in ("eigh", "eigvalsh")}


def is_small(matrices):
    return matrices.abs().max() <= 1


def has_no_zero_rows(matrices):
    return matrices.any(-1).all()


def has_different_entries_on_the_diagonal(matrix):
    return len(set(matrix.diagonal().tolist())) == len(matrix)


@pytest.mark.parametrize("is_easy", [is_small, has_no_zero_rows], ids=["large", "zero rows"])
@pytest.mark.parametrize("vectors", [True, False], ids=["vectors", "values"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_matrices_that_lapack_refuses_are_made_easier(monkeypatch, is_easy, vectors, dtype):
    matrices = with_zero_rows(dtype, 1e30)
    expected = torch.linalg.eigvalsh(matrices.double() / 1e30)
    for name, function in failing_unless(is_easy).items():
        monkeypatch.setattr(torch.linalg, name, function)
    values, directions = eigh(matrices, vectors)
    tolerance = {"rtol": 0, "atol": 100 * torch.finfo(dtype).eps}
    torch.testing.assert_close(values.double() / 1e30, expected, **tolerance)
    assert (directions is not None) == vectors
    if directions is not None:
        directions = directions.double()
        whole = rebuilt((values.double() / 1e30, directions))
        torch.testing.assert_close(whole, matrices.double() / 1e30, **tolerance)
        identity = torch.eye(11).expand(3, -1, -1)
        torch.testing.assert_close(directions.mT @ directions, identity, **tolerance)


def test_jitter_is_the_last_resort(monkeypatch):
    matrix = torch.ones(5, 5)
    for name, function in failing_unless(has_different_entries_on_the_diagonal).items():
        monkeypatch.setattr(torch.linalg, name, function)
    torch.testing.assert_close(rebuilt(eigh(matrix)), matrix)
    for name, function in failing_unless(lambda matrices: False).items():
        monkeypatch.setattr(torch.linalg, name, function)
    with pytest.raises(torch.linalg.LinAlgError, match="of size 5 does not converge"):
        eigh(matrix)
    torch.testing.assert_close(eigh(torch.zeros(5, 5)), (torch.zeros(5), torch.eye(5)))


def test_low_rank_at_any_scale():
    """Of such matrices, LAPACK refuses some in single precision."""
    for scale in (1e-30, 1.0, 1e30):
        root = torch.randn(151, 3).relu() * (torch.rand(151, 1) > 0.7)
        matrix = (root @ root.T * scale).float()
        whole = rebuilt(eigh(matrix)).double() / scale
        torch.testing.assert_close(whole, matrix.double() / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("entry", [torch.nan, torch.inf], ids=str)
def test_what_is_not_finite_is_not_decomposed(entry):
    matrices = with_zero_rows(torch.float64)
    matrices[1, 2, 2] = entry
    with pytest.raises(torch.linalg.LinAlgError):
        eigh(matrices)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_eigenvalues_beyond_the_largest_number_are_refused(dtype):
    with pytest.raises(torch.linalg.LinAlgError, match="too large for torch"):
        eigh(torch.full((5, 5), 0.9 * torch.finfo(dtype).max, dtype=dtype))


def test_usual_matrices_are_decomposed_by_one_call(monkeypatch):
    calls, plain = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda x: (calls.append(x), plain(x))[1])
    root = torch.randn(3, 7, 5)
    eigh(root.mT @ root)
    assert len(calls) == 1
