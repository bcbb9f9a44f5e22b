"""The script with experts runs on ranks with what it offers, and compares."""

from __future__ import annotations

import re

import pytest

from tests.examples.scripts import load_script, needs
from tests.rank_pool import RankPool

pytestmark = needs("sklearn")

SMALLEST = ["--epochs", "1", "--batch-size", "128", "--device", "cpu"]


def run_script(words: list[str]) -> None:
    load_script("moe").main(words)


@pytest.mark.parametrize("words", [[], ["--k", "2", "--codec", "minmax_uint8", "--algorithm", "qadam"]])
def test_two_ranks(pool: RankPool, words: list[str]) -> None:
    pool.run(2, run_script, [*SMALLEST, *words])


def test_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("moe")
    script.main([*SMALLEST, "--experts", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"epoch 1/1  loss [\d.]+  test [\d.]+%  dropped [\d.]+%  busiest expert [\d.]+ .*", lines[0])
    assert lines[1].startswith("3 experts on 1 rank:")
    script.main([*SMALLEST, "--compare", "--seeds", "1"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["experts", "dense"]
