"""The report of one run of ``learn``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laplace_invariance.experiments.choices import LEARN_METHODS
from laplace_invariance.experiments.pictures import data_words, size_of
from laplace_invariance.experiments.reports import page as html
from laplace_invariance.experiments.reports.facts import (
    duration,
    export_lines,
    foot,
    how_made,
    is_open,
    search_table,
    spaced,
)
from laplace_invariance.experiments.reports.page import Html
from laplace_invariance.experiments.results import N_COMPARED
from laplace_invariance.marglik import SearchResult
from laplace_invariance.marglik.training import FAR_FROM_A_MODE

if TYPE_CHECKING:
    from laplace_invariance.experiments.directory import RunDirectory
    from laplace_invariance.experiments.learn import LearnResult

__all__ = ["learn_report"]

CAPTIONS = {
    "samples.png": "Training images, and samples of each under what was learnt.",
    "flow.png": "Where a few pixels may go: an arc for each open range, and dots for all together.",
    "ranges.png": "Ranges over epochs, each unit on an axis of its own.",
    "evidence.png": "The evidence while training, and the terms that it is the sum of.",
    "search.png": "What the search for a start tried, and by how much it lost.",
}


def learn_report(directory: RunDirectory, result: LearnResult) -> None:
    """Write ``report.html`` of a run of ``learn``, from its result and its pictures.

    Args:
        directory: Directory of the run; nothing is written if nothing is kept.
        result: Result of the run, perhaps read from a file.
    """
    out, config = directory.out, result.config
    if out is None:
        return
    images = html.pictures(out, CAPTIONS, halves=("samples.png", "flow.png"))
    parts = [
        _ranges(result),
        html.section("In numbers", _numbers(result)),
        html.section("Pictures", images),
        _search(result),
        _export(result),
        how_made("learn", config, out, [config.seed]),
    ]
    title = f"What was learnt from {data_words(config)}"
    kicker = f"laplace-invariance learn, {result.net}, {config.method}"
    directory.save("report.html", html.page(title, kicker, [_lead(result)], parts, foot(out)))


def _lead(result: LearnResult) -> str:
    """Say in a sentence or two what was learnt."""
    config = result.config
    method = f"Method {config.method}: {LEARN_METHODS[config.method]}."
    if not result.magnitudes:
        return f"{method} There are no ranges to learn."
    opened = [
        f"{spaced(name)} {result.ranges[name]}"
        for name, magnitude in result.magnitudes.items()
        if is_open(magnitude)
    ]
    if not opened:
        return f"{method} All ranges stay closed: no invariance that was tried is worth having."
    words = f"{method} The network is averaged over {', '.join(opened)}"
    if len(opened) < len(result.magnitudes):
        words += "; all other ranges are closed"
    return f"{words}."


def _ranges(result: LearnResult) -> Html:
    """Return a card for every range that is open, and what there is to beware of."""
    truth = {name: width for name, width in (result.truth or {}).items() if width > 0}
    entries = []
    for name, magnitude in result.magnitudes.items():
        if not is_open(magnitude) and name not in truth:
            continue
        remark = ""
        if name in truth:
            remark = f"true: {_true_words(result, name)}"
        entries.append((spaced(name), result.ranges[name], remark))
    closed = [spaced(n) for n, m in result.magnitudes.items() if not is_open(m) and n not in truth]
    rest = Html("")
    if closed:
        rest = html.paragraph(f"Closed, or nearly: {', '.join(closed)}.")
    made = html.cards(entries) if entries else Html("")
    return html.section("Ranges", made, rest, *_warnings(result))


def _true_words(result: LearnResult, name: str) -> str:
    from laplace_invariance.augmentations import AffineImage

    return AffineImage(init=result.truth).ranges()[name]


def _warnings(result: LearnResult) -> list[Html]:
    found = []
    if result.newton_decrement > FAR_FROM_A_MODE:
        found.append(
            html.note(
                "The weights are not at a mode, of which the evidence is: judged by slope and "
                f"curvature, the log posterior could rise by {result.newton_decrement:.2f} nats "
                "per training image. Train for longer before relying on it."
            )
        )
    if result.search is not None and not SearchResult.from_state_dict(result.search).is_clear:
        found.append(
            html.note(
                "No candidate of the search was better than guessing by the frequencies of "
                "classes, so that its choice means little."
            )
        )
    return found


def _numbers(result: LearnResult) -> Html:
    config = result.config
    entries = []
    if result.accuracy is not None:
        entries.append(("test accuracy", f"{result.accuracy:.1%}", ""))
    remark = "exact"
    if result.evidence_error:
        remark = f"standard error {result.evidence_error:.3f}"
    if config.subset_of_weights == "last_layer":
        remark += ", of the last layer"
    entries.append(("log evidence per training image", f"{result.evidence:.3f} nats", remark))
    if result.n_samples > 1 and result.evidence_compared is not None:
        compared = f"{result.evidence_compared:.3f} nats"
        entries.append((f"with {N_COMPARED} samples", compared, "to compare with other runs"))
    step = f"{result.newton_decrement:.3f} nats"
    entries.append(("a Newton step would gain", step, "per training image; 0 at a mode"))
    entries.append(("samples per image", str(result.n_samples), f"{config.n_epochs} epochs"))
    entries.append(("time", duration(result.seconds), "search and training"))
    if result.scale_correlation is not None:
        entries.append(("x and y scale", f"{result.scale_correlation:.2f}", "correlation"))
    return html.cards(entries)


def _search(result: LearnResult) -> Html:
    if result.search is None:
        return Html("")
    found = SearchResult.from_state_dict(result.search)
    words = (
        f"{len(found.trials)} candidates were trained for a while from the same weights and "
        f"compared by evidence; guessing has {found.chance:.3f} nats per image. Candidates lose to "
        "the best that was trained equally long. Training starts from the marked one."
    )
    if found.comparison is not None:
        words += (
            " A second network was trained with these ranges as they are, to see whether they "
            f"should be learnt further; {found.comparison}."
        )
    return html.section(
        "What the search tried",
        html.paragraph(words),
        html.details("all candidates", search_table(result.search, size_of(result))),
    )


def _export(result: LearnResult) -> Html:
    if not any(is_open(magnitude) for magnitude in result.magnitudes.values()):
        return Html("")
    parts = [html.code(export_lines(result.magnitudes))]
    if result.config.correlated:
        parts.append(html.note("These lines do not have the correlations, checkpoint.pt has."))
    return html.section("Use it elsewhere", *parts)
