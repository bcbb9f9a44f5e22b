"""The training script runs alone, on ranks and under the launcher, and learns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import bagua
from tests.daily import one_in
from tests.examples.scripts import load_digits, load_script, needs, start
from tests.rank_pool import RankPool

pytestmark = needs("sklearn")

SCRIPT = "examples/digits.py"
SMALLEST = ["--epochs", "1", "--batch-size", "128", "--device", "cpu"]


def run_script(words: list[str]) -> dict[str, float]:
    """On a rank: run the script; return a checksum of the weights."""
    digits = load_digits()
    kept: list[Any] = []
    make = digits.DigitsNet

    def keeping() -> Any:
        kept.append(make())
        return kept[0]

    # Only for this call: what the module keeps would keep the model and its engine for every later job of the process.
    with mock.patch.object(digits, "DigitsNet", keeping):
        digits.main(words)
    return {name: value.double().sum().item() for name, value in kept[0].state_dict().items()}


@pytest.mark.parametrize("algorithm", one_in(2, [row.name for row in bagua.algorithms.available(builtin_only=True)]))
def test_two_ranks(pool: RankPool, tmp_path: Path, algorithm: str) -> None:
    file = tmp_path / "result.json"
    words = [*SMALLEST, "--algorithm", algorithm, "--bucket-bytes", "100000", "--json", str(file)]
    weights = pool.run(2, run_script, words)
    assert weights[0] == weights[1]
    result = json.loads(file.read_text())
    assert result["ranks"] == 2
    assert result["algorithm"] == algorithm
    assert result["steps"] == 1437 // 2 // 128
    if load_digits().make_options(algorithm) or algorithm in ("diloco", "local_sgd", "sparse_loco"):
        return  # what is sent in five steps says nothing of an interval
    if algorithm in ("gradient_allreduce", "bytegrad"):
        row = next(row for row in bagua.algorithms.available(builtin_only=True) if row.name == algorithm)
        assert result["compression_ratio"] == pytest.approx(6.0 / row.bytes_per_step, rel=0.05)
    assert result["mb_sent_per_step"] > 0


@pytest.mark.slow
def test_learns_and_repeats(pool: RankPool, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ["--epochs", "4", "--device", "cpu", "--algorithm", "bytegrad", "--json", str(file)]
    first = pool.run(2, run_script, words)
    accuracy = json.loads(file.read_text())["test_accuracy"]
    assert accuracy > 0.9
    assert pool.run(2, run_script, words) == first


def test_alone(pool: RankPool, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    pool.run(1, run_script, [*SMALLEST, "--json", str(file)], init=False)
    result = json.loads(file.read_text())
    assert result["ranks"] == 1
    assert result["steps"] == 1437 // 128
    assert result["mb_sent_per_step"] == 0


@pytest.mark.slow
def test_under_the_launcher() -> None:
    launch = [
        "-m",
        "bagua.distributed.run",
        "--nproc-per-node",
        "2",
        SCRIPT,
        *SMALLEST,
        "--algorithm",
        "bytegrad",
    ]
    done = start(*launch)
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks:" in done.stdout
    assert done.stdout.count("epoch 1/1") == 1  # one rank prints


def test_without_scikit_learn_one_line_names_the_command(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError('no module', name='sklearn')\n")
    words = ["import sys; sys.argv[:] = sys.argv[1:]; sys.path.insert(0, sys.argv.pop()); import runpy"]
    words[0] += "; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = start("-c", words[0], SCRIPT, tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["digits: sklearn is not installed: pip install '.[demo]'"]


def test_an_unknown_algorithm_is_refused_with_the_names_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_digits().build_parser().parse_args(["--algorithm", "bytegard"])
    message = capsys.readouterr().err
    assert all(row.name in message for row in bagua.algorithms.available(builtin_only=True))


@pytest.mark.parametrize(
    "script", ["digits", "demo", "char_lm", "cached_digits", "balanced_lm", "image_classification"]
)
def test_sizes_that_are_no_sizes_are_refused_by_name(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_script(script).build_parser().parse_args(["--epochs" if script != "char_lm" else "--steps", "0"])
    assert re.search(r"argument --(epochs|steps): expected at least 1, not 0", capsys.readouterr().err)


def test_two_ranks_choose_and_explain(pool: RankPool, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ["--epochs", "2", "--batch-size", "64", "--device", "cpu", "--algorithm", "auto", "--json", str(file)]
    weights = pool.run(2, run_script, words)
    assert weights[0] == weights[1]
    asked, _, trained = json.loads(file.read_text())["options"].partition(": ")
    assert asked == "Auto(allow='lossy', max_loss_gap=None, adapt=True)"
    assert "Auto" not in trained and trained.endswith(")")
