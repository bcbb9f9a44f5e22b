"""The count of code lines."""

from __future__ import annotations

from pathlib import Path

import pytest

import bagua
from benchmarks.loc import code_lines, count_algorithms, main

SOURCE = '''"""Of the module,
two lines."""

import os  # a comment


# a comment alone
class A:
    """One line."""

    text = """a string
    that is code"""

    def method(self) -> int:
        """Several

        lines.
        """
        return (
            1
            + 2
        )
'''


def test_what_counts() -> None:
    assert code_lines(SOURCE) == 1 + 1 + 2 + 1 + 4
    assert code_lines("") == 0
    assert code_lines("'text'\nx = 'text'\n'no docstring'\n") == 2


def test_each_algorithm_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    printed = capsys.readouterr().out
    for row in bagua.algorithms.available(builtin_only=True):
        assert any(row.name in line.split() for line in printed.replace(",", " ").splitlines()), row.name
    counts = count_algorithms()
    assert {count.file for count in counts} == {
        path.name for path in Path(bagua.algorithms.__file__).parent.glob("*.py")
    }
    assert all(0 < count.code < count.total for count in counts)
    assert printed.splitlines()[-1].split() == [
        "total",
        str(sum(count.code for count in counts)),
        str(sum(count.total for count in counts)),
    ]
