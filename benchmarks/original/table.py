"""Results as the table of a page."""

from __future__ import annotations

from typing import Any

__all__ = ["table"]


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows of Markdown: an example, its flags, and what came of it."""
    lines = ["| example | flags | result |", "|---|---|---|"]
    for row in rows:
        result = "ran" if row["result"] == "ran" else f"failed: `{row['error']}`"
        flags = f"`{row['flags']}`" if row["flags"] else ""
        lines.append(f"| {row['example']} | {flags} | {result} |")
    return "\n".join(lines)
