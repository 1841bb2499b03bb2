"""Reports of comparisons, suggestions, profiles and layers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from laplace_invariance.experiments.pictures import data_words
from laplace_invariance.experiments.reports import page as html
from laplace_invariance.experiments.reports.facts import export_lines, foot, how_made, spaced
from laplace_invariance.experiments.reports.page import Html

if TYPE_CHECKING:
    from laplace_invariance.experiments.compare import CompareResult
    from laplace_invariance.experiments.directory import RunDirectory
    from laplace_invariance.experiments.layers import LayersResult
    from laplace_invariance.experiments.options import CompareConfig
    from laplace_invariance.experiments.profile import ProfileResult
    from laplace_invariance.experiments.suggest import SuggestResult

__all__ = ["compare_report", "layers_report", "profile_report", "suggest_report"]


def compare_report(
    directory: RunDirectory, config: CompareConfig, comparison: CompareResult
) -> None:
    """Write ``report.html`` of a comparison.

    Args:
        directory: Directory of the run; nothing is written if nothing is kept.
        config: Configuration of the comparison.
        comparison: Results by transformation and method.
    """
    out = directory.out
    if out is None:
        return
    image = {"comparison.png": "Accuracy on test images, and evidence on training images."}
    seeds = ", ".join(str(seed) for seed in config.seeds)
    lead = (
        f"{len(comparison.methods)} methods, the same images and initial weights, "
        f"seeds {seeds}. {_winners(comparison)}"
    )
    parts = [
        html.section("Pictures", html.pictures(out, image)),
        *(html.section(*table) for table in _tables(comparison.markdown())),
        html.section("Reports of the single runs", _runs(out)),
        how_made("compare", config, out, config.seeds),
    ]
    title = f"Methods compared on {Path(config.data).stem}"
    page = html.page(title, "laplace-invariance compare", [lead], parts, foot(out))
    directory.save("report.html", page)


def _winners(comparison: CompareResult) -> str:
    """Say which method has the highest evidence for each transformation."""
    words = []
    for transform in comparison.transforms:
        means = {}
        for method in comparison.methods:
            runs = comparison.results.get((transform, method))
            if runs is not None:
                means[method] = sum(run.comparable for run in runs) / len(runs)
        best = max(means, key=lambda method: means[method])
        words.append(f"{best} ({spaced(transform)}, {means[best]:.3f} nats per image)")
    return f"Highest evidence: {'; '.join(words)}."


def _tables(markdown: str) -> list[tuple[str, Html]]:
    """Return the tables of a text in Markdown with the lines before them."""
    found = []
    parts = markdown.split("\n\n")
    for title, text in itertools.pairwise(parts):
        if not text.startswith("|"):
            continue
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
        head, _, *body = rows
        found.append((title.removesuffix(":"), html.table(head, body)))
    return found


def _runs(out: Path) -> Html:
    """Return links to the reports of all runs inside a directory."""
    names = sorted(path.parent.name for path in out.glob("*/report.html"))
    links = [html.link(name, f"{quote(name)}/report.html") for name in names]
    return html.paragraph(Html(", ".join(links)))


def suggest_report(directory: RunDirectory, result: SuggestResult) -> None:
    """Write ``report.html`` of a run of ``suggest``.

    Args:
        directory: Directory of the run; nothing is written if nothing is kept.
        result: Result of the run, perhaps read from a file.
    """
    out, config, found = directory.out, result.config, result.suggestions
    if out is None:
        return
    image = {"suggest.png": "By how much augmentations would change the evidence, standard errors."}
    rows = []
    for row in found.rows:
        rows.append([spaced(row.words), f"{row.gain:+.3f}", f"{row.error:.3f}", row.verdict])
    head = ["augmentation", "gain, nats per image", "standard error", "the evidence"]
    best = [i for i, row in enumerate(found.rows) if row is found.best]
    export = Html("")
    if found.best is not None:
        export = html.code(export_lines(found.best.ranges))
    parts = [
        html.section("In numbers", _suggest_numbers(result)),
        html.section("Pictures", html.pictures(out, image)),
        html.section("What was tried", html.table(head, rows, numbers=(1, 2), marked=best)),
        html.section("Use the best", export),
        how_made("suggest", config, out, [config.seed]),
    ]
    title = f"Augmentations for a network on {data_words(config)}"
    kicker = f"laplace-invariance suggest, {result.net}"
    lead = [f"{line[:1].upper()}{line[1:]}." for line in found.conclusion().splitlines()]
    directory.save("report.html", html.page(title, kicker, lead, parts, foot(out)))


def _suggest_numbers(result: SuggestResult) -> Html:
    found = result.suggestions
    entries = []
    if result.accuracy is not None:
        entries.append(("test accuracy, without", f"{result.accuracy:.1%}", ""))
    alone = f"{found.evidence:.3f} nats"
    entries.append(("log evidence per image, without", alone, f"after {found.n_steps} steps"))
    if found.chance is not None:
        entries.append(("the same of guessing", f"{found.chance:.3f} nats", "by frequencies"))
    entries.append(("samples per image", str(found.n_samples), f"{found.n_repeats} repeats"))
    return html.cards(entries)


def profile_report(directory: RunDirectory, result: ProfileResult) -> None:
    """Write ``report.html`` of a profile.

    Args:
        directory: Directory of the run; nothing is written if nothing is kept.
        result: Result of the run.
    """
    out, config, found = directory.out, result.config, result.profile
    if out is None:
        return
    errors = [""] * len(found.values)  # of one repetition they are not known
    if found.errors is not None:
        errors = [f"{error:.3f}" for error in found.errors]
    rows = [
        [found.in_words(value), f"{evidence:.3f}", error]
        for value, evidence, error in zip(found.values, found.evidences, errors, strict=True)
    ]
    head = [
        spaced(found.name),
        "log evidence, nats per image",
        "error of what it is below the best",
    ]
    learnt = found.values.index(found.learnt)
    image = {"profile.png": "The evidence along the range; the learnt width is dashed."}
    parts = [
        html.section("Pictures", html.pictures(out, image)),
        html.section("In numbers", html.table(head, rows, numbers=(1, 2), marked=(learnt,))),
        html.section("Report of the run that it is of", _runs(out)),
        how_made("profile", config, out, [config.seed]),
    ]
    title = f"The evidence along {spaced(found.name)} on {data_words(config)}"
    lead = [f"{found.conclusion()}."]
    page = html.page(title, "laplace-invariance profile", lead, parts, foot(out))
    directory.save("report.html", page)


def layers_report(directory: RunDirectory, result: LayersResult) -> None:
    """Write ``report.html`` of a run of ``layers``.

    Args:
        directory: Directory of the run; nothing is written if nothing is kept.
        result: Result of the run, perhaps read from a file.
    """
    out, config = directory.out, result.config
    if out is None:
        return
    images = {
        "layers.png": "How much of each path is in use, and their prior precisions.",
        "evidence.png": "The evidence while training, and the terms that it is the sum of.",
    }
    chosen = [[spaced(place), path] for place, path in result.report.chosen.items()]
    parts = [
        html.section("Paths in use", html.table(["layer", "path"], chosen)),
        html.section("Pictures", html.pictures(out, images)),
        html.section("In numbers", html.code(str(result), wide=True)),
        how_made("layers", config, out, [config.seed]),
    ]
    title = f"Which layers need what on {data_words(config)}"
    lead = [f"Layer by layer: {', '.join(result.report.chosen.values())}."]
    page = html.page(title, "laplace-invariance layers", lead, parts, foot(out))
    directory.save("report.html", page)
