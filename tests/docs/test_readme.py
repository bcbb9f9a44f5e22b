"""README is a first screen: its script runs, before and after the change, and what it says first is the status."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

import bagua
from tests.docs.markdown import ROOT, blocks
from tests.rank_pool import RankPool

README = ROOT / "README.md"
FROM_DDP = ROOT / "docs" / "from-ddp.md"


def side(page: Path, sign: str) -> str:
    """One side of the diff: the lines that both have, and those of that sign."""
    (block,) = [block.text for block in blocks(page) if block.language == "diff"]
    return "".join(line[1:] or "\n" for line in block.splitlines(keepends=True) if line[0] in f" \n{sign}")


def run_side(page: Path, sign: str) -> str:
    """On a rank: run one side as a script; return what it printed."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(side(page, sign), "train.py", "exec"), {"__name__": "__main__"})
    finally:
        bagua.destroy_process_group()
    return printed.getvalue()


def test_the_script_prints_a_loss_on_two_ranks(pool: RankPool) -> None:
    for printed in pool.run(2, run_side, README, "+"):
        assert float(re.fullmatch(r"loss (\d+\.\d{4})\n", printed)[1]) < 5  # pyright: ignore[reportOptionalSubscript]


@pytest.mark.parametrize("sign", ["-", "+"], ids=["before", "after"])
@pytest.mark.parametrize(
    ("page", "last"), [(README, r"loss \d+\.\d{4}\n"), (FROM_DDP, r"9 tensors\n")], ids=["README", "from-ddp"]
)
def test_both_sides_are_whole_scripts(page: Path, last: str, sign: str, pool: RankPool) -> None:
    """On a rank that has initialised nothing."""
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    (printed,) = pool.run(1, run_side, page, sign, env=env, init=False, fresh=True)
    assert re.fullmatch(last, printed)


def test_the_converted_script_runs_on_two_ranks(pool: RankPool) -> None:
    assert pool.run(2, run_side, FROM_DDP, "+") == ["9 tensors\n"] * 2


def test_it_counts_the_algorithms() -> None:
    count = len(bagua.algorithms.available(builtin_only=True))
    words = dict(enumerate(("Ten", "Eleven", "Twelve", "Thirteen", "Fourteen", "Fifteen", "Sixteen"), 10))
    assert f"[{words[count]} algorithms]" in README.read_text()


def test_the_diff_has_six_lines() -> None:
    (block,) = [block.text for block in blocks(README) if block.language == "diff"]
    assert len([line for line in block.splitlines() if line[:1] in ("+", "-")]) == 6


def test_the_first_screen_says_what_has_not_run() -> None:
    first = README.read_text().split("\n## ", 1)[0]
    assert "alpha" in first and "speed-ups on several GPUs were not measured" in first
    assert len(README.read_text().splitlines()) <= 112
