"""Figures of the tables of papers, made from the files of their runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laplace_invariance import plots
from laplace_invariance.experiments.choices import Scale
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.papers import Cell, Curve, Picture, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_table"]

Results = Mapping[str, Mapping[str, Any]]


def draw_table(
    table: Table, scale: Scale, found: Results, place: str | Path, name: str = "figure.png"
) -> Path | None:
    """Draw the figure of a table from the runs that there are.

    Args:
        table: The table.
        scale: Size of the runs.
        found: Results by name of the run.
        place: Directory of the figure.
        name: Name of the figure.

    Returns:
        Path of the figure; None if the table has none, or no run.
    """
    cells = [cell for cell in table.cells(scale) if cell.name in found]
    directory = RunDirectory(place)
    if table.curve is not None:
        return _draw_curves(table.curve, cells, found, directory, name)
    if table.picture is not None:
        return _draw_pictures(table.picture, cells, found, directory, name)
    return None


def _draw_curves(
    curve: Curve, cells: Sequence[Cell], found: Results, place: RunDirectory, name: str
) -> Path | None:
    """Draw lines, with axes for every part."""
    parts: dict[str, list[Cell]] = {}
    for cell in cells:
        parts.setdefault(cell.part, []).append(cell)

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(parts), squeeze=False, sharey=True)[0]
        for ax, (part, own) in zip(axes, parts.items(), strict=True):
            _draw_lines(curve, own, found, ax)
            ax.set_title(part)
            ax.label_outer()

    return place.figure(name, (1 + 4 * len(parts), 3.8), draw) if parts else None


def _draw_lines(curve: Curve, cells: Sequence[Cell], found: Results, ax: Any) -> None:
    """Draw a line for every row of a part."""
    values: dict[str, dict[float, list[float]]] = {}
    for cell in cells:
        line = values.setdefault(cell.row, {})
        line.setdefault(float(cell.column), []).append(curve.value(found[cell.name]))
    plots.against(values, ax, x=curve.x, y=curve.y, log_y=curve.log_y)


def _draw_pictures(
    picture: Picture, cells: Sequence[Cell], found: Results, place: RunDirectory, name: str
) -> Path | None:
    """Draw a picture of every run, those of a row of the table below each other."""
    shown = [cell for cell in cells if not picture.rows or cell.row in picture.rows]
    rows = list(dict.fromkeys((cell.part, cell.column) for cell in shown))
    columns = list(dict.fromkeys(cell.row for cell in shown))

    def draw(figure: Figure) -> None:
        axes = figure.subplots(len(rows), len(columns), squeeze=False)
        for ax in axes.flat:
            ax.set_axis_off()
        for cell in shown:
            ax = axes[rows.index((cell.part, cell.column)), columns.index(cell.row)]
            ax.set_axis_on()
            picture.draw(found[cell.name], ax)
            column = ", ".join(filter(None, (cell.part, cell.column)))
            ax.set_title(f"{column}\n{cell.row}", fontsize="small")

    width, height = picture.size
    size = (width * len(columns), height * len(rows))
    return place.figure(name, size, draw) if shown else None
