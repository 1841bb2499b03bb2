"""Plain-text tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["labelled", "table"]


def table(rows: Sequence[Sequence[str]], right: Collection[int] = (), gap: int = 2) -> str:
    """Align the columns of a table.

    Args:
        rows: Cells, as many in every row; the first row is usually the header.
        right: Indices of columns that are aligned to the right, such as those of numbers.
        gap: Number of spaces between two columns.

    Returns:
        One line per row, without trailing spaces or a final newline.
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]

    def aligned(index: int, cell: str) -> str:
        if index in right:
            return cell.rjust(widths[index])
        return cell.ljust(widths[index])

    separator = " " * gap
    lines = [separator.join(aligned(*entry) for entry in enumerate(row)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def labelled(label: str, text: str) -> str:
    """Return one line of a summary: a label, padded to 15 characters, and a text.

    Args:
        label: What the text is about.
        text: One line.
    """
    return f"{label:<15} {text}"
