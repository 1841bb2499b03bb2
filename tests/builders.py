"""Small models and data that many tests share."""

import torch
from torch import nn


class Gain(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(n) + 0.5)

    def forward(self, x):
        return self.gain * x


def assert_drawn(path):
    """Raise unless a figure is an image with many colours that is not mostly blank."""
    import numpy as np
    from matplotlib.image import imread

    pixels = imread(path)[::3, ::3, :3]
    assert min(pixels.shape[:2]) > 100
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 30
    assert (pixels < 0.9).any(-1).mean() > 0.01


def write_images(path, size, seed=0):
    """Write random images in three classes, 50 to train on and 20 to test on; return the path."""
    import numpy as np

    source = np.random.default_rng(seed)
    arrays = {}
    for part, n in (("train", 50), ("test", 20)):
        arrays[f"x_{part}"] = source.integers(0, 256, (n, size, size), dtype=np.uint8)
        arrays[f"y_{part}"] = source.integers(0, 3, n)
    np.savez(path, **arrays)
    return str(path)
