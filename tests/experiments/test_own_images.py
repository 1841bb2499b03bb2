"""``learn`` on one's own images: what it says, what reaches training, and what it refuses."""

import math

import numpy as np
import pytest
from PIL import Image

from laplace_invariance.experiments import learn as module
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.learn import LearnConfig, learn

WORDS = "--epochs 2 --samples 2 --search off"


@pytest.fixture
def photos(tmp_path):
    """A folder of colour images of different sizes, in two classes."""
    source = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(8):
            image = source.integers(0, 256, (16 + i, 20, 3), dtype=np.uint8)
            Image.fromarray(image).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"


def test_a_folder_without_test_images_is_learnt_from(photos, tmp_path, capfd, run_cli):
    run_cli(f"learn {WORDS} --size 16 --quiet --data", photos, "--out", tmp_path / "run")
    out = capfd.readouterr().out
    assert f"data            {photos}, images as they are, seed 0" in out
    assert "images          16 to train on, 16 x 16 pixels, colour, 2 classes" in out
    assert "network         cnn" in out
    for line in ("x translation   ±", "rotation        ±", "y scale         factor", "shear  "):
        assert line in out
    assert " pixels" in out
    assert f"load_run('{tmp_path / 'run'}')" in out
    for word in ("accuracy", "true"):
        assert word not in out


def test_a_share_of_a_folder_is_tested_on(photos):
    options = {"n_epochs": 1, "n_samples": 2, "search": "off", "size": 16}
    result = learn(LearnConfig(data=str(photos), test_share=0.25, **options))
    assert (result.data["n_train"], result.data["n_test"]) == (12, 4)
    assert result.data["classes"] == ["cats", "dogs"]
    assert 0 <= result.accuracy <= 1
    assert result.truth == {}


def test_only_what_was_transformed_here_is_true():
    small = {"n_train": 60, "n_test": 20, "n_epochs": 1, "n_samples": 2, "method": "fixed"}
    result = learn(LearnConfig(transform="translated", fixed={"x_translation": 0.5}, **small))
    assert set(result.truth) == {"x_translation", "y_translation"}
    assert "x translation   ±1.8 pixels, true ±2.3 pixels" in str(result)
    assert "rotation " not in str(result)  # neither learnt nor open


@pytest.fixture
def asked(monkeypatch, run_cli, tmp_path):
    """Return a function that returns model and options that a command asks training for."""
    seen = {}

    def spy(model, loader, **options):
        seen.update(options, model=model)
        raise KeyboardInterrupt

    def ask(words):
        monkeypatch.setattr(module, "marglik_training", spy)
        with pytest.raises(SystemExit, match="interrupted"):
            run_cli(f"learn --train 60 --quiet {words} --out", tmp_path / "run")
        return seen

    return ask


def test_options_reach_training(asked):
    found = asked(
        "--init rotation=90deg shear=0.2 --learn rotation --draws independent --lr-aug 0.05 "
        "--curvature ef --structure diag --prior diag --device cpu"
    )
    augmentation = found["model"].augmentation
    magnitudes = augmentation.magnitudes()
    assert magnitudes["rotation"] == pytest.approx(math.pi / 2)
    assert magnitudes["shear"] == pytest.approx(0.2)
    assert list(augmentation.widths()) == ["rotation"]
    assert augmentation.draws == "independent"
    assert (found["lr_aug"], found["search"], found["backend"]) == (0.05, False, "ef")
    assert (found["hessian_structure"], found["prior_structure"]) == ("diag", "diag")
    assert found["backend_kwargs"] == {}


def test_without_options_training_searches(asked):
    found = asked("")
    assert found["search"] is True
    assert found["lr_aug"] is None
    assert len(found["model"].augmentation.widths()) == 6


def one_class(folder):
    for path in (folder / "dogs").iterdir():
        path.unlink()
    (folder / "dogs").rmdir()


def empty(folder):
    one_class(folder)
    for path in (folder / "cats").iterdir():
        path.unlink()
    (folder / "cats").rmdir()


def broken(folder):
    path = folder / "dogs" / "3.png"
    path.write_bytes(path.read_bytes()[:100])


def mixed(folder):
    Image.new("L", (20, 20)).save(folder / "dogs" / "grey.png")


BAD = {
    "empty": (empty, "--size 16", "photos is empty; it should have one subfolder"),
    "one class": (one_class, "--size 16", "photos has one class, 'cats'"),
    "broken": (broken, "--size 16", r"dogs/3\.png is not an image that can be read"),
    "mixed": (mixed, "--size 16", r"0\.png is in colour; convert all|grey\.png is grey and"),
    "sizes": (None, "", "8 different sizes: .* --size 16"),
    "rotation": (None, "--size 16 --init rotation=90", "rotation=90deg"),
    "device": (None, "--size 16 --device quantum", "device 'quantum' cannot be used here"),
    "share": (None, "--size 16 --test-share 2", "test_share must be between 0 and 1"),
    "test images": (None, "--size 16 --test 5", "has no test images of which to take 5"),
    "full": (None, "--size 16 --net mlp --structure full", "a full curvature of 231[0-9]+ weights"),
    "grid": (None, "--size 16 --draws grid", "covers one or two generators"),
}


@pytest.mark.parametrize("verb", ["learn", "compare"])
@pytest.mark.parametrize(("spoil", "words", "match"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_in_one_line_and_leaves_nothing(
    photos, tmp_path, capsys, run_cli, verb, spoil, words, match
):
    if spoil is not None:
        spoil(photos)
    out = tmp_path / "new" / "run"
    with pytest.raises(SystemExit, match=match) as error:
        run_cli(f"{verb} --quiet {words} --data", photos, "--out", out)
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("laplace-invariance: ")
    assert not (tmp_path / "new").exists()


def test_labels_that_start_at_one_are_refused(tmp_path, run_cli):
    images = np.zeros((6, 8, 8), np.uint8)
    np.savez(tmp_path / "mine.npz", x_train=images, y_train=np.array([1, 2, 4] * 2))
    with pytest.raises(SystemExit, match=r"the labels 1, 2, 4, .*searchsorted") as error:
        run_cli("learn --data", tmp_path / "mine.npz", "--out", tmp_path / "run")
    assert error.value.code == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_process_is_told_that_the_directory_is_in_use(tmp_path, resume):
    config = LearnConfig(n_train=60)
    with RunDirectory(tmp_path, config) as first:
        first.begin()
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(BlockingIOError, match="is in use by another run"):
            learn(config, tmp_path, resume=resume)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_measuring_needs_test_images(photos, tmp_path, run_cli):
    words = "measure --method plain --size 16 --quiet --data"
    with pytest.raises(SystemExit, match=r"no test images, which are needed here; .*test-share"):
        run_cli(words, photos, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()
