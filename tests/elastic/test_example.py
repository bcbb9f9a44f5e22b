"""`examples/elastic_digits.py` in one process: every image once in an epoch, and on from the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.elastic.judge import Run, journals, judge
from tests.examples.scripts import start

pytestmark = pytest.mark.process


@pytest.mark.slow
def test_every_image_of_an_epoch_once(tmp_path: Path) -> None:
    ended = start("examples/elastic_digits.py", "--epochs", "1", "--journal", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "1 ranks begin at the beginning: there is no commit yet" in ended.stdout
    result = Run("none", 0, 1)
    judge(result, journals(tmp_path), 1)
    assert result.problems == [] and result.repeated == 0


@pytest.mark.slow
def test_it_goes_on_from_the_disk(tmp_path: Path) -> None:
    for epochs in (1, 2):
        words = ("--epochs", str(epochs), "--journal", tmp_path / "journal", "--directory", tmp_path / "commits")
        ended = start("examples/elastic_digits.py", *words, "--disk-every", "1")
        assert ended.returncode == 0, ended.stderr
    assert "1 ranks go on at step 30: commit 4 of 1 ranks, found in disk" in ended.stdout
    result = Run("none", 0, 1)
    found = journals(tmp_path / "journal")
    for each in found:  # one that runs alone has no address to be told from others by
        each[0]["meeting"] = str(each[0]["began"])
    judge(result, found, 2)
    assert result.problems == [] and result.repeated == 0
