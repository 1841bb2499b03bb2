"""``suggest``: pilots that diverge, and that every one starts from the same state."""

import json
import math
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import laplace_invariance as li
from laplace_invariance.augmentations import BoxAugmentation
from laplace_invariance.marglik.search.pilots import Pilots

QUICK = {"n_samples": 4, "n_steps": 4, "n_repeats": 2}
ROTATION = li.AffinePoints(learn="rotation")


def points():
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.norm(dim=1) > 1.1).long())


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 2))


# Those that diverge.


class Fragile(BoxAugmentation):
    """Moves points, and so far beyond one that the squares in curvature are infinite."""

    def __init__(self):
        super().__init__(["shift"], [math.inf])

    def transform_by(self, x, coefficients):
        moved = x.unsqueeze(1) + coefficients
        return moved.where(coefficients.abs() < 1, 1e300)


def failing(error):
    """Return a method of pilots that fails by an error, but for the network alone."""
    evidence = Pilots.evidence

    def fails(self, pilot):
        if len(pilot) > 1 and pilot[-1].as_dict().get("rotation", 0) > 1:
            raise error
        return evidence(self, pilot)

    return fails


def test_a_candidate_that_diverges_lowers_the_evidence_and_is_named(net, tmp_path):
    loader = DataLoader(points(), 20)
    asked = {"ranges": {"shift": (2.0, 0.1)}, "margin": 9.0, **QUICK}
    path = tmp_path / "trials.json"
    with pytest.warns(
        UserWarning, match=r"training with shift 2\.00 diverged, so that its evid"
    ) as warned:
        found = li.suggest(net, loader, Fragile(), checkpoint=path, **asked)
    assert {warning.filename for warning in warned} == {__file__}
    good, bad = found.rows
    assert math.isfinite(good.gain)
    assert bad.ranges == {"shift": 2.0}
    assert bad.gains == [-math.inf, -math.inf]
    assert bad.verdict == "lowers it"
    assert li.suggest(net, loader, Fragile(), checkpoint=path, resume=True, **asked) == found


@pytest.mark.parametrize(
    "error", [FloatingPointError("10 steps in a row"), torch.linalg.LinAlgError("no convergence")]
)
def test_errors_of_numbers_are_those_of_their_candidate(net, tmp_path, monkeypatch, error):
    loader, path = DataLoader(points(), 20), tmp_path / "trials.json"
    asked = {"ranges": {"rotation": (2.0, 0.5)}, "margin": 9.0, **QUICK}
    whole = li.suggest(net, loader, ROTATION, **asked)
    monkeypatch.setattr(Pilots, "evidence", failing(error))
    with pytest.warns(UserWarning, match=rf"rotation 2\.00 diverged \({error}\)"):
        found = li.suggest(net, loader, ROTATION, checkpoint=path, **asked)
    assert found.rows[1].gain == -math.inf
    (same,) = [row for row in whole.rows if row.ranges == {"rotation": 0.5}]
    assert found.rows[0] == same  # nothing is left of the other
    trials = json.loads(path.read_text())["trials"]
    assert [trial["evidence"] is None for trial in trials] == [False, True, False] * 2
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert li.suggest(net, loader, ROTATION, checkpoint=path, resume=True, **asked) == found


@pytest.mark.parametrize(
    "error", [FloatingPointError("10 steps in a row"), torch.linalg.LinAlgError("no convergence")]
)
def test_the_network_alone_must_not_diverge(net, monkeypatch, error):
    def fails(self, pilot):
        raise error

    monkeypatch.setattr(Pilots, "evidence", fails)
    with pytest.raises(FloatingPointError, match=rf"not finite .* \({error}\); choose a smaller"):
        li.suggest(net, DataLoader(points(), 20), ROTATION, **QUICK)


def test_a_network_alone_that_is_only_finite_in_the_end_is_refused(net, monkeypatch):
    evidence = Pilots.evidence

    def half(self, pilot):
        return -math.inf if len(pilot) == 1 else evidence(self, pilot)

    monkeypatch.setattr(Pilots, "evidence", half)
    with pytest.raises(FloatingPointError, match="the network alone"):
        li.suggest(net, DataLoader(points(), 20), ROTATION, **QUICK)


# Where they start.


class Noisy(Dataset):
    """Points with noise of all kinds, some by a generator of the data set's own."""

    def __init__(self):
        self.points = points()
        self.rng = np.random.default_rng(3)
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        x, y = self.points[index]
        noise = torch.tensor([np.random.randn(), random.gauss(0, 1)])  # noqa: NPY002
        own = torch.tensor(self.rng.standard_normal(2)) + torch.randn(2, generator=self.generator)
        return x + 0.1 * (noise + own + torch.randn(2)), y


class Counting(nn.Module):
    """Scales by a number of forward passes in training, which is in no ``state_dict``."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n_seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.n_seen += 1
        return x * (1 + 0.1 * self.n_seen)


@pytest.fixture
def restless():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 10), nn.BatchNorm1d(10), Counting(), nn.Dropout(0.3), nn.Linear(10, 2)
    )


def test_the_order_of_candidates_does_not_matter(restless):
    data = Noisy()
    asked = {"margin": 9.0, **QUICK}
    one, other = (
        li.suggest(restless, DataLoader(data, 20), ROTATION, ranges={"rotation": widths}, **asked)
        for widths in ((0.5, 1.0, 2.0), (2.0, 0.5, 1.0))
    )
    assert one == other
    assert len({*one.rows[0].gains}) == 2


def test_interrupted_calls_on_data_that_are_random_resume_bit_for_bit(
    restless, tmp_path, monkeypatch
):
    asked = {"ranges": {"rotation": (0.5, 2.0)}, "margin": 9.0, **QUICK}
    whole = li.suggest(restless, DataLoader(Noisy(), 20), ROTATION, **asked)
    path, evidence, n_pilots = tmp_path / "trials.json", Pilots.evidence, []

    def counted(self, pilot):
        n_pilots.append(pilot)
        if len(n_pilots) % 4 == 0:
            raise KeyboardInterrupt
        return evidence(self, pilot)

    monkeypatch.setattr(Pilots, "evidence", counted)
    for start in range(9):
        data = Noisy()
        data.rng.random(start)  # as another process might have done
        torch.rand(start, generator=data.generator)
        asked |= {"checkpoint": path, "resume": True}
        try:
            found = li.suggest(restless, DataLoader(data, 20), ROTATION, **asked)
        except KeyboardInterrupt:
            continue
        break
    assert start > 2
    assert found == whole


def test_repeats_differ_in_the_noise_of_the_data(net):
    """The batches of one epoch are all data, and the draws of a closed range change nothing."""
    seen = []

    class Spied(Noisy):
        def __getitem__(self, index):
            found = self.rng.standard_normal(), torch.rand((), generator=self.generator).item()
            seen.append(found)
            return self.points[index]

    li.suggest(net, DataLoader(Spied(), 60), ROTATION, ranges={"rotation": 1.0}, **QUICK)
    assert len({noise for noise, _ in seen}) > 2 * 60
    assert len({noise for _, noise in seen}) > 2 * 60
