"""Draws from the cube: uniform, one in each part of every axis, even in two dimensions."""

import pytest
import torch
from torch import nn

import laplace_invariance as li
from laplace_invariance import draws as draws_module
from laplace_invariance.draws import (
    Tape,
    are_fixed,
    common_draws,
    fixed_cube,
    fixed_draws,
    grid_cube,
    recording,
    replaying,
    sample_cube,
    taped,
)

LIKE = torch.zeros((), dtype=torch.float64)


def sample(kind, n, n_samples, dimensions=6):
    return sample_cube(kind, n, n_samples, dimensions, LIKE)


@pytest.mark.parametrize("kind", ["independent", "sobol"])
def test_draws_are_uniform(kind):
    draws = sample(kind, 4000, 4)
    assert draws.abs().max() <= 1
    torch.testing.assert_close(draws.mean((0, 1)), torch.zeros(6), atol=0.02, rtol=0)
    torch.testing.assert_close(
        draws.square().mean((0, 1)), torch.full((6,), 1 / 3), atol=0.02, rtol=0
    )


@pytest.mark.parametrize("n_samples", [1, 5, 8])
def test_sobol_has_one_draw_in_each_part_of_every_axis(n_samples):
    """A Latin hypercube, for numbers other than powers of two as well."""
    draws = torch.cat([sample("sobol", 50, n_samples), fixed_cube(n_samples, 6, LIKE)])
    parts = ((draws + 1) / 2 * n_samples).floor().long()
    expected = torch.arange(n_samples).view(1, -1, 1).expand_as(parts)
    assert torch.equal(parts.sort(1).values, expected)


@pytest.mark.parametrize("n_samples", [5, 8])
def test_sobol_parts_of_two_axes_meet_equally_often(n_samples):
    """Every input has another set, so that draws are uniform on the cube, not on its axes only."""
    draws = sample("sobol", 2000, n_samples, dimensions=2)
    first, second = ((draws + 1) / 2 * n_samples).floor().long().unbind(-1)
    shares = (first * n_samples + second).flatten().bincount(minlength=n_samples**2)
    expected = torch.full((n_samples**2,), 2000 / n_samples)
    torch.testing.assert_close(shares.double(), expected, rtol=0.3, atol=0)


def test_sobol_is_even_in_two_dimensions():
    """Eight draws in the first two axes: one in each cell of 2 x 4 and of 4 x 2."""
    draws = (sample("sobol", 50, 8)[..., :2] + 1) / 2
    for cells in ((2, 4), (4, 2)):
        index = (draws * torch.tensor(cells)).floor().long()
        cell = index[..., 0] * cells[1] + index[..., 1]
        assert torch.equal(cell.sort(1).values, torch.arange(8).expand(50, 8))


@pytest.mark.parametrize("n_samples", [5, 8])
def test_sobol_mean_has_the_variance_of_stratified_draws(n_samples):
    """The variance of one draw is 1/3; that of the mean of one in each of n parts 1 / (3 n^3)."""
    means = sample("sobol", 20000, n_samples).mean(1)
    expected = torch.full((6,), 1 / 3 / n_samples**3)
    torch.testing.assert_close(means.var(0), expected, rtol=0.05, atol=0)


def test_sobol_covers_more_evenly():
    def discrepancy(kind):
        return sample(kind, 200, 16).mean(1).square().mean()

    assert discrepancy("sobol") < discrepancy("independent") / 5


def test_a_grid_has_the_midpoints_of_equal_cells():
    (line,) = grid_cube(3, 4, [2], LIKE)
    expected = torch.zeros(3, 4, dtype=torch.float64)
    expected[:, 2] = torch.tensor([-2 / 3, 0, 2 / 3])
    torch.testing.assert_close(line, expected)
    (square,) = grid_cube(4, 3, [0, 2], LIKE)
    cells = [[-0.5, 0, -0.5], [-0.5, 0, 0.5], [0.5, 0, -0.5], [0.5, 0, 0.5]]
    torch.testing.assert_close(square, torch.tensor(cells, dtype=torch.float64))
    assert not grid_cube(5, 3, [], LIKE).any()
    with pytest.raises(ValueError, match="square number of samples"):
        grid_cube(5, 3, [0, 1], LIKE)


@pytest.mark.parametrize("n_samples", [4, 5])
def test_sobol_draws_stay_inside_where_uniform_numbers_reach_one(n_samples, monkeypatch):
    monkeypatch.setattr(draws_module, "uniform", lambda shape, *_, **__: torch.ones(shape))
    assert sample_cube("sobol", 2, n_samples, 3, torch.zeros(())).abs().max() <= 1


def test_one_fixed_draw_is_the_centre():
    assert fixed_cube(1, 6, LIKE).eq(0).all()


def test_a_generator_decides_the_draws():
    state = torch.get_rng_state()
    for kind in ("independent", "sobol"):
        first, second = (
            sample_cube(kind, 3, 5, 2, LIKE, torch.Generator().manual_seed(1)) for _ in range(2)
        )
        assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_are_fixed_without_gradients_unless_taped():
    assert not are_fixed()
    with fixed_draws():
        assert are_fixed()
    with torch.no_grad():
        assert are_fixed()
        for context in (recording([]), replaying([])):
            with context:
                assert not are_fixed()


def test_a_tape_is_replayed_in_order_and_has_an_end():
    tape = []
    with recording(tape):
        first, second = taped(torch.rand, 3), taped(torch.rand, 2)
    assert tape == [first, second]
    with replaying(tape):
        assert taped(torch.rand, 3) is first
        assert taped(torch.rand, 2) is second
        with pytest.raises(
            RuntimeError, match="draws more often than in the pass that was recorded"
        ):
            taped(torch.rand, 1)
    assert len(tape) == 2


# Draws belong to inputs: neither chunks nor batches decide them.


@pytest.mark.parametrize("kind", ["independent", "sobol"])
@pytest.mark.parametrize("n_samples", [5, 8])
def test_draws_do_not_depend_on_batches(kind, n_samples):
    def drawn(size):
        generator = torch.Generator().manual_seed(3)
        sizes = [len(part) for part in torch.zeros(20).split(size)]
        parts = [sample_cube(kind, n, n_samples, 3, LIKE, generator) for n in sizes]
        return torch.cat(parts)

    for size in (1, 3, 7):
        assert torch.equal(drawn(size), drawn(20))


def parts_of(n, size):
    return [slice(start, start + size) for start in range(0, n, size)]


@pytest.mark.parametrize("inner", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_parts_of_a_batch_get_the_rows_of_its_draws(size, inner):
    tape, found = Tape(7), []
    torch.manual_seed(1)
    for rows in parts_of(7, size):
        n = len(range(7)[rows])
        with tape.playing(rows):
            found.append((taped(torch.rand, n, 2), taped(torch.rand, inner * n, 3)))
            assert torch.equal(taped(lambda n: torch.arange(4).view(1, 4), n)[0], torch.arange(4))
    torch.manual_seed(1)
    expected = torch.rand(7, 2), torch.rand(7 * inner, 3)
    for actual, whole in zip(zip(*found, strict=True), expected, strict=True):
        assert torch.equal(torch.cat(actual), whole)


def test_a_closed_tape_only_replays():
    tape = Tape(4)
    with tape.playing(slice(2, 4)):
        last = taped(torch.rand, 2)
    tape.closed = True
    with tape.playing(slice(2, 4)):
        assert torch.equal(taped(torch.rand, 2), last)
        with pytest.raises(RuntimeError, match="draws more often"):
            taped(torch.rand, 2)


def test_draws_that_belong_to_no_input_are_refused():
    with Tape(6).playing(slice(0, 2)):
        with pytest.raises(ValueError, match="3 rows were asked for in a chunk of 2"):
            taped(torch.rand, 3)
        with pytest.raises(ValueError, match="draws for 6 rows must have as many or one, got 5"):
            taped(lambda n: torch.rand(5), 2)


@pytest.mark.parametrize("kind", ["independent", "sobol"])
def test_common_draws_depend_on_their_seed_only(kind):
    augmentation = li.AffinePoints(init=0.3, draws=kind)

    def drawn(seed, own=None):
        model = li.InvariantModel(nn.Identity(), augmentation, 4, generator=own)
        with common_draws(seed):
            draws = model.draw(3), augmentation(torch.ones(5, 2))
        return torch.cat([tensor.detach().flatten() for tensor in draws])

    first = drawn(1)
    state, own = torch.get_rng_state(), torch.Generator().manual_seed(2)
    before = own.get_state()
    assert torch.equal(drawn(1, own), first)
    assert not torch.equal(drawn(2), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(own.get_state(), before)
    with common_draws(1):
        assert torch.equal(augmentation.sample(3, 4).flatten(), first[: 3 * 4 * 6])
    assert not torch.equal(augmentation.sample(3, 4).flatten(), first[: 3 * 4 * 6])


def test_common_draws_choose_elements_of_a_group():
    group, own = li.FiniteGroup("all", init=1.0), torch.Generator()
    with common_draws(1):
        first = group.draw_one(50)
    with common_draws(1):
        assert torch.equal(group.draw_one(50, own), first)
