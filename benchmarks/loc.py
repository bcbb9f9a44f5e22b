"""How long an algorithm is: code lines of each file, without blank lines, comments and docstrings.

python -m benchmarks.loc
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import bagua
from bagua import algorithms
from bagua.bench.layout import Columns

__all__ = ["Count", "code_lines", "count_algorithms", "main"]

_SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Count(NamedTuple):
    """Lines of one file.

    Attributes:
        file: its name.
        names: the algorithms registered in it.
        code: lines that hold code.
        total: all lines.
    """

    file: str
    names: tuple[str, ...]
    code: int
    total: int


def code_lines(source: str) -> int:
    """Return the number of lines of `source` that hold more than white space, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            text = node.body[0]
            lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(lines)


def count_algorithms() -> list[Count]:
    """Return a count for each file of `bagua/algorithms`, those with a registered algorithm first."""
    by_file: dict[str, list[str]] = {}
    for row in bagua.algorithms.available(builtin_only=True):
        module = type(algorithms.get(row.name)).__module__
        by_file.setdefault(module.rsplit(".", 1)[-1], []).append(row.name)
    found: list[Count] = []
    for path in sorted(Path(algorithms.__file__).parent.glob("*.py")):
        source = path.read_text()
        found.append(Count(path.name, tuple(by_file.get(path.stem, ())), code_lines(source), len(source.splitlines())))
    return sorted(found, key=lambda count: (not count.names, count.code))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.loc", description="Lines of code of each algorithm, without blanks and comments."
    ).parse_args(argv)
    counts = count_algorithms()
    rows = [[c.file, ", ".join(c.names), str(c.code), str(c.total)] for c in counts]
    rows.append(["total", "", str(sum(c.code for c in counts)), str(sum(c.total for c in counts))])
    print(Columns(("file", -34), ("algorithm", -30), ("code", 6), ("lines", 7)).table(rows))


if __name__ == "__main__":
    main()
