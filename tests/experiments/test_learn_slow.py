"""What is learnt from digits that were transformed in a known way, or not at all."""

import math

import pytest
import torch

from laplace_invariance.experiments.learn import LearnConfig, learn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rotation"),
    [("fully_rotated", math.pi), ("partially_rotated", math.pi / 2), ("original", 0.0)],
)
def test_digits_teach_how_far_they_were_rotated(kind, rotation):
    torch.set_default_dtype(torch.float32)
    found = learn(LearnConfig(transform=kind)).magnitudes
    assert found.pop("rotation") == pytest.approx(rotation, rel=0.15, abs=0.15)
    assert max(found.values()) < 0.12


@pytest.mark.slow
def test_learnt_invariance_predicts_better_than_none():
    torch.set_default_dtype(torch.float32)
    learnt, none = (learn(LearnConfig(method=method)) for method in ("evidence", "none"))
    assert learnt.accuracy > none.accuracy + 0.05
    assert learnt.evidence > none.evidence + 0.1
