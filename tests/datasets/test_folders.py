"""Folders of images are read as they are, and bad ones are explained."""

import numpy as np
import pytest
import torch
from PIL import Image

from laplace_invariance.datasets import load


def save(path, level, size=(7, 5), mode="L"):
    """Write an image of one level."""
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    array = np.full((size[1], size[0], *channels), level, np.uint8)
    Image.fromarray(array, mode).save(path)


@pytest.fixture
def folder(tmp_path):
    """Two classes with three and two grey images, and files that are none."""
    for i in range(3):
        save(tmp_path / "cats" / f"{i}.png", 10 * i)
    save(tmp_path / "dogs" / "a.jpg", 100)
    save(tmp_path / "dogs" / "more" / "b.png", 51)
    (tmp_path / "dogs" / "notes.txt").write_text("no image")
    (tmp_path / ".cache").mkdir()
    return tmp_path


def test_subfolders_are_classes(folder):
    split = load(folder)
    assert split.in_shape == (1, 5, 7)
    assert (split.n_classes, split.classes) == (2, ("cats", "dogs"))
    assert split.name == folder.name
    assert split.y_train.tolist() == [0, 0, 0, 1, 1]
    torch.testing.assert_close(
        split.x_train[:, 0, 2, 3] * 255, torch.tensor([0, 10, 20, 100, 51.0])
    )
    assert not split.has_test
    assert split.x_test.shape == (0, 1, 5, 7)


def test_train_and_test_folders(folder, tmp_path):
    whole = tmp_path / "whole"
    for part in ("train", "test"):
        save(whole / part / "a" / "0.png", 0, mode="RGB")
    save(whole / "train" / "b" / "0.png", 51, mode="RGB")
    split = load(whole)
    assert (split.x_train.shape, split.x_test.shape) == ((2, 3, 5, 7), (1, 3, 5, 7))
    assert (split.y_test.tolist(), split.classes) == ([0], ("a", "b"))
    with pytest.raises(ValueError, match="has a test set of its own, of 1 images; leave out"):
        load(whole, test_share=0.5)
    save(whole / "test" / "c" / "0.png", 0, mode="RGB")
    with pytest.raises(ValueError, match=r"test has classes that .*train has not: c"):
        load(whole)


def test_a_share_is_set_aside_once_and_for_all(folder):
    first, other = load(folder, test_share=0.4), load(folder, test_share=0.4, seed=3)
    assert (len(first.x_train), len(first.x_test)) == (3, 2)
    assert torch.equal(first.x_test, other.x_test)
    together = torch.cat([first.x_train, first.x_test])[:, 0, 0, 0]
    assert len(set(together.tolist())) == 5
    with pytest.raises(ValueError, match=r"leave images to train and to test on, got 0\.01 of 5"):
        load(folder, test_share=0.01)
    with pytest.raises(ValueError, match=r"no test images of which to take 3; .*--test-share"):
        load(folder, n_test=3)


def test_sizes_are_brought_together_by_the_middle(tmp_path):
    wide = np.zeros((6, 12), np.uint8)
    wide[:, 3:9] = 255  # the middle square
    (tmp_path / "a").mkdir()
    Image.fromarray(wide).save(tmp_path / "a" / "wide.png")
    save(tmp_path / "b" / "tall.png", 51, size=(5, 9))
    split = load(tmp_path, size=4)
    assert split.in_shape == (1, 4, 4)
    torch.testing.assert_close(split.x_train[0], torch.ones(1, 4, 4))
    torch.testing.assert_close(split.x_train[1], torch.full((1, 4, 4), 0.2))


def test_arrays_are_resized_like_files(tmp_path):
    wide = np.zeros((2, 6, 12), np.uint8)
    wide[:, :, 3:9] = 255
    np.savez(tmp_path / "mine.npz", x_train=wide, y_train=np.arange(2))
    split = load(tmp_path / "mine.npz", size=4)
    torch.testing.assert_close(split.x_train, torch.ones(2, 1, 4, 4))
    assert not split.has_test


def test_what_is_transparent_is_black(tmp_path):
    save(tmp_path / "a" / "0.png", 0, mode="RGB")
    (tmp_path / "b").mkdir()
    Image.new("RGBA", (7, 5), (255, 255, 255, 0)).save(tmp_path / "b" / "0.png")
    assert load(tmp_path).x_train.max() == 0


def test_bad_folders_are_explained(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty is empty; it should have one subfolder"):
        load(tmp_path / "empty")
    with pytest.raises(ValueError, match="cats has no subfolders; it should have one subfolder"):
        load(folder / "cats")
    with pytest.raises(ValueError, match=r"no images in empty; images end in \.png, \.jpg"):
        load(folder)
    (tmp_path / "one" / "cats").mkdir(parents=True)
    with pytest.raises(ValueError, match="one has one class, 'cats', so that there is nothing"):
        load(tmp_path / "one")
    (tmp_path / "two" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"a subfolder train, but no .* test; give .*two/train"):
        load(tmp_path / "two")


def test_bad_images_are_named(folder):
    save(folder / "dogs" / "large.png", 0, size=(9, 9))
    message = r"2 different sizes: .*cats/0.png is 7 x 5, .*large.png is 9 x 9; .*--size 5 "
    with pytest.raises(ValueError, match=message):
        load(folder)
    save(folder / "dogs" / "large.png", 0, mode="RGB")
    with pytest.raises(ValueError, match=r"cats/0.png is grey and .*large.png is in colour; con"):
        load(folder, size=4)
    whole = (folder / "cats" / "2.png").read_bytes()
    for broken in (whole[: len(whole) // 2], b"no image", b""):
        (folder / "dogs" / "large.png").write_bytes(broken)
        with pytest.raises(ValueError, match=r"dogs/large.png is not an image that can be read"):
            load(folder)
    Image.fromarray(np.zeros((5, 7), np.uint16)).save(folder / "dogs" / "large.png")
    with pytest.raises(ValueError, match=r"large.png is of mode I.*, which is neither grey nor"):
        load(folder)
