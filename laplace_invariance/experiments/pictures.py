"""Pictures in the directories of runs: what is drawn of a result, and under which name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laplace_invariance import plots
from laplace_invariance.experiments.base import draw_evidence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from laplace_invariance.augmentations import AffineImage
    from laplace_invariance.datasets import Split
    from laplace_invariance.experiments.compare import CompareResult
    from laplace_invariance.experiments.directory import RunDirectory
    from laplace_invariance.experiments.learn import LearnResult
    from laplace_invariance.experiments.profile import ProfileResult
    from laplace_invariance.experiments.suggest import SuggestResult
    from laplace_invariance.marglik import SearchResult
    from laplace_invariance.marglik.estimators import Estimator

__all__ = ["draw_compare", "draw_learn", "draw_profile", "draw_suggest"]


def draw_learn(
    directory: RunDirectory,
    result: LearnResult,
    initial: AffineImage | None,
    estimator: Estimator,
    split: Split,
) -> None:
    """Draw what a run of ``learn`` learnt, and how."""
    config, training, images = result.config, result.training, split.x_train
    assert training is not None  # as the run has just ended
    title = f"{config.data}, {config.transform.replace('_', ' ')}"
    history = training.history
    draw_evidence(directory, history, len(images), title, estimator)
    augmentation = getattr(training.model, "augmentation", None)
    if augmentation is None or initial is None:
        return
    epochs = [record["epoch"] for record in history]
    found = [record["ranges"]["augmentation"] for record in history]
    values = {name: [ranges[name] for ranges in found] for name in augmentation.names}
    truth = {name: value for name, value in result.truth.items() if value > 0}

    def ranges(figure: Figure) -> None:
        plots.ranges_over_epochs(epochs, values, truth, figure.subplots()).set_title(title)

    def samples(figure: Figure) -> None:
        start, end = figure.subplots(1, 2)
        plots.samples(initial, images[:6], 8, start, "at the start")
        plots.samples(augmentation, images[:6], 8, end, "as learnt")

    def flow(figure: Figure) -> None:
        plots.flow(augmentation, figure.subplots()).set_title(f"learnt on {title}")

    if training.search is not None:
        _draw_search(directory, training.search, title)
    directory.figure("ranges.png", (8, 4.5), ranges)
    directory.figure("samples.png", (11, 5), samples)
    directory.figure("flow.png", (5, 5), flow)


def _draw_search(directory: RunDirectory, search: SearchResult, title: str) -> None:
    losses = {str(trial): trial.loss for trial in search.trials}
    steps = {str(trial): trial.n_steps for trial in search.trials}

    def draw(figure: Figure) -> None:
        plots.search_trials(losses, steps, figure.subplots()).set_title(f"search on {title}")

    directory.figure("search.png", (9, 6), draw)


def draw_compare(directory: RunDirectory, comparison: CompareResult) -> None:
    """Draw the accuracies of a comparison."""

    def draw(figure: Figure) -> None:
        plots.accuracies(comparison.accuracies(), figure.subplots())

    directory.figure("comparison.png", (2 + 2.4 * len(comparison.transforms), 5), draw)


def draw_suggest(directory: RunDirectory, result: SuggestResult) -> None:
    """Draw the gains in evidence of what was tried."""
    config, found = result.config, result.suggestions
    title = f"{config.net} on {config.data}, {config.transform.replace('_', ' ')}"

    def draw(figure: Figure) -> None:
        plots.gains(
            [row.words for row in found.rows],
            [row.gain for row in found.rows],
            [row.error for row in found.rows],
            [row.verdict != "not clear" for row in found.rows],
            figure.subplots(),
        ).set_title(title)

    directory.figure("suggest.png", (8, 1.5 + 0.35 * len(found.rows)), draw)


def draw_profile(directory: RunDirectory, result: ProfileResult) -> None:
    """Draw the evidence along a range."""
    config = result.config
    title = f"{config.data}, {config.transform.replace('_', ' ')}, {config.method}"

    def draw(figure: Figure) -> None:
        plots.evidence_by_range(result.profile, result.truth, figure.subplots()).set_title(title)

    directory.figure("profile.png", (7, 4.5), draw)
