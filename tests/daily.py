"""Large matrices of cases: a part of them every day, all of them with the slow tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["one_in"]


def one_in(every: int, *axes: Iterable[Any]) -> list[Any]:
    """All combinations of `axes` for `pytest.mark.parametrize`; those whose positions sum to a multiple run every day.

    So each value of an axis runs with a part of those of the others. Values may be `pytest.param`, with marks.

    Examples:
        >>> [case.values for case in one_in(2, "ab", (1, 2)) if not case.marks]
        [('a', 1), ('b', 2)]
    """
    found, kind = list[Any](), type(pytest.param())
    for places in itertools.product(*(list(enumerate(axis)) for axis in axes)):
        marks = [pytest.mark.slow] if sum(place for place, _ in places) % every else []
        values = list[Any]()
        for _, value in places:
            values += value.values if isinstance(value, kind) else (value,)
            marks += value.marks if isinstance(value, kind) else ()
        found.append(pytest.param(*values, marks=marks))
    return found
