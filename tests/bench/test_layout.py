"""Rows as text and as Markdown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagua.bench import results_file
from bagua.bench.layout import Columns, markdown_table


def test_columns() -> None:
    columns = Columns(("name", -8), ("ms", 6), ("", 2), ("", 0))
    assert columns.table([["a", "1.5", "", "a long remark"], ["b", "10.0"]]).splitlines() == [
        "name        ms",
        "a          1.5  a long remark",
        "b         10.0",
    ]


def test_markdown() -> None:
    assert markdown_table(("a", "b"), [["x|y", "1"]], right=[1]).splitlines() == [
        "| a | b |",
        "| --- | ---: |",
        "| x\\|y | 1 |",
    ]


def test_a_results_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "out.json"
    for content in ({"runs": [1]}, "a word", None):
        results_file.write(path, content)
        assert json.loads(path.read_text()) == content
    with pytest.raises(TypeError):
        results_file.write(path, {"rows": object()})
    assert json.loads(path.read_text()) is None
    assert [each.name for each in path.parent.iterdir()] == ["out.json"]
