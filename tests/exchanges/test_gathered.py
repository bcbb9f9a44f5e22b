"""Where a step waits for an exchange far away, each rank forms the means itself: a latency less, and the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bagua import codecs
from bagua.codecs import Eden, Int4, MinMaxUInt8, Sign, TopK
from bagua.comm.groups import Group, Groups
from bagua.comm.mesh import why_no_mesh
from bagua.comm.team import Team
from bagua.exchanges import AllReduce, Exchange, PayloadSource, PowerSGD, ScatterGather
from bagua.exchanges.gathering import gathers
from bagua.exchanges.payload_source import Piece
from tests.daily import one_in
from tests.rank_threads import run_teams

SIZES = (1, 17, 160, 5003)
EXCHANGES: dict[str, Exchange] = {
    "sum": AllReduce(average=False),
    "mean": AllReduce(),
    "mean of 16 bits": AllReduce(codecs.get("bf16")),
    "8 bits": ScatterGather(MinMaxUInt8()),
    "sum of 8 bits": ScatterGather(MinMaxUInt8(block=100), average=False),
    "4 bits": ScatterGather(Int4()),
    "1 bit": ScatterGather(Sign()),
    "eden": ScatterGather(Eden(), running_scale=True),
    "top_k": ScatterGather(TopK(0.1)),
    "identity": ScatterGather(codecs.get("identity")),
    "1 bit, means in 2": ScatterGather(Eden(), running_scale=True, gather_codec=Eden(bits=2)),
    "4 bits, means in 8, with feedback": ScatterGather(Int4(), error_feedback=True, gather_codec=MinMaxUInt8()),
    "1 bit with feedback": ScatterGather(Sign(), error_feedback=True),
    "4 bits with feedback": ScatterGather(Int4(), error_feedback=True, average=False),
}
TRANSPORTS = [False, pytest.param(True, marks=pytest.mark.skipif(bool(why_no_mesh()), reason="no native transport"))]


def random(rank: int, step: int, n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * rank + step))


def own(chunks: Tensor, rank: int, c: int) -> Tensor:
    return chunks[rank * c : (rank + 1) * c]


def exchanged(team: Team, exchange: Exchange, native: bool, late: bool, sizes: tuple[int, ...]) -> list[Any]:
    """Results, states and bytes of two steps of each size, from where elements lie in the second one."""
    groups = team.open("lane", nodes=[[rank] for rank in range(team.size)], native=native)
    found = []
    for n in sizes:
        groups.begin(0, gathers=late)
        state, before = exchange.init(torch.zeros(n), groups.as_of(late)), groups.world.meter.sent
        for step in range(2):
            x_N = random(team.rank, step, n)
            if step and exchange.reads(x_N):
                source = PayloadSource(torch.empty(n), [Piece(0, n, x_N, 0)])
                exchange.run_from(source, state, groups, step)
                x_N = source.x_N
            else:
                exchange.run(x_N, state, groups, step)
            found.append((n, x_N, dict(state), groups.world.meter.sent - before))
    groups.leave(abort=False)
    return found


@pytest.mark.parametrize(("name", "size", "native"), one_in(2, EXCHANGES, [2, 3, 5], TRANSPORTS))
def test_the_bits_of_two_latencies(name: str, size: int, native: bool) -> None:
    usual, late = (run_teams(size, exchanged, EXCHANGES[name], native, how, SIZES) for how in (False, True))
    for rank in range(size):
        for (n, x_N, state, _), (_, y_N, other, _), (_, z_N, _, _) in zip(
            usual[rank], late[rank], late[0], strict=True
        ):
            assert torch.equal(x_N, y_N) and torch.equal(y_N, z_N), n
            assert state.keys() == other.keys()
            for key, value in state.items():
                assert torch.equal(
                    value, own(other[key], rank, value.numel()) if key == "chunk_residual" else other[key]
                )
    sent = [each[-1][3] for each in (usual[0], late[0])]
    assert (sent[1] > sent[0]) == (size > 2) and (size > 2 or sent[0] == sent[1])


@pytest.mark.parametrize("name", ["sum", "mean", "mean of 16 bits"])
def test_two_ranks_take_it_for_sums(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr("bagua.exchanges.all_reduce.sum_gathered_", lambda _, x_N, *__: calls.append(x_N.numel()))
    run_teams(2, exchanged, EXCHANGES[name], False, True, (17,))
    assert len(calls) == 4
    run_teams(2, exchanged, EXCHANGES[name], False, False, (17,))
    assert len(calls) == 4


@pytest.mark.parametrize("native", TRANSPORTS)
def test_factors_of_low_rank(native: bool) -> None:
    exchange = PowerSGD(((30, 33), (13, 1)), codec=codecs.get("bf16"))
    usual, late = (run_teams(4, exchanged, exchange, native, how, (30 * 33 + 13,)) for how in (False, True))
    for (_, x_N, state, sent), (_, y_N, other, more) in zip(usual[1], late[1], strict=True):
        assert torch.equal(x_N, y_N) and torch.equal(state["right"], other["right"]) and more > sent


FED_BACK = ScatterGather(Sign(), error_feedback=True)


def changed(team: Team, lates: tuple[bool, ...]) -> tuple[Tensor, Tensor, int]:
    """Result, residuals of chunks and bytes of steps that are late or not."""
    groups = team.open("lane", nodes=[[rank] for rank in range(team.size)])
    state = FED_BACK.init(torch.zeros(5003), groups.as_of(lates[0]))
    for step, late in enumerate(lates):
        groups.begin(0, gathers=late)
        x_N = random(team.rank, step, 5003)
        FED_BACK.run(x_N, state, groups, step)
    groups.leave(abort=False)
    return x_N, state["chunk_residual"], groups.world.meter.sent


def test_errors_of_others_are_forgotten_when_the_owners_take_over() -> None:
    """And are not known again: the other way is taken from then on."""
    usual = run_teams(3, changed, (False, False, False, False))
    mixed = run_teams(3, changed, (True, True, False, True))
    gathered = run_teams(3, changed, (True, True, True, True))
    for rank, ((x_N, own_C, sent), (y_N, same_C, more), (_, all_RC, most)) in enumerate(
        zip(usual, mixed, gathered, strict=True)
    ):
        assert torch.equal(x_N, y_N) and torch.equal(own_C, same_C)
        assert torch.equal(own_C, own(all_RC, rank, len(own_C)))
        assert sent < more < most and most / sent == pytest.approx(1.5)


def test_a_state_of_owners_fits_one_of_all_and_the_reverse() -> None:
    groups = Groups(Group(None, 1, 3, (0, 1, 2)), ((0,), (1,), (2,)))
    one_C, all_RC = torch.ones(16), torch.arange(48.0)
    fits = FED_BACK.fit("chunk_residual", one_C, all_RC, groups)
    assert fits is one_C
    fits = FED_BACK.fit("chunk_residual", all_RC, one_C, groups)
    assert fits is not None and fits.tolist() == list(range(16, 32))
    assert FED_BACK.fit("chunk_residual", torch.ones(17), one_C, groups) is None
    assert FED_BACK.fit("residual", all_RC, one_C, groups) is None


def test_all_do_if_their_bytes_take_no_longer_than_the_latency_that_is_saved() -> None:
    numel, exchange = 40_000, ScatterGather(Int4())
    sent = exchange.bytes_per_rank(numel, 4)  # and as much again
    assert gathers(exchange, numel, 8 * numel, False, 4, 8 * sent)
    assert not gathers(exchange, numel, 8 * numel, False, 4, 8 * sent - 1)
    low_rank = PowerSGD(((200, 200),), 4)
    assert gathers(low_rank, numel, 8 * numel, False, 4, 4 * low_rank.bytes_per_rank(numel, 4)), "saves two latencies"


def test_the_last_one_does_if_that_costs_the_others_little() -> None:
    numel, exchange = 40_000, ScatterGather(Int4())
    sent = exchange.bytes_per_rank(numel, 4)
    assert gathers(exchange, numel, 800 * numel, True, 4, 4 * sent)
    assert not gathers(exchange, numel, 800 * numel, True, 4, 4 * sent - 4)
    assert not gathers(exchange, numel, 800 * numel, False, 4, 4 * sent)


def test_two_ranks_do_unless_bytes_count_more_than_the_latency() -> None:
    numel, exchange = 40_000, AllReduce()
    assert gathers(exchange, numel, 800 * numel, False, 2, numel)
    assert not gathers(exchange, numel, 800 * numel, False, 2, numel - 1)


@pytest.mark.parametrize(("size", "numel", "held_bytes"), [(1, 100, 1e9), (4, 0, 1e9), (4, 100, 0.0)])
def test_nobody_does_where_nothing_is_to_be_saved(size: int, numel: int, held_bytes: float) -> None:
    assert not gathers(ScatterGather(Int4()), numel, numel, True, size, held_bytes)
