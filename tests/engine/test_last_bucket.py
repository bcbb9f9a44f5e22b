"""What a step of plain sums begins and ends with: a small first bucket, and a last bucket that keeps all lanes busy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.engine.api import live_engines
from bagua.engine.distributed_module import attached_buckets
from bagua.engine.lanes.spread import lanes_of_parts
from bagua.engine.reducer.bucketing import DEFAULT_NUM_LANES, LANES_OF_WIDE, Entry, last_part_bytes, make_plan
from tests.rank_pool import RankPool

MB = 2**20


def entries(*sizes: int) -> list[Entry]:
    return [Entry(f"p{index}", size, "float32") for index, size in enumerate(sizes)]


def test_first_bucket_is_small_if_others_are_large() -> None:
    given = entries(*[MB // 2] * 32)
    assert [len(names) for names in make_plan(given, 4 * MB).buckets] == [8, 8, 8, 4, 4]
    assert [len(names) for names in make_plan(given, 4 * MB, early=True).buckets] == [2, 8, 8, 8, 6]
    assert make_plan(given, 3 * MB, early=True) == make_plan(given, 3 * MB)  # it would be a third of the others


@pytest.mark.parametrize(
    ("nbytes", "parts"), [(MB, 1), (3 * MB, LANES_OF_WIDE), (12 * MB, 2 * LANES_OF_WIDE), (16 * MB, 2 * LANES_OF_WIDE)]
)
def test_last_bucket_has_a_part_for_each_lane(nbytes: int, parts: int) -> None:
    assert -(-nbytes // last_part_bytes(nbytes, 16 * MB)) == parts


def test_a_very_large_last_bucket_has_ordinary_parts() -> None:
    assert last_part_bytes(1000 * MB, 16 * MB) == 16 * MB


def test_lanes_get_equal_shares() -> None:
    sizes = [[8], [8], [8], [8], [4], [6, 6]]
    lanes = lanes_of_parts(sizes, 3)
    assert lanes == ((0,), (1,), (2,), (0,), (1,), (2, 1))  # in turns, lane 0 would carry 8 + 8 + 6 of the end
    assert lanes_of_parts([[1] * 4], 3) == ((0, 1, 2, 0),)


def _train() -> tuple[list[int], list[int], list[Any]]:
    """On a rank: MiB of each bucket, its parts, and the mean gradients."""
    torch.manual_seed(0)
    ends = [nn.Linear(512, 4096, bias=False), nn.Linear(4096, 512, bias=False)]
    model = nn.Sequential(*ends, nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, "gradient_allreduce", bucket_bytes=9 * MB)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 512) * (1 + torch.distributed.get_rank())).square().mean().backward()
        optimizer.step()
    buckets, engine = attached_buckets(model), live_engines()[-1]
    exchange = engine.algorithm.exchange
    parts = [len(engine.dispatcher.parts(exchange, bucket.index)) for bucket in buckets]
    assert len(engine.pool.shared) == min(DEFAULT_NUM_LANES, sum(parts))
    grads = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    sizes = [bucket.nbytes // MB for bucket in buckets]
    bagua.detach(model)
    return sizes, parts, grads


def test_gradients_are_the_same_on_all_ranks(pool: RankPool) -> None:
    (sizes, parts, first), (_, _, second) = pool.run(2, _train)
    assert sizes == [1, 9, 8] and parts == [1, 1, LANES_OF_WIDE]
    assert len(first) == 4
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
