"""Figures of the tables of papers, made from the files of their runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laplace_invariance import plots
from laplace_invariance.experiments.choices import Scale
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.papers import Cell, Curve, Table

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
    parts: dict[str, list[Cell]] = {}
    for cell in cells:
        parts.setdefault(cell.part, []).append(cell)
    if not parts or (table.curve is None and table.picture is None):
        return None

    def lines(figure: Figure) -> None:
        assert table.curve is not None
        axes = figure.subplots(1, len(parts), squeeze=False, sharey=True)[0]
        for ax, (part, own) in zip(axes, parts.items(), strict=True):
            _draw_lines(table.curve, own, found, ax)
            ax.set_title(part)
            ax.label_outer()

    def pictures(figure: Figure) -> None:
        rows = list(dict.fromkeys((cell.part, cell.column) for cell in cells))
        columns = list(dict.fromkeys(cell.row for cell in cells))
        axes = figure.subplots(len(rows), len(columns), squeeze=False)
        for ax in axes.flat:
            ax.set_axis_off()
        for cell in cells:
            ax = axes[rows.index((cell.part, cell.column)), columns.index(cell.row)]
            _draw_picture(table, cell, found[cell.name], ax)

    if table.curve is not None:
        return RunDirectory(place).figure(name, (1 + 4 * len(parts), 3.8), lines)
    n_rows = len({(cell.part, cell.column) for cell in cells})
    n_columns = len({cell.row for cell in cells})
    return RunDirectory(place).figure(name, (2.6 * n_columns, 2.8 * n_rows), pictures)


def _draw_lines(curve: Curve, cells: Sequence[Cell], found: Results, ax: Any) -> None:
    """Draw a line for every row of a part."""
    values: dict[str, dict[float, list[float]]] = {}
    for cell in cells:
        line = values.setdefault(cell.row, {})
        line.setdefault(float(cell.column), []).append(curve.value(found[cell.name]))
    plots.against(values, ax, x=curve.x, y=curve.y, log_y=curve.log_y)


def _draw_picture(table: Table, cell: Cell, result: Mapping[str, Any], ax: Any) -> None:
    """Draw the picture of one run."""
    assert table.picture is not None
    plots.predictive(table.picture(result), ax).set_axis_on()
    ax.set_title(f"{cell.part}, {cell.column}\n{cell.row}", fontsize="small")
