"""Rows of cells as aligned text for a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Columns", "markdown_row", "markdown_table"]


class Columns:
    """Columns of a table that is printed row by row.

    Args:
        columns: heading and width of each. A negative width aligns to the left; a width of 0 is that of the cell, for
            remarks at the end. Cells that are too wide push the rest of their row to the right.
    """

    def __init__(self, *columns: tuple[str, int]) -> None:
        self._heads = [head for head, _ in columns]
        self._widths = [width for _, width in columns]

    def head(self) -> str:
        """The line of the headings."""
        return self.row(self._heads)

    def row(self, cells: Sequence[str]) -> str:
        """One line.

        Args:
            cells: of the first columns; the others are empty.
        """
        words = [
            cell.ljust(-width) if width < 0 else cell.rjust(width)
            for cell, width in zip(cells, self._widths, strict=False)
        ]
        return "".join(words).rstrip()

    def table(self, rows: Sequence[Sequence[str]]) -> str:
        """Headings and rows."""
        return "\n".join([self.head(), *(self.row(cells) for cells in rows)])


def markdown_row(cells: Sequence[str]) -> str:
    """One row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A Markdown table.

    Args:
        head, rows: cells.
        right: columns to be aligned to the right, from 0.
    """
    rule = "| " + " | ".join("---:" if index in right else "---" for index in range(len(head))) + " |"
    return "\n".join([markdown_row(head), rule, *(markdown_row(row) for row in rows)])
