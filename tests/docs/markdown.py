"""The little of Markdown that the tests of the documents need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    """A fenced block of code."""

    language: str
    line: int  # of its first line of code
    text: str


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a document."""
    text = path.read_text()
    return [
        Block(match[1], text[: match.start(2)].count("\n") + 1, match[2])
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def prose(path: Path) -> str:
    """Return a document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(path: Path) -> list[str]:
    """Return the targets of the links of a document."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(path))


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document: those of its headings, and those that it sets itself."""
    text = prose(path)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    own = set(re.findall(r'<a id="([\w-]+)"></a>', text))
    return own | {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def table_after(path: Path, heading: str) -> list[list[str]]:
    """Return the cells of the first table below `heading`, without its head."""
    text = path.read_text().split(f"\n{heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None, f"{path.name} has no table after {heading!r}"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()]
    return rows[2:]
