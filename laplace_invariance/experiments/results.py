"""What one run of ``learn`` found, and how it is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from laplace_invariance import datasets
from laplace_invariance.augmentations import AffineImage
from laplace_invariance.experiments.base import with_error
from laplace_invariance.experiments.choices import LEARN_METHODS
from laplace_invariance.experiments.options import LearnConfig
from laplace_invariance.marglik import Result, SearchResult
from laplace_invariance.tables import labelled

__all__ = [
    "N_COMPARED",
    "LearnResult",
    "data_of",
    "images_words",
    "range_words",
    "spaced",
    "transform_words",
]

N_COMPARED = 32  # samples at which evidences of runs are compared
LEAST_SHOWN = 5e-4  # width of a range that counts as open if it is not learnt


@dataclass(frozen=True)
class LearnResult:
    """Ranges, accuracy and evidence of one run; prints as a summary.

    Attributes:
        config: Configuration of the run.
        data: What the images are: ``name``, ``n_train``, ``n_test``, ``in_shape`` (channels, height
            and width), ``n_classes``, and ``classes``, their names if they have any.
        net: Network.
        accuracy: Accuracy on the test images; None if there are none.
        evidence: Log evidence per training image, of all directions of the loss Hessian.
        evidence_error: Standard error of the evidence; 0 if it is exact, as up to 33 classes.
        newton_decrement: By how much a Newton step on the weights would raise their log posterior,
            per training image; far from zero the evidence is not to be trusted.
        n_samples: Number of samples that outputs are averaged over; with more of them the evidence
            is higher.
        ranges: Learnt ranges in words, by name; empty without an augmentation.
        magnitudes: Learnt ranges as numbers, by name.
        truth: How far the experiment transformed the images, by name; empty if it left them as
            they are, since then no truth is known.
        scale_correlation: Correlation of the two axes' scalings, if correlations were learnt.
        seconds: Duration of search and training, validation included.
        evidence_compared: Log evidence per training image with 32 samples, whatever the run has,
            and priors at their optimum, so that runs can be compared: the noise of few samples
            counts as complexity. Without samples it is ``evidence``; None of a run of an earlier
            version.
        search: What the search for a start tried: the best trial, all trials, and the evidence of
            guessing; None without a search.
        training: What ``marglik_training`` returned; None if the result was read from a file.
    """

    config: LearnConfig
    data: dict[str, Any]
    net: str
    accuracy: float | None
    evidence: float
    evidence_error: float
    newton_decrement: float
    n_samples: int
    ranges: dict[str, str]
    magnitudes: dict[str, float]
    truth: dict[str, float]
    scale_correlation: float | None
    seconds: float
    evidence_compared: float | None = None
    search: dict[str, Any] | None = None
    training: Result | None = field(default=None, repr=False, compare=False)

    @property
    def comparable(self) -> float:
        """Log evidence per training image to compare with that of other runs."""
        return self.evidence if self.evidence_compared is None else self.evidence_compared

    def summary(self) -> dict[str, Any]:
        """Return the configuration and all that was learnt, for JSON."""
        left_out = ("config", "training")
        values = {name: value for name, value in vars(self).items() if name not in left_out}
        return {"experiment": asdict(self.config), **values}

    def __str__(self) -> str:
        config = self.config
        words = transform_words(config.transform)
        lines = [
            labelled("data", f"{config.data}, {words}, seed {config.seed}"),
            labelled("images", images_words(self.data)),
            labelled("network", self.net),
            labelled("method", f"{config.method}: {LEARN_METHODS[config.method]}"),
        ]
        if self.search is not None:
            lines.append(labelled("search", self._search_words(self.search)))
        lines += [labelled(spaced(name), self.range_words(name)) for name in self.shown]
        if self.scale_correlation is not None:
            lines.append(labelled("x and y scale", f"correlated by {self.scale_correlation:.2f}"))
        if self.accuracy is not None:
            lines.append(labelled("test accuracy", f"{self.accuracy:.1%}"))
        lines.append(labelled("log evidence", self._evidence_words()))
        lines.append(labelled("time", f"{self.seconds:.0f} s"))
        return "\n".join(lines)

    @property
    def shown(self) -> list[str]:
        """Names of the ranges that are learnt, or fixed and not zero."""
        learnt: Sequence[str] = ()
        if self.config.method in ("evidence", "augerino", "augerino-published"):
            learnt = self.config.learn
        reach = self.magnitudes
        return [name for name in reach if name in learnt or reach[name] > LEAST_SHOWN]

    def range_words(self, name: str) -> str:
        """Return a range in words, with the true one if that is known.

        Args:
            name: Name of the range.
        """
        words = range_words(name, self.magnitudes[name], self.data["in_shape"])
        if name not in self.truth:
            return words
        return f"{words}, true {range_words(name, self.truth[name], self.data['in_shape'])}"

    def _search_words(self, search: dict[str, Any]) -> str:
        """Return what the search tried, where it starts, and what came next."""
        found = SearchResult.from_state_dict(search)
        start = self._opened(found.best.ranges)
        words = f"{len(found.trials)} candidates, starts with {start}"
        rivals = [t for t in found.trials if t != found.best and t.n_steps == found.best.n_steps]
        if rivals:
            words += f"; next, by {rivals[0].loss:.3f} nats: {self._opened(rivals[0].ranges)}"
        if found.comparison is not None:
            words += f"; {found.comparison}"
        return words

    def _opened(self, widths: Mapping[str, float]) -> str:
        """Return ranges in words, those of equal width together."""
        named: dict[str, list[str]] = {}
        for name, width in widths.items():
            words = range_words(name, width, self.data["in_shape"])
            named.setdefault(words, []).append(spaced(name))
        return ", ".join(f"{' and '.join(names)} {words}" for words, names in named.items()) or (
            "all ranges closed"
        )

    def _evidence_words(self) -> str:
        words = f"{with_error(self.evidence, self.evidence_error)} per training image"
        if self.config.subset_of_weights == "last_layer":
            words += ", of the last layer"
        if self.n_samples > 1:
            words += f", {self.n_samples} samples"
            if self.evidence_compared is not None:
                words += f"; with {N_COMPARED}, to compare: {self.evidence_compared:.3f}"
        return words


def data_of(split: datasets.Split) -> dict[str, Any]:
    """Return what images are, for JSON.

    Args:
        split: The images.
    """
    return {
        "name": split.name,
        "n_train": len(split.x_train),
        "n_test": len(split.x_test),
        "in_shape": list(split.in_shape),
        "n_classes": split.n_classes,
        "classes": list(split.classes),
    }


def images_words(data: Mapping[str, Any]) -> str:
    """Return in words how many images there are, and of which kind.

    Args:
        data: What :func:`data_of` returned.
    """
    channels, height, width = data["in_shape"]
    numbers = f"{data['n_train']} to train on"
    if data["n_test"]:
        numbers += f", {data['n_test']} to test on"
    kind = "grey" if channels == 1 else "colour"
    return f"{numbers}, {width} x {height} pixels, {kind}, {data['n_classes']} classes"


def transform_words(transform: str) -> str:
    """Return in words how images were transformed."""
    if transform == "original":
        return "images as they are"
    return transform.replace("_", " ")


def range_words(name: str, magnitude: float, shape: Sequence[int]) -> str:
    """Return a range in degrees, pixels or factors.

    Args:
        name: Name of the range.
        magnitude: Its width.
        shape: Channels, height and width of the images.
    """
    return AffineImage().in_words(name, magnitude, shape)


def spaced(name: str) -> str:
    """Return the name of a range as it is said."""
    return name.replace("_", " ")
