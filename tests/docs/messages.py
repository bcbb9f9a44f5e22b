"""Error messages: those that the documents promise, and those that the source can give."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from tests.docs.markdown import ROOT, prose

__all__ = ["OF_OTHERS", "Piece", "documented", "is_in_the_source", "pieces", "templates"]

_FEWEST, _SHARE = 8, 0.6  # letters that must be found as they are
HOLE = "\0"  # stands for what an f-string puts in
# ssh's and the operating system's own words, and a label that is put together from several strings.
OF_OTHERS = (
    "all_reduce step 12 bucket 3",
    "Permission denied (publickey)",
    "Host key verification failed",
    "Connection refused",
    "Could not resolve hostname",
    "No such file or directory",
)
PACKAGES = ("bagua", "lightning_bagua")


@cache
def templates() -> tuple[str, ...]:
    """Every string of the source that is no docstring; what is put in at run time is a hole."""
    found: set[str] = set()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            skipped = {id(each) for node in ast.walk(tree) for each in _docstring(node)}
            found |= {_text(node) for node in ast.walk(tree) if id(node) not in skipped and _text(node)}
    return tuple(sorted(found))


def _docstring(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr):
            yield first.value


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return left + (right or HOLE) if left else ""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""


def documented(path: Path) -> list[str]:
    """The messages of a document: first cells of tables headed "message", paragraphs' first code in errors.md."""
    text = prose(path)
    found: list[str] = []
    for head in re.finditer(r"^\| message \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", text, re.MULTILINE):
        cells = [line.split(" | ", 1)[0].removeprefix("| ") for line in head[1].splitlines()]
        found += [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    if path.name == "errors.md":
        starts = re.findall(r"(?:^|\n\n)(?:- )?`([^`]{20,})`", text)
        found += [" ".join(code.split()) for code in starts if " " in code]
    return found


class Piece(NamedTuple):
    """A part of a documented message between ellipses, commas and semicolons: words, and None for what is a value.

    A number, a quotation, something in brackets and a name with capitals, dots or underscores are values, which stand
    for anything.
    """

    words: tuple[str | None, ...]

    def patterns(self) -> Iterator[str]:
        """With all words as they are, and with one or two of them put in at run time, where enough letters are left."""
        literal = [place for place, word in enumerate(self.words) if word is not None]
        letters = sum(len(word) for word in self.words if word is not None)
        for count in range(3):
            for holes in combinations(literal, count):
                left = letters - sum(len(self.words[place] or "") for place in holes)
                if left >= max(_FEWEST, _SHARE * letters):
                    yield "".join(self._part(place, place in holes) for place in range(len(self.words)))

    def _part(self, place: int, hole: bool) -> str:
        word = self.words[place]
        if word is None:
            return r"[\s\S]{0,80}?"
        return rf"\W*?{HOLE}" if hole else rf"\W*?(?<!\w){re.escape(word)}(?!\w)"


def pieces(message: str) -> list[Piece]:
    """What to look for; parts with few letters of their own are left out."""
    for words in OF_OTHERS:
        message = message.replace(words, "...")
    found = []
    for part in re.split(r"\.\.\.|; |, |\): |(?= differs: )", message):
        bare = ["[]" if word.startswith("[") else word.strip(".,:;()=") for word in part.split()]
        piece = Piece(tuple(word if re.fullmatch(r"[a-z][a-z'-]*", word) else None for word in bare if word))
        if sum(len(word) for word in piece.words if word is not None) >= _FEWEST:
            found.append(piece)
    return found


def is_in_the_source(piece: Piece) -> bool:
    """Whether a string of the source holds it."""
    words = {word for word in piece.words if word is not None}
    enough = _SHARE * sum(map(len, words))
    near = [text for text, known in _words().items() if sum(map(len, words & known)) >= enough]
    return any(re.search(pattern, text) for pattern in piece.patterns() for text in near)


@cache
def _words() -> dict[str, frozenset[str]]:
    return {text: frozenset(re.findall(r"[a-z][a-z'-]*", text)) for text in templates()}
