"""Small sums between nodes go over the library's own sends, with the bits of gloo's ring whichever way they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagua.codecs import get as get_codec
from bagua.comm.collectives import all_reduce_
from bagua.comm.groups import STRAIGHT_CHUNK_BYTES, Groups
from bagua.comm.ring import ring_chunks, ring_order, sum_by_owners_, sum_in_ring_
from bagua.exchanges import AllReduce
from bagua.exchanges.all_reduce import _SMALL_BYTES
from tests.rank_threads import run_threads

SIZES = (0, 1, 2, 15, 16, 17, 63, 100, 4099)


def values(rank: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 + rank)).to(dtype)


def reduced(groups: Groups, n: int, exchange: AllReduce, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x_N = values(groups.rank, n, dtype)
    exchange.run(x_N, exchange.init(x_N, groups), groups, 0)
    return x_N


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("average", [True, False])
def test_mean_and_sum(n: int, size: int, average: bool) -> None:
    results = run_threads(size, reduced, n, AllReduce(average=average), nodes=range(size))
    total = sum(values(rank, n).double() for rank in range(size))
    want = total / size if average else total
    for result in results:
        assert torch.equal(result, results[0])
        torch.testing.assert_close(result.double(), want, rtol=1e-6, atol=1e-6)


def three_ways(groups: Groups, sizes: tuple[int, ...], dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    world, buffers = groups.world, groups.buffers
    ways: tuple[Callable[[torch.Tensor], Any], ...] = (
        lambda x_N: all_reduce_(world, x_N),
        lambda x_N: sum_in_ring_(world, x_N, buffers),
        lambda x_N: sum_by_owners_(world, x_N, buffers),
    )
    found = []
    for n in sizes:
        found.append(tuple(values(groups.rank, n, dtype) for _ in ways))
        for way, x_N in zip(ways, found[-1], strict=True):
            way(x_N)
    return found


@pytest.mark.parametrize(
    ("size", "sizes"),
    [(2, SIZES), (3, SIZES), (4, SIZES), (5, SIZES), (2, (3 << 19,)), (3, (1_700_003,))],  # the last of many segments
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_ways_have_the_bits_of_gloo(size: int, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    for found in run_threads(size, three_ways, sizes, dtype, nodes=range(size)):
        for gloo, ring, straight in found:
            assert torch.equal(gloo, ring) and torch.equal(gloo, straight)


def test_chunks_are_whole_and_the_owner_adds_last() -> None:
    x_N = torch.arange(17)
    assert [chunk.tolist() for chunk in ring_chunks(x_N, 3)] == [[*range(6)], [*range(6, 12)], [*range(12, 17)]]
    assert [chunk.numel() for chunk in ring_chunks(x_N[:1], 3)] == [1, 0, 0]
    assert ring_order(1, 4) == [0, 3, 2, 1]


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


def receivers(groups: Groups, nbytes: int) -> set[int]:
    """Ranks to which the library's own sends of a sum went, by their distance."""
    found, send = set(), groups.world.send

    def noted(tensor: torch.Tensor, peer: int, tag: int) -> Any:
        found.add((peer - groups.rank) % groups.size)
        return send(tensor, peer, tag)

    groups.world.send = noted  # pyright: ignore
    AllReduce().run(torch.ones(nbytes // 4), {}, groups, 0)
    return found


@pytest.mark.parametrize(
    ("nodes", "nbytes", "want"),
    [
        ([0, 1, 2], 40, {1, 2}),
        ([0, 1, 2], 3 * STRAIGHT_CHUNK_BYTES, {1, 2}),
        ([0, 1, 2], 3 * STRAIGHT_CHUNK_BYTES + 4, {2}),
        ([0, 1, 2], _SMALL_BYTES, {2}),
        ([0, 1, 2], _SMALL_BYTES + 4, set()),
        ([0, 0, 1], 40, set()),
        ([0, 0, 0], 40, set()),
        ([0, 1], 40, set()),
    ],
)
def test_nodes_and_size_decide(nodes: list[int], nbytes: int, want: set[int]) -> None:
    assert run_threads(len(nodes), receivers, nbytes, nodes=nodes) == [want] * len(nodes)


def test_leaders_of_nodes_go_straight_to_each_other() -> None:
    def inter(groups: Groups) -> bool | None:
        return None if groups.inter is None else groups.inter.direct

    assert run_threads(6, inter, nodes=[0, 0, 1, 1, 2, 2], hierarchical=True) == [True, None, True, None, True, None]
