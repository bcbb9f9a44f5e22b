"""Transfers over the native transport bring what those over gloo bring."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bagua.comm.collectives import all_gather_rows, all_to_all_rows, swap
from bagua.comm.mesh import Mesh, why_no_mesh
from bagua.comm.team import Team
from bagua.errors import CommunicationError
from bagua.exchanges import Exchange, Gossip, mix
from bagua.topologies import Ring, ShiftOne
from tests.rank_threads import run_teams

pytestmark = pytest.mark.skipif(bool(why_no_mesh()), reason=why_no_mesh() or "there is one")


def several(team: Team, native: bool) -> tuple[list[Tensor], int, int]:
    """Several transfers with each peer, of other lengths in each direction, none among them, one of them large."""
    groups = team.open("lane", native=native)
    group, rank, size = groups.world, team.rank, team.size

    def lengths(source: int, target: int) -> list[int]:
        return [10 * source + target, 0, 700_000 if source < target else 3, source]

    peers = [peer for peer in range(size) if peer != rank]
    sends = [
        (peer, torch.full((n,), 100.0 * rank + k)) for peer in peers for k, n in enumerate(lengths(rank, peer)) if n
    ]
    receives = [(peer, torch.zeros(n)) for peer in reversed(peers) for n in lengths(peer, rank) if n]
    for _ in range(2):
        swap(group, sends, receives)
    groups.leave(abort=False)
    return [tensor for _, tensor in receives], group.meter.sent, group.meter.received


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("size", [2, 4])
def test_several_transfers_with_each_peer(size: int) -> None:
    for first, second in zip(run_teams(size, several, False), run_teams(size, several, True), strict=True):
        assert_same(first[0], second[0])
        assert first[1:] == second[1:]


def some_only(team: Team) -> float:
    """Ranks 0 and 1 exchange three times, while rank 2 does nothing; then all do."""
    groups = team.open("lane", native=True)
    group, rank = groups.world, team.rank
    mine, theirs = torch.full((5,), float(rank)), torch.zeros(5)
    for _ in range(3):
        peer = 1 - rank
        swap(group, *(([(peer, mine)], [(peer, theirs)]) if rank < 2 else ([], [])))
    rows = torch.zeros(3, 4)
    rows[rank] = rank + 1
    all_gather_rows(group, rows)
    groups.leave(abort=False)
    return float(rows.sum() + theirs.sum())


def test_ranks_without_a_transfer_keep_in_step() -> None:
    assert run_teams(3, some_only) == [24 + 5, 24, 24]


def rows_of(team: Team, native: bool) -> list[Tensor]:
    groups = team.open("lane", native=native)
    rows = torch.arange(3.0 * 7).view(3, 7) + 100 * team.rank
    out = torch.zeros(3, 7)
    all_to_all_rows(groups.world, out, rows)
    all_gather_rows(groups.world, rows)
    groups.leave(abort=False)
    return [rows, out]


def test_rows_to_all_and_from_all() -> None:
    for first, second in zip(run_teams(3, rows_of, False), run_teams(3, rows_of, True), strict=True):
        assert_same(first, second)


def gossiped(team: Team, native: bool, exchange: Exchange, dtype: torch.dtype) -> tuple[list[Tensor], int]:
    groups, found = team.open("lane", native=native), []
    for n in (1, 30, 5001):
        x_N = torch.randn(n, generator=torch.Generator().manual_seed(team.rank)).to(dtype)
        state = exchange.init(x_N, groups)
        exchange.rebuild(x_N, state, groups)
        for step in range(3):
            x_N.add_(team.rank)
            exchange.run(x_N, state, groups, step)
        found.append(x_N)
    groups.leave(abort=False)
    return found, groups.world.meter.sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "exchange",
    [Gossip(ShiftOne()), Gossip(Ring()), mix("exponential"), mix("ring", "fp16"), mix("ring", "minmax_uint8")],
    ids=lambda exchange: exchange.name,
)
def test_gossip(monkeypatch: pytest.MonkeyPatch, exchange: Exchange, dtype: torch.dtype) -> None:
    size = 4
    over_gloo = run_teams(size, gossiped, False, exchange, dtype)
    calls, original = [], Mesh.swap
    monkeypatch.setattr(Mesh, "swap", lambda self, *args: (calls.append(1), original(self, *args))[1])
    for first, second in zip(over_gloo, run_teams(size, gossiped, True, exchange, dtype), strict=True):
        assert_same(first[0], second[0])
        assert first[1] == second[1] > 0
    assert len(calls) >= 9 * size


def unknown_peer(team: Team, peer: int) -> str:
    groups = team.open("lane", native=True)
    with pytest.raises(CommunicationError) as raised:
        swap(groups.world, [(peer, torch.zeros(3))], [])
    groups.leave(abort=False)
    return str(raised.value)


@pytest.mark.parametrize("peer", [-1, 2])
def test_a_peer_that_is_none_is_refused(peer: int) -> None:
    for text in run_teams(2, unknown_peer, peer):
        assert "a transfer is not with one of the other 1 ranks" in text
