"""What reports say of runs: ranges, numbers with units, the lines that export a transform."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laplace_invariance import __version__, plots
from laplace_invariance.experiments.checks import Config
from laplace_invariance.experiments.reports import page as html
from laplace_invariance.experiments.reports.command import command
from laplace_invariance.experiments.reports.page import Html
from laplace_invariance.marglik import SearchResult

__all__ = [
    "duration",
    "export_lines",
    "foot",
    "how_made",
    "is_open",
    "search_table",
    "spaced",
]

OPEN = 0.02  # of a range that is worth a card: a degree, or two percent of the image


def spaced(name: str) -> str:
    """Return the name of a range, or of a transformation, as it is said."""
    return name.replace("_", " ")


def is_open(magnitude: float) -> bool:
    """Return whether a range is open so far that it can be seen."""
    return magnitude > OPEN


def duration(seconds: float) -> str:
    """Return a time in words."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def export_lines(ranges: Mapping[str, float]) -> str:
    """Return lines of Python that make the transform, for torchvision, of some ranges.

    Args:
        ranges: Magnitudes by name of ``AffineImage``.
    """
    # rounded down, as a range must not be wider than its limit
    kept = {name: math.floor(1e4 * value) / 1e4 for name, value in ranges.items()}
    kept = {name: value for name, value in kept.items() if value > 0}
    return "\n".join(
        [
            "import laplace_invariance as li",
            f"augmentation = li.AffineImage(init={kept})",
            "transform = augmentation.to_transform()  # of square images, for any data set",
        ]
    )


def search_table(search: Mapping[str, Any], size: tuple[int, int] | None) -> Html:
    """Return what a search tried, the best first.

    Args:
        search: State of a ``SearchResult``.
        size: Height and width of the images, for translations in pixels.
    """
    found = SearchResult.from_state_dict(search)
    rows = [
        [
            plots.short_words(trial.ranges, size),
            str(trial.n_steps),
            f"{trial.evidence:.3f}",
            f"{trial.loss:.3f}",
        ]
        for trial in found.trials
    ]
    head = ["ranges", "steps on the weights", "log evidence, nats per image", "lost by"]
    best = found.trials.index(found.best)
    return html.table(head, rows, numbers=(1, 2, 3), marked=(best,))


def how_made(verb: str, config: Config, out: Path, seeds: Sequence[int]) -> Html:
    """Return a section with the command, the version and the seed.

    Args:
        verb: Name of the command.
        config: Configuration of the run.
        out: Directory of the run.
        seeds: Seeds of the run.
    """
    words = ", ".join(str(seed) for seed in seeds)
    settings = [[spaced(name), str(value)] for name, value in vars(config).items()]
    return html.section(
        "How it was made",
        html.code(command(verb, config, out)),
        html.paragraph(f"laplace-invariance {__version__}, seed {words}."),
        html.details("all settings", html.table(["setting", "value"], settings)),
    )


def foot(out: Path) -> str:
    """Return the last line of a report."""
    names = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    names = [name for name in names if name != "report.html"]
    return f"In the same directory: {', '.join(names)}."
