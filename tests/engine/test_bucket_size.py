"""The size of buckets if none is given: several of them, so that something can leave before the backward pass ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.engine.distributed_module import attached_buckets
from bagua.engine.reducer.bucketing import LANES_OF_WIDE, chunks_of, fitting_bucket_bytes, lanes_of_wide
from tests.rank_pool import RankPool

MIB = 2**20


@pytest.mark.parametrize(
    ("total", "want"), [(0, MIB), (9 * MIB, MIB), (20 * MIB, 2 * MIB), (100 * MIB, 10 * MIB), (9999 * MIB, 10 * MIB)]
)
def test_a_tenth_within_bounds(total: int, want: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BAGUA_DEFAULT_BUCKET_SIZE", raising=False)
    assert fitting_bucket_bytes(total) == want
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "77")
    assert fitting_bucket_bytes(total) == 77


def test_the_environment_must_hold_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "ten")
    with pytest.raises(ValueError, match="BAGUA_DEFAULT_BUCKET_SIZE"):
        fitting_bucket_bytes(1)


@pytest.mark.parametrize(
    ("total", "size", "want"),
    [
        *((10 * MIB, 4, MIB), (10 * MIB, 8, 2 * MIB), (10 * MIB, 16, 4 * MIB)),
        *((6 * MIB, 16, 3 * MIB), (MIB, 16, MIB)),
        *((100 * MIB, 16, 10 * MIB), (100 * MIB, 64, 10 * MIB)),
    ],
)
def test_chunks_of_many_ranks_are_no_small_messages(
    total: int, size: int, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BAGUA_DEFAULT_BUCKET_SIZE", raising=False)
    assert fitting_bucket_bytes(total, size) == want


@pytest.mark.parametrize(
    ("name", "options", "ranks", "chunks"),
    [
        *(("bytegrad", {}, 1, 8), ("bytegrad", {}, 2, 4), ("bytegrad", {"hierarchical": False}, 2, 8)),
        *(("qadam", {}, 1, 8), ("gradient_allreduce", {}, 1, 1), ("power_sgd", {}, 1, 4), ("power_sgd", {}, 2, 2)),
        ("diloco", {"fragments": 4}, 1, 1),  # of weights, and of as many buckets as fragments
    ],
)
def test_chunks(name: str, options: dict[str, Any], ranks: int, chunks: int) -> None:
    """Of 8 ranks, `ranks` on a node."""
    nodes = tuple(tuple(range(first, first + ranks)) for first in range(0, 8, ranks))
    algorithm, _ = bagua.algorithms.get(name, **options).for_nodes(nodes)
    assert chunks_of(algorithm, nodes) == chunks


def num_buckets(num_layers: int, algorithm: str = "gradient_allreduce", bucket_bytes: int | None = None) -> int:
    """Of layers of 0.6 MiB."""
    model = nn.Sequential(*(nn.Linear(400, 400, bias=False) for _ in range(num_layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, algorithm, bucket_bytes=bucket_bytes)
    model(torch.randn(2, 400)).sum().backward()
    optimizer.step()
    found = len(attached_buckets(model))
    bagua.detach(model)
    return found


def test_models_of_some_megabytes_have_several(pool: RankPool) -> None:
    assert pool.run(2, num_buckets, 1) == [1, 1]
    assert pool.run(2, num_buckets, 8) == [4, 4]


def test_more_ranks_have_larger_buckets_unless_the_size_is_given(pool: RankPool) -> None:
    assert pool.run(8, num_buckets, 8) == [4] * 8
    assert pool.run(8, num_buckets, 8, "bytegrad") == [2] * 8
    assert pool.run(8, num_buckets, 8, "bytegrad", MIB) == [4] * 8


@pytest.mark.parametrize(
    ("bucket_bytes", "size", "held_bytes", "lanes"),
    [
        (2**20, 4, 0.0, LANES_OF_WIDE),  # not measured
        (2**20, 4, 0.25e6, 4),  # 100 Mbit/s, 20 ms: 0.5 MB while it waits, 0.39 MB each
        (2**20, 4, 0.625e6, 8),  # 50 ms
        (2**20, 2, 0.625e6, 11),  # 0.26 MB each
        (2**23, 4, 0.625e6, LANES_OF_WIDE),
        (2**25, 4, 8e6, 12),  # in parts of 8 MiB
    ],
)
def test_lanes_for_8_bits_fill_what_a_link_holds(bucket_bytes: int, size: int, held_bytes: float, lanes: int) -> None:
    assert lanes_of_wide(bucket_bytes, size, held_bytes) == lanes
