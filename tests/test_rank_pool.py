"""The ranks of the tests."""

from __future__ import annotations

import os

import torch.distributed as dist

from tests.rank_pool import RankPool


def name_and_end(last: int) -> tuple[int, int]:
    if dist.get_rank() == last:
        os._exit(9)
    return os.getpid(), hash("a name")


def test_ranks_that_vanish_are_replaced_and_order_sets_differently(pool: RankPool) -> None:
    before, gone = pool.run(2, name_and_end, 1, dies=[1])
    assert gone is None
    (pid, one), (_, other) = pool.run(2, name_and_end, 2)
    assert pid != before[0], "of a broken job no process is kept"
    assert one != other
