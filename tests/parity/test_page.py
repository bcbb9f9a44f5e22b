"""docs/compatibility.md says what the matrix says, and the tests that it names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from tests.parity.case import NAMES
from tests.parity.ddp_suite import COVERED, LEFT_OUT
from tests.parity.feature import load
from tests.parity.page import PAGE, ROOT, WORDS

FEATURES = load()
TORCH_BEFORE_213 = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)
TORCH = Path(torch.__file__).parent / "testing/_internal/distributed/distributed_test.py"


def rows() -> dict[str, list[str]]:
    """Cells of each row of the page, by its title."""
    found = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| "):
            title, *cells = [cell.strip() for cell in line.strip("|\n").split(" | ")]
            found[title] = cells
    return found


def columns() -> list[list[str]]:
    """The algorithms at the head of each table."""
    heads = [line for line in PAGE.read_text().splitlines() if line.startswith("| | `")]
    return [re.findall("`([a-z0-9_]+)`", head) for head in heads]


COLUMNS = columns()[0]


def test_the_tables_have_the_same_columns() -> None:
    assert len(columns()) == len({feature.section for feature in FEATURES.values()})
    assert all(found == COLUMNS for found in columns()) and set(COLUMNS) <= set(NAMES)


@pytest.mark.slow  # the page is made by running the matrix: a check of `make docs-check`
def test_every_algorithm_has_its_column() -> None:
    assert COLUMNS == NAMES, "run `python -m tests.parity.page`"


@pytest.mark.parametrize("name", FEATURES)
def test_rows_are_what_the_matrix_asserts(name: str) -> None:
    feature, cells = FEATURES[name], rows()
    assert feature.title in cells, "run `python -m tests.parity.page`"
    for algorithm, cell in zip(COLUMNS, cells[feature.title], strict=True):
        refused, other = algorithm in feature.refused, algorithm in feature.not_applicable
        kind = "refused" if refused else "not applicable" if other else "yes"
        assert cell.split(" (")[0] == WORDS[kind], f"{algorithm}: run `python -m tests.parity.page`"


def test_no_row_of_the_page_is_stale() -> None:
    known = {feature.title for feature in FEATURES.values()} | {covered.behaviour for covered in COVERED}
    known |= {what for what, *_ in LEFT_OUT} | {"behaviour", ""}
    assert not set(rows()) - known, "run `python -m tests.parity.page`"


@pytest.mark.skipif(TORCH_BEFORE_213, reason="the page is about the tests of torch 2.13")
@pytest.mark.parametrize("covered", COVERED, ids=lambda covered: covered.behaviour[:40])
def test_named_tests_exist(covered: object) -> None:
    text = TORCH.read_text()
    for name in covered.torch_tests:  # pyright: ignore
        assert name.startswith("c10d:") or f"def {name}(" in text, f"torch has no {name}"
    for name in covered.ours:  # pyright: ignore
        file, _, function = name.partition("::")
        if not function:
            assert name in FEATURES, name
            continue
        tree = ast.parse((ROOT / file).read_text())
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, name
