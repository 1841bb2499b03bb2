"""Finished runs, back in Python: they predict, export and train on, without their data."""

import json

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.experiments.compare import CompareConfig, compare
from laplace_invariance.experiments.learn import LearnConfig, learn

SMALL = {"n_epochs": 3, "n_samples": 2, "search": "off", "estimator": "refit"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Directory and result of a run on images that are no more."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    place = tmp_path_factory.mktemp("finished")
    source = np.random.default_rng(0)
    images = source.integers(0, 256, (30, 8, 9), dtype=np.uint8)
    np.savez(place / "mine.npz", x_train=images, y_train=np.arange(30) % 3)
    config = LearnConfig(data=str(place / "mine.npz"), init={"rotation": 0.5}, **SMALL)
    result = learn(config, place / "run")
    (place / "mine.npz").unlink()
    torch.set_default_dtype(before)
    return place / "run", result


def test_model_augmentation_and_history_are_those_of_the_run(finished):
    out, result = finished
    state = torch.get_rng_state()
    run = li.load_run(out)
    assert torch.equal(torch.get_rng_state(), state)
    assert (run.config, run.result) == (result.config, result)
    assert run.augmentation is run.model.augmentation
    assert run.augmentation.magnitudes() == result.magnitudes
    assert run.augmentation.magnitudes()["rotation"] > 0
    x = torch.rand(4, 1, 8, 9, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(run.model(x), result.training.model.eval()(x), rtol=0, atol=0)
    assert [record["epoch"] for record in run.history] == [1, 2, 3]
    assert run.classes == ["0", "1", "2"]
    assert str(run) == str(result)


def test_a_run_is_exported_and_trained_on(finished):
    out, _ = finished
    run = li.load_run(str(out))
    image = torch.rand(1, 8, 9)
    assert run.augmentation.to_transform()(image).shape == image.shape
    before = [weight.detach().clone() for weight in run.model.parameters()]
    x = torch.rand(12, 1, 8, 9, dtype=torch.float32)
    loader = DataLoader(TensorDataset(x, torch.arange(12) % 3), 6)
    li.marglik_training(run.model, loader, n_epochs=1, estimator="refit")
    assert not all(map(torch.equal, run.model.parameters(), before))


def test_what_is_no_finished_run_is_explained(finished, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no run in .*absent, which has no"):
        li.load_run(tmp_path / "absent")
    out, _ = finished
    saved = (out / "experiment.json").read_text()
    (tmp_path / "experiment.json").write_text(saved)
    with pytest.raises(ValueError, match=r"not finished: there is no summary\.json; .*--resume"):
        li.load_run(tmp_path)
    (tmp_path / "experiment.json").write_text(json.dumps(json.loads(saved) | {"format": 3}))
    with pytest.raises(ValueError, match="has format 3, and this version reads format 5"):
        li.load_run(tmp_path)


def test_runs_of_a_comparison_are_found(tmp_path):
    torch.set_default_dtype(torch.float32)
    config = CompareConfig(methods=("none",), n_train=60, n_test=20, **SMALL)
    compare(config, tmp_path)
    with pytest.raises(ValueError, match=r"of CompareConfig; its runs of learn are in .*none-0"):
        li.load_run(tmp_path)
    assert li.load_run(tmp_path / "digits-original-none-0").augmentation is None
