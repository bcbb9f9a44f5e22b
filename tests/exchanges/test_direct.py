"""Small sums between nodes go straight to the owners of chunks; which way is taken depends on nodes and size only."""

from __future__ import annotations

import pytest
import torch

from bagua.codecs import get as get_codec
from bagua.comm.groups import Groups
from bagua.exchanges import AllReduce
from bagua.exchanges.all_reduce import _SMALL_BYTES
from tests.rank_threads import run_threads


def values(rank: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 + rank)).to(dtype)


def reduced(groups: Groups, n: int, exchange: AllReduce, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x_N = values(groups.rank, n, dtype)
    exchange.run(x_N, exchange.init(x_N, groups), groups, 0)
    return x_N


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 63, 100, 4099])
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("average", [True, False])
def test_mean_and_sum(n: int, size: int, average: bool) -> None:
    results = run_threads(size, reduced, n, AllReduce(average=average), nodes=range(size))
    total = sum(values(rank, n).double() for rank in range(size))
    want = total / size if average else total
    for result in results:
        assert torch.equal(result, results[0])
        torch.testing.assert_close(result.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_payloads_are_summed_in_full(dtype: torch.dtype) -> None:
    results = run_threads(4, reduced, 333, AllReduce(), dtype, nodes=range(4))
    want = (sum(values(rank, 333, dtype).double() for rank in range(4)) / 4).to(dtype)
    assert all(torch.equal(result, want) for result in results)


def test_a_linear_codec_rounds_what_is_sent_and_nothing_else() -> None:
    results = run_threads(3, reduced, 500, AllReduce(get_codec("bf16")), nodes=range(3))
    mean = sum(values(rank, 500).bfloat16().float() for rank in range(3)) / 3
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], mean.bfloat16().float(), rtol=0.008, atol=1e-6)


def way(groups: Groups, n: int) -> tuple[bool, int]:
    x_N = torch.ones(n)
    AllReduce().run(x_N, {}, groups, 0)
    return groups.world.direct, groups.world.meter.sent


def test_nodes_and_size_decide() -> None:
    assert all(direct for direct, _ in run_threads(3, way, 10, nodes=[0, 1, 2]))
    assert not any(direct for direct, _ in run_threads(3, way, 10, nodes=[0, 0, 1]))
    assert not any(direct for direct, _ in run_threads(3, way, 10))
    assert not any(direct for direct, _ in run_threads(2, way, 10, nodes=[0, 1]))


def test_leaders_of_nodes_go_straight_to_each_other() -> None:
    def inter(groups: Groups) -> bool | None:
        return None if groups.inter is None else groups.inter.direct

    assert run_threads(6, inter, nodes=[0, 0, 1, 1, 2, 2], hierarchical=True) == [True, None, True, None, True, None]


def large(groups: Groups, n: int) -> torch.Tensor:
    before = values(groups.rank, n)
    ring, direct = before.clone(), before.clone()
    groups.world.direct = False
    AllReduce().run(ring, {}, groups, 0)
    groups.world.direct = True
    AllReduce().run(direct, {}, groups, 0)
    return ring - direct


def test_what_is_large_is_left_to_the_ring() -> None:
    n = _SMALL_BYTES // 4 + 1
    assert all(not difference.any() for difference in run_threads(3, large, n, nodes=range(3)))
