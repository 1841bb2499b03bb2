"""Pictures in the directories of runs: what is drawn of a result, and under which name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from laplace_invariance import plots
from laplace_invariance.experiments.base import draw_evidence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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

__all__ = ["data_words", "draw_compare", "draw_learn", "draw_profile", "draw_suggest"]

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


def run_words(config: Any) -> str:
    """Return network, images and method of a run, for titles.

    Args:
        config: Configuration of a run of ``learn``.
    """
    return f"{config.net} on {data_words(config)}, method {config.method}"


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
    title = run_words(config)
    draw_evidence(directory, training.history, len(split.x_train), title, estimator, training)
    augmentation = getattr(training.model, "augmentation", None)
    if augmentation is None or initial is None:
        return
    images = _one_of_each(split.x_train, split.y_train)

    def flow(figure: Figure) -> None:
        behind = images[0] if min(images.shape[-2:]) >= RECOGNISED else None
        plots.flow(augmentation, figure.subplots(), behind)
        _head(figure, "where pixels may go", f"\n{title}")

    if training.search is not None:
        _draw_search(directory, training.search, title)
    settled = estimator.n_epochs_learning(config.n_epochs)
    _draw_ranges(directory, training, result.truth, settled, title)
    _draw_samples(directory, augmentation, initial, images, title)
    directory.figure("flow.png", (5.4, 6.2), flow)


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
    directory: RunDirectory,
    training: Result,
    truth: Mapping[str, float] | None,
    settled: int,
    title: str,
) -> None:
    epochs = [record["epoch"] for record in training.history]
    found = [record["ranges"]["augmentation"] for record in training.history]
    values = {name: [ranges[name] for ranges in found] for name in found[0]}
    n_units = len(plots.by_unit(values))
    n_rows = -(-n_units // 2)

    def draw(figure: Figure) -> None:
        axes = figure.subplots(n_rows, min(n_units, 2), squeeze=False).flatten().tolist()
        for spare in axes[n_units:]:
            spare.remove()
        marks: dict[str, Any] = {"best_epoch": training.best_epoch, "settled": settled}
        plots.ranges_over_epochs(epochs, values, truth, axes[:n_units], **marks)
        _head(figure, "ranges over epochs", title)

    directory.figure("ranges.png", (4.9 * min(n_units, 2), 0.4 + 2.6 * n_rows), draw)


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


def _draw_search(directory: RunDirectory, search: SearchResult, title: str) -> None:
    trials = search.trials
    names = [plots.short_words(trial.ranges) for trial in trials]

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
    first = next(iter(comparison.results.values()))[0].config

    def draw(figure: Figure) -> None:
        rows = figure.subplots(len(transforms), 2, squeeze=False)
        for axes, transform in zip(rows, transforms, strict=True):
            found = _by_method(comparison, transform, methods)
            plots.by_method(found["accuracy"], "{:.1f}", axes[0])
            plots.by_method(found["evidence"], "{:.3f}", axes[1])
            axes[1].set_yticklabels([])
            words = transform.replace("_", " ")
            axes[0].set_title(words, loc="left", fontsize="medium", fontweight="bold")
        rows[-1][0].set_xlabel("test accuracy, percent")
        rows[-1][1].set_xlabel("log evidence, nats per training image")
        _head(figure, f"{first.net} on {Path(first.data).stem}", _seeds(comparison))

    height = 1.0 + len(transforms) * (0.75 + 0.42 * len(methods))
    directory.figure("comparison.png", (9.5, height), draw)


def _by_method(
    comparison: CompareResult, transform: str, methods: Sequence[str]
) -> dict[str, dict[str, list[float]]]:
    """Return accuracies in percent and evidences of one transformation, by method."""
    found: dict[str, dict[str, list[float]]] = {"accuracy": {}, "evidence": {}}
    for method in methods:
        results = comparison.results.get((transform, method))
        if results is not None:
            found["accuracy"][method] = [100 * result.accuracy for result in results]
            found["evidence"][method] = [result.evidence for result in results]
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
            [plots.short_words(row.ranges) for row in found.rows],
            [row.gain for row in found.rows],
            [row.error for row in found.rows],
            [row.verdict != "not clear" for row in found.rows],
            figure.subplots(),
        )
        words = f"{config.net} on {data_words(config)} (grey: not clear)"
        _head(figure, "what augmentations would do to the evidence", words)

    directory.figure("suggest.png", (9, 1.2 + 0.34 * len(found.rows)), draw)


def draw_profile(directory: RunDirectory, result: ProfileResult) -> None:
    """Draw the evidence along a range.

    Args:
        directory: Where the figure is saved.
        result: Result of the run.
    """
    config = result.config

    def draw(figure: Figure) -> None:
        plots.evidence_by_range(result.profile, result.truth, figure.subplots())
        _head(figure, "evidence along a range", run_words(config))

    directory.figure("profile.png", (7.5, 4.5), draw)
