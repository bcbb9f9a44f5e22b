"""The example trains, and the benchmark counts right."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from pathlib import Path

import pytest
import torch

from benchmarks.balance.contenders import batch_size
from benchmarks.balance.lengths import LENGTHS
from benchmarks.balance.measure import compare
from tests.rank_pool import RankPool

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "balanced_lm.py"


def run_script(words: list[str]) -> str:
    """On a rank; returns what it printed."""
    spec = importlib.util.spec_from_file_location("balanced_lm", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        module.main(words)
    return printed.getvalue()


@pytest.mark.parametrize("kind", ["balanced", "plain"])
def test_example(pool: RankPool, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "result.json"
    words = ["--sampler", kind, "--epochs", "1", "--steps", "2", "--max-tokens", "1200", "--json", str(file)]
    printed, _ = pool.run(2, run_script, words)
    assert "epoch 1/1  2 steps  loss" in printed
    result = json.loads(file.read_text())
    assert result["ranks"] == 2 and result["steps"] == 2 and result["tokens_per_s"] > 0
    if kind == "balanced":
        assert result["padded_over_real"] < 1.5 and result["max_over_mean"] < 1.2


def test_costs_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, two steps: padded 8 and 3, then 2 and 4; real 5 and 3, then 2 and 4."""
    by_rank = [[[0, 1], [3]], [[2], [4]]]
    monkeypatch.setitem(compare.__globals__["CONTENDERS"], "given", lambda *_: by_rank)
    found = compare("given", torch.tensor([4.0, 1.0, 3.0, 2.0, 4.0]), 8, 2)
    assert not isinstance(found, str)
    assert found["padded_max_over_mean"] == pytest.approx((8 / 5.5 + 4 / 3) / 2, abs=1e-4)
    assert found["real_max_over_mean"] == pytest.approx((5 / 4 + 4 / 3) / 2, abs=1e-4)
    assert found["padding_over_real"] == pytest.approx(17 / 14 - 1, abs=1e-4)
    assert found["missing"] == found["repeated"] == 0


@pytest.mark.parametrize("name", LENGTHS)
def test_targets(name: str) -> None:
    """At most 1.02 in both counts of cost, and a third of the padding of batches drawn at random."""
    lengths = LENGTHS[name](60_000)
    ours, plain = (
        compare(contender, lengths, 16_000, 8)
        for contender in ("bagua TokenBudgetBatchSampler", "torch DistributedSampler")
    )
    assert not isinstance(ours, str) and not isinstance(plain, str)
    assert max(ours["padded_max_over_mean"], ours["real_max_over_mean"]) <= 1.02
    assert plain["padding_over_real"] > 3 * ours["padding_over_real"]
    assert abs(ours["steps"] - plain["steps"]) <= 2
    assert batch_size(lengths, 16_000, 8) >= 1
