"""The rate of a ring in which all ranks send: the same on all of them, in few bytes, and told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua
from bagua.comm.groups import Group, Groups
from bagua.comm.team import Team
from bagua.engine.startup import ring_rate
from bagua.engine.startup.ring_rate import MOST_BYTES, RingRate, measure_ring
from tests.rank_pool import RankPool

CPU = torch.device("cpu")
HOSTS = [0, 1, 2]


def opened(hierarchical: bool = False) -> tuple[Team, Groups]:
    team = Team.of(None, CPU)
    nodes = [[rank for rank in range(dist.get_world_size()) if rank // 2 == node] for node in range(3)]
    nodes = nodes if hierarchical else [[rank] for rank in range(dist.get_world_size())]
    return team, team.open("ring", hierarchical, nodes)


def counted(hierarchical: bool = False) -> tuple[RingRate, int, int]:
    """What was measured, bytes that this rank sent, and to how many others."""
    team, groups = opened(hierarchical)
    sent: list[tuple[int, int]] = []
    send = Group.send

    def count(group: Group, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        sent.append((tensor.nbytes, peer))
        return send(group, tensor, peer, tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "send", count)
        found = measure_ring(team, groups, CPU, 0.0)
    groups.leave(abort=False)
    return found, sum(size for size, _ in sent), len({peer for _, peer in sent})


def test_all_ranks_send_to_the_next_one_and_find_the_same_rate(pool: RankPool) -> None:
    found = pool.run(3, counted, nodes=HOSTS)
    first = found[0][0]
    assert first.bytes_per_s > 0
    for each, sent, peers in found:
        assert (each.bytes_per_s, each.nbytes) == (first.bytes_per_s, first.nbytes)
        assert each.nbytes <= MOST_BYTES == 85 * 64 * 2**10
        assert peers == 1 and 0 < sent - each.nbytes <= 4 * ring_rate._HEAD_BYTES


def test_of_several_ranks_a_node_only_the_first_ones_send(pool: RankPool) -> None:
    found = pool.run(6, counted, True, nodes=[0, 0, 1, 1, 2, 2])
    assert len({(each.bytes_per_s, each.nbytes) for each, _, _ in found}) == 1
    assert [sent > 0 for _, sent, _ in found] == [True, False] * 3


def test_without_a_ring_nothing_is_sent(pool: RankPool) -> None:
    assert pool.run(2, counted, nodes=[0, 1]) == [(RingRate(), 0, 0)] * 2


def scripted(seconds: Any, round_trip_s: float) -> tuple[RingRate, list[int]]:
    """As if a pass had taken `seconds[rank]`; with the bytes of each round."""
    rounds: list[int] = []

    def pass_on(ring: Group, nbytes: int, device: torch.device) -> float:
        rounds.append(nbytes)
        return seconds[ring.rank]

    team, groups = opened()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_rate, "_pass_on", pass_on)
        found = measure_ring(team, groups, CPU, round_trip_s)
    groups.leave(abort=False)
    return found, rounds


@pytest.mark.parametrize(
    ("round_trip_s", "rounds"),
    [(0.0, [65_536]), (0.05, [65_536, 262_144, 1_048_576, 4_194_304])],
    ids=["a slow link after one round", "slow start never"],
)
def test_it_ends_when_a_round_was_long_enough(pool: RankPool, round_trip_s: float, rounds: list[int]) -> None:
    """Each rank alone would find another rate, and rank 0 would go on where the others end."""
    for found, made in pool.run(3, scripted, [0.001, 0.1, 0.2], round_trip_s, nodes=HOSTS):
        assert made == rounds
        assert found.bytes_per_s == rounds[-1] / 0.1 and found.nbytes == sum(rounds)


@pytest.mark.parametrize(("slowest_s", "counts_s"), [(0.19, 0.1), (0.21, 0.21)])
def test_of_unequal_links_the_slowest_counts(pool: RankPool, slowest_s: float, counts_s: float) -> None:
    for found, _ in pool.run(3, scripted, [0.1, slowest_s, 0.1], 0.0, nodes=HOSTS):
        assert found.bytes_per_s == 65_536 / counts_s


def told() -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("bagua")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        model = nn.Linear(4, 4)
        bagua.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        bagua.detach(model)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return [line for line in lines if line.startswith("links: ")]


def test_the_cost_is_told_once(pool: RankPool) -> None:
    first, *others = pool.run(3, told, nodes=HOSTS)
    assert len(first) == 1 and "measured in" in first[0] and "MiB a rank" in first[0]
    assert others == [[], []]
