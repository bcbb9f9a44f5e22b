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
TORCH = Path(torch.__file__).parent / "testing/_internal/distributed/distributed_test.py"


def rows() -> dict[str, list[str]]:
    """Cells of each row of the page, by its title."""
    found = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| "):
            title, *cells = [cell.strip() for cell in line.strip("|\n").split(" | ")]
            found[title] = cells
    return found


def test_every_algorithm_has_its_column() -> None:
    heads = [line for line in PAGE.read_text().splitlines() if line.startswith("| | `")]
    assert len(heads) == len({feature.section for feature in FEATURES.values()})
    assert all(re.findall("`([a-z0-9_]+)`", head) == NAMES for head in heads), "run `make docs`"


@pytest.mark.parametrize("name", FEATURES)
def test_rows_are_what_the_matrix_asserts(name: str) -> None:
    feature, cells = FEATURES[name], rows()
    assert feature.title in cells, "run `make docs`"
    for algorithm, cell in zip(NAMES, cells[feature.title], strict=True):
        refused, other = algorithm in feature.refused, algorithm in feature.not_applicable
        kind = "refused" if refused else "not applicable" if other else "yes"
        assert cell.split(" (")[0] == WORDS[kind], f"{algorithm}: run `make docs`"


def test_no_row_of_the_page_is_stale() -> None:
    known = {feature.title for feature in FEATURES.values()} | {covered.behaviour for covered in COVERED}
    known |= {what for what, *_ in LEFT_OUT} | {"behaviour", ""}
    assert not set(rows()) - known, "run `make docs`"


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
