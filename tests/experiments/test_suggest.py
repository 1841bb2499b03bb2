"""``suggest``: what it writes, resumes, reads and refuses."""

import json

import numpy as np
import pytest

from laplace_invariance import Augmentation, marglik
from laplace_invariance.experiments import suggest as module
from laplace_invariance.experiments.suggest import SuggestConfig, suggest
from laplace_invariance.marglik.search.pilots import Pilots

SMALL = {
    "n_train": 100,
    "n_test": 50,
    "n_epochs": 2,
    "n_steps": 2,
    "n_repeats": 2,
    "n_samples": 2,
    "ranges": {"rotation": 1.5},
}
WORDS = "--train 100 --test 50 --epochs 2 --steps 2 --repeats 2 --samples 2"
FILES = {
    "report.html",
    "checkpoint.pt",
    "experiment.json",
    "history.jsonl",
    "network.pt",
    "suggest.png",
    "summary.json",
    "trials.json",
}


@pytest.fixture(scope="module")
def done(run_once):
    return run_once(suggest, SuggestConfig(**SMALL))


def test_directory_has_everything_and_is_not_overwritten(done):
    config, out, result = done
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(files) == FILES
    assert files["suggest.png"].startswith(b"\x89PNG")
    summary = json.loads(files["summary.json"])
    assert summary["suggestions"]["rows"][-1]["gain"] == result.suggestions.rows[-1].gain
    assert summary["suggestions"]["conclusion"] == result.suggestions.conclusion()
    with pytest.raises(FileExistsError, match="--resume"):
        suggest(config, out)
    assert suggest(config, out, resume=True) == result
    with pytest.raises(ValueError, match="it differs in ranges"):
        suggest(SuggestConfig(**SMALL | {"ranges": {"shear": 0.1}}), out, resume=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files


def test_interrupted_run_resumes(done, tmp_path, monkeypatch):
    config, _, whole = done
    evidence, seen = Pilots.evidence, []

    def interrupted(self, pilot):
        seen.append(pilot)
        if len(seen) == 5:  # two evidences each
            raise KeyboardInterrupt
        return evidence(self, pilot)

    with monkeypatch.context() as patch:
        patch.setattr(Pilots, "evidence", interrupted)
        with pytest.raises(KeyboardInterrupt):
            suggest(config, tmp_path)
    assert len(json.loads((tmp_path / "trials.json").read_text())["trials"]) == 2
    assert suggest(config, tmp_path, resume=True) == whole
    assert {path.name for path in tmp_path.iterdir()} == FILES


def test_weights_are_read_and_give_the_same(done, monkeypatch):
    _, out, whole = done
    monkeypatch.setattr(module, "marglik_training", lambda *_, **__: 1 / 0)
    result = suggest(SuggestConfig(**SMALL, weights=str(out / "network.pt")))
    assert result.suggestions == whole.suggestions
    assert result.accuracy == whole.accuracy
    assert "network.pt" in str(result)


def test_network_is_trained_without_augmentation_and_by_the_loss(monkeypatch):
    def spy(net, loader, **options):
        assert not any(isinstance(one, Augmentation) for one in net.modules())
        assert isinstance(options["objective"], marglik.MAP)
        assert options["n_epochs"] == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "marglik_training", spy)
    with pytest.raises(KeyboardInterrupt):
        suggest(SuggestConfig(**SMALL))


# The command line.


def test_suggest_prints_a_table(tmp_path, capfd, run_cli):
    run_cli(f"suggest {WORDS} --ranges shear=0.1 --out", tmp_path / "run")
    out, err = capfd.readouterr()
    for word in ("augmentation ", "shear factor 0.90 to 1.11", "nats per example", "suggest.png"):
        assert word in out
    assert "suggest: 100%" in err


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("--repeats 1", "n_repeats must be at least 2"),
        ("--steps 3", "n_steps must be even"),
        ("--samples 0", "n_samples must be positive"),
        ("--ranges rotation=4", "ranges: rotation must be at most pi"),
        ("--ranges twist=1", "there is no range 'twist' to search"),
        ("--weights nowhere.pt", "there is no file nowhere.pt"),
        ("--weights pyproject.toml", "does not have the weights of this network"),
    ],
)
def test_suggest_explains_bad_arguments_and_writes_nothing(tmp_path, run_cli, arguments, match):
    with pytest.raises(SystemExit, match=match):
        run_cli(f"suggest {arguments} --quiet --out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_of_another_network_are_refused(done, run_cli, tmp_path):
    _, out, _ = done
    with pytest.raises(SystemExit, match="choose another --net"):
        run_cli("suggest --net cnn --quiet --weights", out / "network.pt", "--out", tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_images_of_one_class_are_refused(tmp_path, run_cli):
    images, labels = np.random.default_rng(0).random((9, 8, 8)), np.zeros(9, int)
    path = tmp_path / "images.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)
    with pytest.raises(SystemExit, match=r"all targets are 0|class"):
        run_cli("suggest --quiet --data", path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
