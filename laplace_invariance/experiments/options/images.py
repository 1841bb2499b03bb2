"""The images that experiments use."""

from __future__ import annotations

from dataclasses import dataclass, field

from laplace_invariance.experiments.checks import Config

__all__ = ["ImagesConfig"]


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(Config):
    """The images that an experiment uses.

    Attributes:
        data: Source of the images: digits, mnist, fashion-mnist, cifar10, or a FILE.npz with
            x_train, y_train, x_test and y_test.
        n_train: Number of training images, by default all.
        n_test: Number of test images, by default all.
        root: Directory of torchvision's data sets.
        download: Download a data set of torchvision that is not in the directory.
    """

    data: str = "digits"
    n_train: int | None = None
    n_test: int | None = None
    root: str = field(default="data", metadata={"identity": False})
    download: bool = field(default=False, metadata={"identity": False})
