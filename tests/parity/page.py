"""Write docs/compatibility.md from the results of the matrix.

    python -m tests.parity.page

runs every cell, slow ones too, and fails without writing if one is not as it should be.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parity.case import NAMES
from tests.parity.ddp_suite import COVERED, LEFT_OUT
from tests.parity.feature import Cell, Feature, load

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
WORDS = {"yes": "yes", "refused": "refused", "not applicable": "n/a"}
HEAD = """# What works with which algorithm

Written by `python -m tests.parity.page` from the results of `tests/parity`; change the tests, not this page. Each cell
was run on two ranks with real process groups (gloo, CPU). "yes": it works as the row says. "refused": a clear error,
quoted below the table, at `bagua.distribute` or where the feature is used. "n/a": the question does not arise. Numbers
lead to the notes below each table.

Not in the tables, since no algorithm matters: GPU behaviour is tested by `tests/engine/test_gpu.py` where there is one
(`torch.nn.SyncBatchNorm`, fused optimizers with a scaler, the refusal of CUDA graphs).
"""
SUITE = """## Behaviours of torch's own DDP tests

Which behaviours that torch tests for `DistributedDataParallel` are tested here, and by what. Torch's tests are in
`torch/testing/_internal/distributed/distributed_test.py` and, where it says c10d, `test/distributed/test_c10d_*.py`. A
bare name of ours is a row above (its function in `tests/parity`).
"""


class Collector:
    """A plugin of pytest that keeps what each cell came to."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str], Cell] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Of a test that passed."""
        if report.when == "call" and report.passed:
            for name, value in report.user_properties:
                if name == "cell":
                    feature, algorithm, *cell = value
                    self.cells[feature, algorithm] = Cell(*cell)


def render(cells: dict[tuple[str, str], Cell]) -> str:
    """The whole page."""
    features = load()
    parts = [HEAD]
    for section in dict.fromkeys(feature.section for feature in features.values()):
        rows = [feature for feature in features.values() if feature.section == section]
        parts.append(_table(section, rows, cells))
    parts.append(_suite())
    return "\n".join(parts)


def _table(section: str, rows: list[Feature], cells: dict[tuple[str, str], Cell]) -> str:
    notes: list[str] = []
    lines = [f"## {section}", "", "| | " + " | ".join(f"`{name}`" for name in NAMES) + " |"]
    lines.append("|---" * (len(NAMES) + 1) + "|")
    for row in rows:
        words = []
        for algorithm in NAMES:
            cell = cells[row.name, algorithm]
            word = WORDS[cell.kind]
            if cell.remark:
                note = _note(algorithm, cell.remark)
                if note not in notes:
                    notes.append(note)
                word += f" ({notes.index(note) + 1})"
            words.append(word)
        lines.append(f"| {row.title} | " + " | ".join(words) + " |")
    lines += [""] + [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([*lines, ""] if notes else lines)


def _note(algorithm: str, remark: str) -> str:
    """The remark, such that algorithms of one family share it."""
    for word in ("QAdam", "OneBitLamb", "ZeroOneAdam"):
        remark = remark.replace(f"{word}, {word}", "two of them").replace(word, "*optimizer*")
    return remark.replace(f"'{algorithm}'", "*the algorithm*").replace("\n", " ")


def _suite() -> str:
    lines = [SUITE, "| behaviour | torch's tests | tests here |", "|---|---|---|"]
    for covered in COVERED:
        theirs = ", ".join(f"`{name}`" if name.startswith("test_") else name for name in covered.torch_tests)
        ours = ", ".join(f"`{name}`" for name in covered.ours)
        lines.append(f"| {covered.behaviour} | {theirs} | {ours} |")
    lines += ["", "Left out:", "", "| behaviour | torch's tests | why |", "|---|---|---|"]
    lines += [f"| {what} | `{name}` | {why} |" for what, name, why in LEFT_OUT]
    return "\n".join([*lines, ""])


def main(argv: list[str] | None = None) -> int:
    """Run, and write or check; returns an exit code."""
    parser = argparse.ArgumentParser(description="The page on what works with which algorithm.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not up to date")
    check = parser.parse_args(argv).check
    collector = Collector()
    tests = str(Path(__file__).with_name("test_parity.py"))
    # An empty expression selects slow cells too.
    code = pytest.main(["-q", "-m", "", "-p", "no:cacheprovider", "--timeout=600", tests], plugins=[collector])
    if code:
        return int(code)
    text = render(collector.cells)
    if check:
        current = PAGE.read_text() == text
        state = "up to date" if current else "not up to date; write it with: python -m tests.parity.page"
        print(f"{PAGE.relative_to(ROOT)}: {state}")
        return int(not current)
    PAGE.write_text(text)
    print(f"wrote {PAGE.relative_to(ROOT)}: {len(collector.cells)} cells")
    return 0


if __name__ == "__main__":
    sys.exit(main())
