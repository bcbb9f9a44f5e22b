"""Parts of documents that are made from results: the lines between two marks."""

from __future__ import annotations

__all__ = ["between"]


def between(text: str, name: str, part: str) -> str:
    """Return `text` with what is between the marks of that name renewed.

    Raises:
        ValueError: a mark is missing, or there twice.
    """
    begin, end = f"<!-- {name}: python -m benchmarks.figures -->", f"<!-- end of {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"expected one {begin} and one {end}")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{part}{end}{rest.split(end)[1]}"
