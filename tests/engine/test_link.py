"""How many lanes share plain sums follows from the first broadcast, and changes no bit."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua
import bagua.engine.lanes.dispatcher as dispatcher
from bagua.algorithms import Algorithm
from bagua.comm.groups import STRAIGHT_CHUNK_BYTES
from bagua.engine.api import live_engines
from bagua.engine.startup import link_probe as link
from bagua.engine.startup.ring_rate import RingRate
from bagua.errors import RankMismatchError
from tests.rank_pool import RankPool


def train(rate: float, smallest: int, algorithm: str = "gradient_allreduce", **options: Any) -> Any:
    """On a rank: parameters after 4 steps, the lanes that sums may use, and those that were used."""
    kept = link.FAST_BYTES_PER_S, link.SMALLEST_BYTES, dispatcher.PART_BYTES
    link.FAST_BYTES_PER_S, link.SMALLEST_BYTES, dispatcher.PART_BYTES = rate, smallest, 8_192
    try:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(4)), nn.Tanh(), nn.Linear(96, 50))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.distribute(model, optimizer, algorithm, bucket_bytes=40_000, **options)
        engine, used = live_engines()[-1], set()
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            model(torch.randn(8, 96, generator=generator)).square().mean().backward()
            for number, lane in enumerate(engine.pool.shared):
                submit = lane.submit

                def counted(run: Any, label: str, number: int = number, submit: Any = submit) -> Any:
                    used.add(number)
                    return submit(run, label)

                lane.submit = counted  # pyright: ignore
            optimizer.step()
        values = [param.detach().clone() for param in model.parameters()]
        found = engine.pool.lanes_of_sums, used
        bagua.detach(model)
        return values, found
    finally:
        link.FAST_BYTES_PER_S, link.SMALLEST_BYTES, dispatcher.PART_BYTES = kept


def compare() -> Any:
    fast, slow, small = train(0.0, 0), train(1e30, 0, transport="gloo"), train(0.0, 1 << 30, transport="gloo")
    given, lossy = train(0.0, 0, num_lanes=4), train(0.0, 0, "bytegrad")
    narrow = train(0.0, 0, codec="int4")
    for other in (slow, small, given):
        assert all(torch.equal(a, b) for a, b in zip(fast[0], other[0], strict=True))
    return [each[1] for each in (fast, slow, small, given, lossy, narrow)]


def test_cores_where_the_system_does_not_tell_which_are_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no `os.sched_getaffinity`."""
    assert 1 <= link.usable_cores() <= (os.cpu_count() or 1)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert link.usable_cores() == (os.cpu_count() or 1)


def test_a_fast_link_carries_sums_on_few_lanes(pool: RankPool) -> None:
    few = max(2, int(link.usable_cores() / 2 / link._CORES_PER_LANE))
    for fast, slow, small, given, lossy, narrow in pool.run(2, compare):
        assert [each for each, _ in (fast, slow, small, given, lossy, narrow)] == [few, None, None, None, few, few]
        assert given[1] == {0, 1, 2, 3}, "what the user says"
        assert slow[1] == small[1] == {0, 1, 2}, "fewer fill a link with many bytes"
        assert fast[1] == {lane for lane in given[1] if lane < min(few, 3)}
        assert lossy[1] == {0, 1, 2}, "codecs gain by lanes on a fast link too"
        assert narrow[1] == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("rates", "nodes", "want"),
    [
        ([9.0, 4.0, 2.0, 3.0], [[0], [1], [2], [3]], 3.0),
        ([9.0, 4.0], [[0], [1]], 4.0),
        ([9.0, 50.0, 2.0, 3.0], [[0, 1], [2, 3]], 3.0),
        ([9.0, 50.0, 60.0], [[0, 1, 2]], 60.0),
        ([9.0, 5.0, 2.0], [[1], [0], [2]], 3.5),
    ],
)
def test_the_rate_is_that_between_nodes(rates: list[float], nodes: list[list[int]], want: float) -> None:
    assert link._typical_rate(rates, nodes) == want


def sums_with(round_trip_s: float, algorithm: Algorithm) -> tuple[list[torch.Tensor], set[tuple[int, int]], int]:
    """Parameters, the limits of the groups of all lanes, and how many lanes there are; only rank 1 is far away."""
    kept = link._round_trip_s
    link._round_trip_s = lambda team: round_trip_s if team.rank == 1 else 0.0
    try:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.distribute(model, optimizer, algorithm, bucket_bytes=300_000)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            model(torch.randn(8, 300, generator=generator)).square().mean().backward()
            optimizer.step()
        values = [param.detach().clone() for param in model.parameters()]
        lanes = live_engines()[-1].pool.shared
        pool, gathers = live_engines()[-1].pool, {lane.groups.world.gathers for lane in lanes}
        assert (True in gathers) == (pool.bdp_bytes > 0)  # a lane that carries nothing is not told
        limits = {(lane.groups.world.straight_chunk_bytes, pool.bdp_bytes) for lane in lanes}
        bagua.detach(model)
        return values, limits, len(lanes)
    finally:
        link._round_trip_s = kept


def near_and_far(algorithm: Algorithm) -> Any:
    return sums_with(0.0, algorithm), sums_with(3600.0, algorithm)


@pytest.mark.parametrize(
    "algorithm",
    [
        bagua.algorithms.GradientAllReduce(),
        bagua.algorithms.ByteGrad(),
        bagua.algorithms.ByteGrad(codec="sign", error_feedback=True),
        bagua.algorithms.PowerSGD(),
    ],
    ids=repr,
)
def test_far_ranks_take_other_ways_with_the_same_bits(pool: RankPool, algorithm: Algorithm) -> None:
    """Larger chunks go straight to their owners, and what is small to all ranks."""
    found = pool.run(3, near_and_far, algorithm, nodes=[0, 1, 2])
    for (near, limits, lanes), (far, far_limits, _) in found:
        assert lanes > 1 and limits == {(STRAIGHT_CHUNK_BYTES, 0)}
        assert len(far_limits) == 1 and far_limits == found[0][1][1], "else ranks would wait for each other"
        assert min(min(each) for each in far_limits) > 1 << 20
        assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True))


@pytest.mark.parametrize("algorithm", [bagua.algorithms.GradientAllReduce(), bagua.algorithms.PowerSGD()], ids=repr)
def test_two_far_ranks_swap_their_sums_with_the_same_bits(pool: RankPool, algorithm: Algorithm) -> None:
    for (near, limits, _), (far, far_limits, _) in pool.run(2, near_and_far, algorithm, nodes=[0, 1]):
        assert limits == {(STRAIGHT_CHUNK_BYTES, 0)}
        assert min(bdp for _, bdp in far_limits) > 1 << 20
        assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True))


def test_a_chunk_goes_straight_up_to_a_share_of_what_the_link_holds() -> None:
    assert link._straight_chunk_bytes(RingRate(20e6), 0.1, 4) == 500_000
    assert link._straight_chunk_bytes(RingRate(20e6), 0.1, 16) == 125_000
    assert link._straight_chunk_bytes(RingRate(20e6), 0.0001, 4) == STRAIGHT_CHUNK_BYTES
    assert link._straight_chunk_bytes(RingRate(), 0.1, 4) == STRAIGHT_CHUNK_BYTES


def differing() -> str:
    model = nn.Linear(2, 2)
    options: dict[str, Any] = {"num_lanes": 4} if dist.get_rank() else {}
    try:
        bagua.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    except RankMismatchError as error:
        return str(error)
    return "accepted"


def test_all_ranks_must_leave_the_choice_or_none(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool.run(2, differing) == ["num_lanes differs: rank 1 has 4, rank 0 has 4 by default"] * 2
