"""Pictures in the directories of runs: what is drawn of a result, and under which name."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laplace_invariance import plots
from laplace_invariance.experiments.base import draw_evidence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure
    from torch import Tensor

    from laplace_invariance.augmentations import AffineImage
    from laplace_invariance.datasets import Split
    from laplace_invariance.experiments.compare import CompareResult
    from laplace_invariance.experiments.directory import RunDirectory
    from laplace_invariance.experiments.learn import LearnResult
    from laplace_invariance.experiments.profile import ProfileResult
    from laplace_invariance.experiments.suggest import SuggestResult
    from laplace_invariance.marglik import Result, SearchResult
    from laplace_invariance.marglik.estimators import Estimator

__all__ = [
    "data_words",
    "draw_compare",
    "draw_learn",
    "draw_profile",
    "draw_suggest",
    "size_of",
]

N_IMAGES, N_SAMPLES = 6, 8  # rows of a picture of samples, and samples in each
RECOGNISED = 16  # pixels along the sides of an image that is recognised behind a flow


def data_words(config: Any) -> str:
    """Return which images a run had, and how they were transformed.

    Args:
        config: Configuration with ``data`` and ``transform``.
    """
    name = Path(config.data).stem
    if config.transform == "original":
        return name
    return f"{name}, {config.transform.replace('_', ' ')}"


def size_of(result: Any) -> tuple[int, int] | None:
    """Return height and width of the images of a result, if it knows them."""
    data = getattr(result, "data", None)
    if data is None:
        return None
    _, height, width = data["in_shape"]
    return height, width


def run_words(result: LearnResult) -> str:
    """Return network, images and method of a run, for titles.

    Args:
        result: Result of a run of ``learn``.
    """
    config = result.config
    return f"{result.net} on {data_words(config)}, method {config.method}"


# One run.


def draw_learn(
    directory: RunDirectory,
    result: LearnResult,
    initial: AffineImage | None,
    estimator: Estimator,
    split: Split,
) -> None:
    """Draw what a run of ``learn`` learnt, and how.

    Args:
        directory: Where the figures are saved.
        result: Result of the run, which has just ended.
        initial: Augmentation as it was at the start; None without one.
        estimator: Estimator of the evidence.
        split: Images of the run.
    """
    config, training = result.config, result.training
    assert training is not None
    title, size = run_words(result), size_of(result)
    draw_evidence(directory, training.history, len(split.x_train), title, estimator, training)
    augmentation = deepcopy(getattr(training.model, "augmentation", None))
    if augmentation is None or initial is None:
        return
    augmentation.to("cpu")
    images = _one_of_each(split.x_train, split.y_train)

    def flow(figure: Figure) -> None:
        behind = images[0] if min(images.shape[-2:]) >= RECOGNISED else None
        plots.flow(augmentation, figure.subplots(), behind)
        _head(figure, "where pixels may go", f"\n{title}")

    if training.search is not None:
        _draw_search(directory, training.search, size, title)
    settled = estimator.n_epochs_learning(config.n_epochs)
    _draw_ranges(directory, result, training, settled)
    _draw_samples(directory, augmentation, initial, images, title)
    directory.figure("flow.png", (5.6, 5.9), flow)


def _one_of_each(images: Tensor, labels: Tensor) -> Tensor:
    """Return the first images of different classes and, if there are few classes, more of each."""
    seen: dict[int, int] = {}
    turns = []
    for label in labels.tolist():
        turns.append(seen.get(label, 0))
        seen[label] = turns[-1] + 1
    order = sorted(range(len(turns)), key=lambda i: (turns[i], i))
    return images[sorted(order[:N_IMAGES])]


def _draw_ranges(
    directory: RunDirectory, result: LearnResult, training: Result, settled: int
) -> None:
    epochs = [record["epoch"] for record in training.history]
    found = [record["ranges"]["augmentation"] for record in training.history]
    values = {name: [ranges[name] for ranges in found] for name in found[0]}
    size = size_of(result)
    n_units = len(plots.by_unit(values, size))
    truth = result.truth if any((result.truth or {}).values()) else None

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, n_units, squeeze=False)[0]
        marks: dict[str, Any] = {"best_epoch": training.best_epoch, "settled": settled}
        plots.ranges_over_epochs(epochs, values, truth, axes, size=size, **marks)
        _head(figure, "ranges over epochs", run_words(result))

    directory.figure("ranges.png", (0.6 + 3.3 * n_units, 3.4), draw)


def _draw_samples(
    directory: RunDirectory,
    augmentation: AffineImage,
    initial: AffineImage,
    images: Tensor,
    title: str,
) -> None:
    """Draw samples as learnt, beside those of the start if that is neither nothing nor the end."""
    before, after = initial.magnitudes(), augmentation.magnitudes()
    differs = any(before.values()) and before != after
    shown = {"as learnt": augmentation}
    if differs:
        shown = {"at the start": initial, **shown}

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(shown), squeeze=False)[0]
        for ax, (words, one) in zip(axes, shown.items(), strict=True):
            plots.samples(one, images, N_SAMPLES, ax, words if differs else "")
        _head(figure, "samples" if differs else "samples as learnt", title)

    height, width = images.shape[-2:]
    tall = 0.75 + 6.6 * height / width * len(images) / (N_SAMPLES + 1)
    directory.figure("samples.png", (6.6 * len(shown), tall), draw)


def _draw_search(
    directory: RunDirectory, search: SearchResult, size: tuple[int, int] | None, title: str
) -> None:
    trials = search.trials
    names = [plots.short_words(trial.ranges, size) for trial in trials]

    def draw(figure: Figure) -> None:
        plots.search_trials(
            names,
            [trial.loss for trial in trials],
            [trial.n_steps for trial in trials],
            figure.subplots(),
            trials.index(search.best),
        )
        _head(figure, "what the search tried", title)

    n_groups = len({trial.n_steps for trial in trials})
    directory.figure("search.png", (9.5, 1.1 + 0.27 * (len(trials) + 1.5 * n_groups)), draw)


def _head(figure: Figure, words: str, about: str) -> None:
    """Write above all axes what a figure shows, and of which run it is."""
    figure.suptitle(f"{words}: {about}", x=0.01, ha="left", fontsize="medium", color=plots.INK)


# Several runs, or evidences.


def draw_compare(directory: RunDirectory, comparison: CompareResult) -> None:
    """Draw accuracy and evidence of a comparison, by transformation and method.

    Args:
        directory: Where the figure is saved.
        comparison: Results by transformation and method.
    """
    transforms, methods = comparison.transforms, comparison.methods
    first = next(iter(comparison.results.values()))[0]

    def draw(figure: Figure) -> None:
        n_columns = len(_by_method(comparison, transforms[0], methods))
        rows = figure.subplots(len(transforms), n_columns, squeeze=False)
        for axes, transform in zip(rows, transforms, strict=True):
            found = _by_method(comparison, transform, methods)
            for ax, (label, values) in zip(axes, found.items(), strict=True):
                plots.by_method(values, "{:.3f}" if "evidence" in label else "{:.1f}", ax)
                ax.set_xlabel(label if transform == transforms[-1] else "")
            words = transform.replace("_", " ")
            axes[0].set_title(words, loc="left", fontsize="medium", fontweight="bold")
        for ax in rows[:, 1:].flatten():
            ax.set_yticklabels([])
        about = f"{first.net} on {Path(first.config.data).stem}"
        _head(figure, about, _seeds(comparison))

    height = 1.0 + len(transforms) * (0.75 + 0.42 * len(methods))
    directory.figure("comparison.png", (9.5, height), draw)


def _by_method(
    comparison: CompareResult, transform: str, methods: Sequence[str]
) -> dict[str, dict[str, list[float]]]:
    """Return accuracies, if there are test images, and evidences of one transformation."""
    accuracies: dict[str, list[float]] = {}
    evidences: dict[str, list[float]] = {}
    for method in methods:
        for result in comparison.results.get((transform, method), []):
            evidences.setdefault(method, []).append(result.comparable)
            if result.accuracy is not None:
                accuracies.setdefault(method, []).append(100 * result.accuracy)
    found = {"log evidence, nats per training image": evidences}
    if accuracies:
        found = {"test accuracy, percent": accuracies, **found}
    return found


def _seeds(comparison: CompareResult) -> str:
    most = max(len(results) for results in comparison.results.values())
    if most == 1:
        return "one run each"
    return f"mean and deviation of up to {most} runs, each a grey dot"


def draw_suggest(directory: RunDirectory, result: SuggestResult) -> None:
    """Draw the gains in evidence of what was tried.

    Args:
        directory: Where the figure is saved.
        result: Result of the run.
    """
    config, found = result.config, result.suggestions

    def draw(figure: Figure) -> None:
        plots.gains(
            [plots.short_words(row.ranges, size_of(result)) for row in found.rows],
            [row.gain for row in found.rows],
            [row.error for row in found.rows],
            [row.verdict != "not clear" for row in found.rows],
            figure.subplots(),
        )
        words = f"{result.net} on {data_words(config)} (grey: not clear)"
        _head(figure, "what augmentations would do to the evidence", words)

    directory.figure("suggest.png", (9, 1.2 + 0.34 * len(found.rows)), draw)


def draw_profile(directory: RunDirectory, result: ProfileResult) -> None:
    """Draw the evidence along a range.

    Args:
        directory: Where the figure is saved.
        result: Result of the run.
    """
    truth = result.truth or None  # what is zero is not known, or not there

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        plots.evidence_by_range(result.profile, ax, truth, size_of(result.learnt))
        _head(figure, "evidence along a range", run_words(result.learnt))

    directory.figure("profile.png", (7.5, 4.5), draw)
