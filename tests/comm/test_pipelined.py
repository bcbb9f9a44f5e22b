"""Rows leave as they are written and are read as they come."""

from __future__ import annotations

import pytest
import torch

from bagua.comm.groups import Groups
from bagua.comm.pipelined import scatter_gather_rows
from tests.rank_threads import run_threads


def gathered(groups: Groups, lengths: list[int]) -> tuple[list[list[int]], list[tuple[int, int]], int]:
    """Row r of rank s is filled with 10 s + r; an owner answers with the sum of what it got."""
    group = groups.world
    rank, size = group.rank, group.size
    wire = [torch.full((length,), 255, dtype=torch.uint8) for length in lengths]
    peers_RW = torch.zeros(size, lengths[rank], dtype=torch.uint8)
    reads: list[tuple[int, int]] = []

    def write(lo: int, hi: int, out: torch.Tensor | list[torch.Tensor]) -> None:
        assert hi == lo + 1 and len(out) == 1
        out[0].fill_(10 * rank + lo)

    def combine() -> None:
        wire[rank].copy_(peers_RW.sum(0))

    scatter_gather_rows(group, wire, peers_RW, write=write, combine=combine, read=lambda lo, hi: reads.append((lo, hi)))
    return [row.tolist() for row in wire], sorted(reads), group.meter.sent


@pytest.mark.parametrize("lengths", [[4, 4, 4], [5, 5, 2], [3, 3, 0], [7, 0, 0], [0, 0, 0], [1, 2, 3, 4]])
def test_every_row_is_the_sum_of_all_ranks(lengths: list[int]) -> None:
    size = len(lengths)
    for rank, (rows, reads, sent) in enumerate(run_threads(size, gathered, lengths, nodes=range(size))):
        assert rows == [[sum(10 * s + r for s in range(size))] * lengths[r] for r in range(size)]
        assert reads == [(r, r + 1) for r in range(size) if lengths[r]]
        assert sent == sum(lengths) - lengths[rank] + (size - 1) * lengths[rank]


def two_lanes(groups: Groups) -> bool:
    return groups.world.p2p is None and groups.world.tag == 0


def test_a_lane_alone_uses_its_own_connections() -> None:
    assert all(run_threads(2, two_lanes))
