"""Whether a saved state is of an algorithm: options that change no number do not count."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from bagua.algorithms.base import Algorithm

__all__ = ["same_state"]


def same_state(saved: object, algorithm: Algorithm) -> bool:
    """Whether a state saved with the algorithm `saved`, its repr, is one of `algorithm`.

    Options in `Algorithm.not_compared` may differ, also in algorithms that are options of another.
    """
    now = repr(algorithm)
    if saved == now or not isinstance(saved, str):
        return saved == now
    ignored = dict(_not_compared(algorithm))
    if not ignored:
        return False
    before = _reduced(saved, ignored)
    return before is not None and before == _reduced(now, ignored)


def _not_compared(value: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names of such options by the class as `repr` writes it, of `value` and of the algorithms in its options."""
    if isinstance(value, Algorithm) and is_dataclass(value):
        if value.not_compared:
            yield _parsable(type(value).__qualname__), value.not_compared
        for each in fields(value):
            yield from _not_compared(getattr(value, each.name))


def _reduced(text: str, ignored: Mapping[str, tuple[str, ...]]) -> str | None:
    """The text without these options, in a form for comparison; None if it is no expression."""
    try:
        tree = ast.parse(_parsable(text), mode="eval")
        return ast.dump(_Without(ignored).visit(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _parsable(name: str) -> str:
    return name.replace("<locals>", "_locals")  # of a class within a function


class _Without(ast.NodeTransformer):
    def __init__(self, ignored: Mapping[str, tuple[str, ...]]) -> None:
        self._ignored = ignored

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        names = self._ignored.get(ast.unparse(node.func), ())
        node.keywords = [each for each in node.keywords if each.arg not in names]
        return node
