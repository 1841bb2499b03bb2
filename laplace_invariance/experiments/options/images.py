"""The images that experiments use."""

from __future__ import annotations

from dataclasses import dataclass, field

from laplace_invariance.experiments.checks import Config, check_positive

__all__ = ["ImagesConfig"]

LARGEST_SIZE = 10_000  # pixels along a side


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(Config):
    """The images that an experiment uses.

    Attributes:
        data: Source of the images: digits, mnist, fashion-mnist, cifar10; a FILE.npz with x_train,
            y_train and, to test on, x_test, y_test; or a FOLDER with one subfolder of images per
            class, or with two such folders, train and test.
        size: Height and width of all images, to which the middle of each is resized; by default
            images stay as they are.
        test_share: Share of the images that is set aside to test on, if the data have no test set;
            by default none.
        n_train: Number of training images, by default all.
        n_test: Number of test images, by default all.
        root: Directory of torchvision's data sets, or of mnist.npz, fashion_mnist.npz, cifar10.npz.
        download: Download a data set of torchvision that is not in the directory.
    """

    data: str = "digits"
    size: int | None = None
    test_share: float | None = None
    n_train: int | None = None
    n_test: int | None = None
    root: str = field(default="data", metadata={"identity": False})
    download: bool = field(default=False, metadata={"identity": False})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "size")
        if self.size is not None and self.size > LARGEST_SIZE:
            raise ValueError(f"size must be at most {LARGEST_SIZE}, got {self.size}")
        if self.test_share is not None and not 0 < self.test_share < 1:
            raise ValueError(f"test_share must be between 0 and 1, got {self.test_share}")
