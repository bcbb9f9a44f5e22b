"""Resuming is not stopping: the same bits, for every algorithm and every way of saving."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import bagua
from tests.checkpoint.runs import WAYS, cases, resume, through_directory
from tests.rank_pool import RankPool

# Those whose state shows in the weights of these few steps, so that a resume without it would be noticed.
REMEMBER = {
    "low_precision_decentralized", "diloco", "power_sgd", "feedback", "feedback_sum", "qadam_sign", "power_sgd_1",
    "one_bit_lamb", "zero_one_adam", "overlap", "delayed", "delayed_pending", "fragments_16_bit", "local_sgd",
    "warmup_after", "warmup_before", "warmup_weights", "gossip", "async_warming_up", "sparse_loco",
}  # fmt: skip


def check(pool: RankPool, name: str, path: Path, ways: Sequence[int]) -> None:
    for rank, (different, matters) in enumerate(pool.run(2, resume, name, str(path), ways)):
        assert not different, f"rank {rank}: another training after {', '.join(different)}"
        assert matters == (name in REMEMBER), f"rank {rank}"


@pytest.mark.parametrize("name", [row.name for row in bagua.algorithms.available(builtin_only=True)])
def test_resuming_is_bit_identical(name: str, pool: RankPool, tmp_path: Path) -> None:
    check(pool, name, tmp_path, [WAYS.index(through_directory)])


@pytest.mark.parametrize("name", ["overlap", "delayed"])
def test_resuming_is_bit_identical_in_every_way(name: str, pool: RankPool, tmp_path: Path) -> None:
    check(pool, name, tmp_path, range(len(WAYS)))


@pytest.mark.slow
@pytest.mark.parametrize("name", cases())
def test_resuming_any_algorithm_in_any_way(name: str, pool: RankPool, tmp_path: Path) -> None:
    check(pool, name, tmp_path, range(len(WAYS)))
