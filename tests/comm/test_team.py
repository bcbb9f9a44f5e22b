"""Collectives on bytes in the store, and the groups of lanes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from bagua.checkpoint.agree import agree
from bagua.comm import team as team_module
from bagua.comm.collectives import all_gather_rows, all_reduce_, all_to_all_rows, broadcast_, reduce_, swap
from bagua.comm.groups import Groups
from bagua.comm.store import RendezvousStore
from bagua.comm.store_team import decode_alike, encode
from bagua.comm.team import Team
from bagua.engine.startup.handshake import shake_hands
from bagua.errors import CommunicationError, RankMismatchError
from tests.rank_threads import run_teams, run_threads, teams


def on_each(members: list, function) -> list:
    results: list[Any] = [None] * len(members)
    threads = []
    for rank, team in enumerate(members):

        def main(rank=rank, team=team):
            try:
                results[rank] = function(team)
            except Exception as error:
                results[rank] = error

        threads.append(threading.Thread(target=main))
        threads[-1].start()
    for thread in threads:
        thread.join(60)
    return results


def test_all_gather_and_broadcast_of_bytes() -> None:
    def talk(team):
        first = team.all_gather_bytes("greeting", f"hello {team.rank}".encode())
        second = team.broadcast_bytes("news", b"news" if team.rank == 0 else None)
        third = [team.all_gather_bytes("more", bytes([team.rank, n]))[2] for n in range(5)]
        return first, second, third

    for first, second, third in on_each(teams(3), talk):
        assert first == [b"hello 0", b"hello 1", b"hello 2"]
        assert second == b"news"
        assert third == [bytes([2, n]) for n in range(5)]


def test_absent_ranks_are_named() -> None:
    members = teams(4, timeout_s=2)

    def talk(team):
        if team.rank in (1, 3):
            return None
        return team.all_gather_bytes("greeting", b"")

    results = on_each(members, talk)
    for rank in (0, 2):
        assert isinstance(results[rank], CommunicationError)
        assert f"greeting: rank 1, 3 did not arrive within 2 s (this is rank {rank} of 4)" in str(results[rank])


def test_ranks_in_different_calls_are_told_so() -> None:
    def talk(team):
        if team.rank == 1:
            return agree(team, "saving to x", {}, None)
        return shake_hands(team, [], {"algorithm": "bytegrad"}, None, False, "")

    first, second = on_each(teams(2), talk)
    assert isinstance(first, RankMismatchError) and isinstance(second, RankMismatchError)
    assert str(first).startswith("bagua.distribute(): rank 1 is in another collective call; ranks must make the same")
    assert str(second).startswith("saving to x: rank 0 is in another collective call")


@pytest.mark.parametrize("message", [b"", b"\xff\x00", b"[1]", b"null"])
def test_bytes_of_another_call_are_no_message(message: bytes) -> None:
    with pytest.raises(RankMismatchError, match="news: rank 1 is in another collective call"):
        decode_alike("news", [encode({"a": 1}), message], ["a"])


def test_missing_names_who_is_silent() -> None:
    def talk(team):
        return [] if team.rank == 1 else team.missing_ranks("roll", 0.5)

    results = on_each(teams(3), talk)
    assert results[0] == [1] and results[2] == [1]


def test_old_messages_are_deleted() -> None:
    members = teams(2)
    on_each(members, lambda team: [team.all_gather_bytes("greeting", b"x") for _ in range(10)])
    assert members[0].store.num_keys() <= 6


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1], [0, 0, 1], [1, 0, 1], [0, 1, 1, 0], [3, 3, 3, 3]])
def test_groups_of_nodes(nodes: list[int]) -> None:
    def look(groups: Groups):
        intra, inter = groups.intra, groups.inter
        assert intra is not None
        x = torch.tensor([float(groups.rank)])
        all_reduce_(intra, x)
        y = torch.ones(1)
        if inter is not None:
            all_reduce_(inter, y)
        return intra.ranks, inter.ranks if inter else None, x.item(), y.item()

    leaders = tuple(dict.fromkeys(nodes.index(node) for node in nodes))
    for rank, (intra, inter, total, count) in enumerate(run_threads(len(nodes), look, nodes=nodes, hierarchical=True)):
        mine = tuple(other for other, node in enumerate(nodes) if node == nodes[rank])
        assert intra == mine and total == sum(mine)
        assert inter == (leaders if rank in leaders else None)
        assert count == (len(leaders) if rank in leaders else 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64, torch.bfloat16])
def test_collectives(size: int, dtype: torch.dtype) -> None:
    def all_of_them(groups: Groups):
        group, rank = groups.world, groups.rank
        rows = torch.tensor([[10 * rank + other, rank] for other in range(size)]).to(dtype)
        out = torch.zeros_like(rows)
        all_to_all_rows(group, out, rows)
        gathered = torch.zeros(size, 2, dtype=dtype)
        gathered[rank] = rows[0]
        all_gather_rows(group, gathered)
        total = all_reduce_(group, rows[0].clone())
        everywhere = broadcast_(group, rows[0].clone(), size - 1)
        reduced = reduce_(group, rows[0].clone(), size - 1)
        return out, gathered, total, everywhere, reduced

    for rank, (out, gathered, total, everywhere, reduced) in enumerate(run_threads(size, all_of_them)):
        assert out.tolist() == [[10 * other + rank, other] for other in range(size)]
        assert gathered.tolist() == [[10 * other, other] for other in range(size)]
        want = [sum(10 * other for other in range(size)), sum(range(size))]
        assert total.tolist() == want
        assert everywhere.tolist() == [10 * (size - 1), size - 1]
        if rank == size - 1:
            assert reduced.tolist() == want


def test_swap_on_a_ring_with_two_messages_to_each_peer() -> None:
    def around(groups: Groups):
        group, rank, size = groups.world, groups.rank, groups.size
        got = [torch.zeros(3) for _ in range(4)]
        left, right = (rank - 1) % size, (rank + 1) % size
        swap(
            group,
            sends=[(right, torch.full((3,), rank + 0.1)), (left, torch.full((3,), rank + 0.2))] * 2,
            receives=[(left, got[0]), (right, got[1]), (left, got[2]), (right, got[3])],
        )
        return [tensor[0].item() for tensor in got], group.meter.sent, group.meter.received

    for rank, (got, sent, received) in enumerate(run_threads(4, around)):
        left, right = (rank - 1) % 4, (rank + 1) % 4
        assert got == pytest.approx([left + 0.1, right + 0.2] * 2)
        assert sent == received == 4 * 12


def test_a_rank_that_leaves_at_once_does_not_break_one_that_still_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    first_left = [threading.Event() for _ in range(6)]  # who connects to whom is drawn anew in each round

    class Late(RendezvousStore):
        """Rank 1 learns late where rank 2 listens."""

        def get(self, key: str) -> bytes:
            rank, _, number = threading.current_thread().name.partition(" ")
            if rank == "1" and key.endswith("/2"):
                first_left[int(number)].wait(0.4)  # in vain, if rank 0 waits for rank 1
            return super().get(key)

    def open_and_leave(team: Team) -> None:
        for number, left in enumerate(first_left):
            threading.current_thread().name = f"{team.rank} {number}"
            team.open(f"lane {number}").leave(abort=False)
            if team.rank == 0:
                left.set()

    monkeypatch.setattr(team_module, "RendezvousStore", Late)
    run_teams(3, open_and_leave)
