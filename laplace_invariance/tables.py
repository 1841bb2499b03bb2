"""Plain-text tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["table"]


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Align the columns of a table, two spaces apart.

    Args:
        rows: Cells, as many in every row; the first row is usually the header.
        right: Indices of columns that are aligned to the right, such as those of numbers.

    Returns:
        One line per row, without trailing spaces or a final newline.
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]

    def aligned(index: int, cell: str) -> str:
        if index in right:
            return cell.rjust(widths[index])
        return cell.ljust(widths[index])

    lines = ["  ".join(aligned(*entry) for entry in enumerate(row)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
