"""What a table of a paper is: cells, each filled by runs, and how these are shown."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from laplace_invariance.experiments.checks import Config
from laplace_invariance.experiments.choices import Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "NOT_RUN",
    "Cell",
    "Curve",
    "Found",
    "Measure",
    "Picture",
    "Table",
    "open_ranges",
    "spread",
]

NOT_RUN = "not run"
Found = Mapping[str, Any]
SHORT = {
    "x_translation": "x shift",
    "y_translation": "y shift",
    "rotation": "rotation",
    "x_scale": "x scale",
    "y_scale": "y scale",
    "shear": "shear",
}
LEAST_SHOWN = 0.05  # width of a range that is named


@dataclass(frozen=True)
class Cell:
    """One run of a cell.

    Attributes:
        part: Name of the part of the table, such as a data set; a table of its own.
        row: Name of the row.
        column: Name of the column.
        config: Configuration of the run, with its seed.
    """

    part: str
    row: str
    column: str
    config: Config

    @property
    def seed(self) -> int:
        """Seed of the run."""
        found: int = asdict(self.config)["seed"]
        return found

    @property
    def name(self) -> str:
        """Name of the run, for files."""
        words = f"{self.part} {self.row} {self.column} {self.seed}".lower()
        return re.sub(r"[^a-z0-9.]+", "-", words).strip("-")


@dataclass(frozen=True)
class Measure:
    """What of the runs of one cell is shown.

    Attributes:
        title: What it is, as a heading.
        words: Takes what was found in the runs of a cell, one per seed, and returns its text.
    """

    title: str
    words: Callable[[Sequence[Found]], str]


@dataclass(frozen=True)
class Curve:
    """A figure of a table whose columns are numbers: a line for every row, axes for every part.

    Attributes:
        x: What columns are.
        y: What is drawn.
        value: Takes what was found in a run, and returns its height.
        log_y: Whether heights are on a logarithmic scale, as numbers of columns are.
    """

    x: str
    y: str
    value: Callable[[Found], float]
    log_y: bool = False


@dataclass(frozen=True)
class Picture:
    """A figure of a table with a picture of every run: columns are rows of the table.

    Attributes:
        draw: Takes what was found in a run, and axes to draw on.
        size: Width and height of a picture in inches.
        rows: Rows of the table that have pictures; all of them, if none is named.
    """

    draw: Callable[[Found, Axes], object]
    size: tuple[float, float]
    rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table of a paper.

    Attributes:
        title: What is compared, in one line.
        source: Paper and place.
        claim: What the paper says of it.
        cells: Takes a size, and returns all runs, most telling first.
        measures: What is shown, one table each.
        corner: What rows are.
        curve: Figure, if columns are numbers.
        remark: What does not hold here of what the paper says, and what was tried.
        picture: Figure, if runs have pictures.
    """

    title: str
    source: str
    claim: str
    cells: Callable[[Scale], list[Cell]]
    measures: tuple[Measure, ...]
    corner: str = "method"
    remark: str = ""
    curve: Curve | None = None
    picture: Picture | None = None

    def markdown(self, scale: Scale, found: Mapping[str, Found]) -> str:
        """Return all tables in Markdown; what has not been run says so.

        Args:
            scale: Size of the runs.
            found: Results by name of the run.
        """
        cells = self.cells(scale)
        texts = []
        for part in dict.fromkeys(cell.part for cell in cells):
            own = [cell for cell in cells if cell.part == part]
            if not any(cell.name in found for cell in own):
                texts.append(_left_out(part, own))
                continue
            for measure in self.measures:
                heading = f"{part}, {measure.title}:" if part else f"{measure.title}:"
                texts.append(f"{heading}\n\n{self._part(own, measure, found)}")
        texts.append(_summary(cells, found))
        return "\n\n".join(texts)

    @property
    def has_figure(self) -> bool:
        """Whether runs have a figure."""
        return self.curve is not None or self.picture is not None

    def _part(self, cells: Sequence[Cell], measure: Measure, found: Mapping[str, Found]) -> str:
        columns = list(dict.fromkeys(cell.column for cell in cells))
        lines = [[self.corner, *columns], ["---"] * (1 + len(columns))]
        for row in dict.fromkeys(cell.row for cell in cells):
            texts = []
            for column in columns:
                planned = [cell for cell in cells if (cell.row, cell.column) == (row, column)]
                texts.append(_cell(planned, measure, found))
            lines.append([row, *texts])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _left_out(part: str, cells: Sequence[Cell]) -> str:
    """Return what was not run of a part of which nothing was."""
    rows = "; ".join(dict.fromkeys(cell.row for cell in cells))
    columns = "; ".join(dict.fromkeys(cell.column for cell in cells))
    heading = f"{part}: " if part else ""
    return textwrap.fill(f"{heading}{NOT_RUN} (rows: {rows}; columns: {columns}).", 100)


def _cell(planned: Sequence[Cell], measure: Measure, found: Mapping[str, Found]) -> str:
    results = [found[cell.name] for cell in planned if cell.name in found]
    if not planned:
        return "-"
    return measure.words(results) if results else NOT_RUN


def _summary(cells: Sequence[Cell], found: Mapping[str, Found]) -> str:
    """Say how many runs there are, with which seeds and versions, and how long they took."""
    done = [cell for cell in cells if cell.name in found]
    results = [found[cell.name] for cell in done]
    words = f"{len(done)} of {len(cells)} runs"
    if not done:
        return f"{words}."
    seeds = ", ".join(str(seed) for seed in sorted({cell.seed for cell in done}))
    hours = sum(result["seconds"] for result in results) / 3600
    versions = ", ".join(sorted({result["version"] for result in results}))
    return f"{words}; seeds {seeds}; {hours:.1f} hours of one core; version {versions}."


def spread(values: Sequence[float], form: str = "{:.1f}") -> str:
    """Return the mean and, of several, the standard deviation, with their number.

    Args:
        values: Numbers, one per seed.
        form: How a number is written.
    """
    mean = form.format(statistics.fmean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ± {form.format(statistics.stdev(values))} ({len(values)})"


def open_ranges(runs: Sequence[Mapping[str, float]]) -> str:
    """Return means of the ranges that are open, in words.

    Args:
        runs: Widths by name, one per seed: radians, half-widths of the image, log factors.
    """
    parts = []
    for name in runs[0]:
        widths = [run[name] for run in runs]
        if max(widths) < LEAST_SHOWN:
            continue
        mean = statistics.fmean(widths)
        words = f"±{math.degrees(mean):.0f}°" if name == "rotation" else f"{mean:.2f}"
        parts.append(f"{SHORT[name]} {words}")
    return ", ".join(parts) or "closed"
