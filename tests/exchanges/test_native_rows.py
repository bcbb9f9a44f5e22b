"""Means over the native transport have the bits, the state and the count of bytes that those over gloo have."""

from __future__ import annotations

import itertools
import socket
from typing import Any

import pytest
import torch
from torch import Tensor

from bagua import codecs
from bagua.codecs import Eden, Int4, MinMaxUInt8, Sign
from bagua.codecs.native import native_backends
from bagua.comm import team_sockets
from bagua.comm.mesh import Mesh, why_no_mesh
from bagua.comm.team import Team
from bagua.exchanges import AllReduce, Exchange, LerpHook, PayloadSource, ScatterGather
from bagua.exchanges.payload_source import Piece
from bagua.exchanges.scatter_gather import chunk_numel
from tests.daily import one_in
from tests.rank_threads import run_teams

pytestmark = pytest.mark.skipif(bool(why_no_mesh()), reason=why_no_mesh() or "there is one")
SIZES = (1, 15, 100, 1025, 4099, 70001)
EXCHANGES = [
    ScatterGather(MinMaxUInt8()),
    ScatterGather(MinMaxUInt8(block=100), average=False),
    ScatterGather(Int4(), error_feedback=True),
    ScatterGather(Sign(), error_feedback=True),
    ScatterGather(Sign(block=8)),
    ScatterGather(Eden(bits=3)),
    ScatterGather(Eden(), running_scale=True),
    ScatterGather(Eden(states=32), running_scale=True),
    ScatterGather(Eden(bits=2, states=8), error_feedback=True),
    ScatterGather(Eden(), running_scale=True, gather_codec=Eden(bits=2, states=8)),
    ScatterGather(Int4(), error_feedback=True, gather_codec=MinMaxUInt8(block=100)),
    ScatterGather(Eden(bits=4, block=4096), gather_codec=Sign(block=8)),
    ScatterGather(Int4(), error_feedback=True, gather_codec=codecs.get("top_k")),
    ScatterGather(codecs.get("top_k"), gather_codec=Int4()),
    ScatterGather(codecs.get("top_k"), error_feedback=True),
    ScatterGather(codecs.get("bf16")),
    ScatterGather(MinMaxUInt8(block=None)),
    AllReduce(),
    AllReduce(codecs.get("fp16")),
]


def random(rank: int, step: int, n: int) -> Tensor:
    x_N = torch.randn(n, generator=torch.Generator().manual_seed(1000 * rank + step))
    if n > 50:
        x_N[n // 2] = -0.0
        x_N[: n // 8] *= 1e-3
    return x_N


def run_steps(team: Team, exchange: Exchange, native: bool, sizes: tuple[int, ...]) -> Any:
    """Result, state and bytes after two exchanges of each size."""
    groups = team.open("lane", nodes=[[rank] for rank in range(team.size)], native=native)
    found = []
    for n in sizes:
        state = exchange.init(torch.zeros(n), groups)
        for step in range(2):
            x_N = random(team.rank, step, n)
            exchange.run(x_N, state, groups, step)
        found.append((n, x_N, dict(state), groups.world.meter.sent))
    groups.leave(abort=False)
    return found


def assert_same(first: Any, second: Any) -> None:
    for (n, x_N, state, sent), (_, y_N, other, sent_too) in zip(first, second, strict=True):
        assert same_bits(x_N, y_N), n
        assert state.keys() == other.keys()
        for name in state:
            assert same_bits(state[name], other[name]), (n, name)
        assert sent == sent_too, n


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(torch.int32), y.view(torch.int32))


@pytest.mark.parametrize(("exchange", "size"), one_in(2, EXCHANGES, [2, 3]), ids=repr)
def test_the_same_bits_as_over_gloo(exchange: Exchange, size: int) -> None:
    over_gloo = run_teams(size, run_steps, exchange, False, SIZES)
    native = run_teams(size, run_steps, exchange, True, SIZES)
    for first, second in zip(over_gloo, native, strict=True):
        assert_same(first, second)


def run_twice(team: Team, exchange: ScatterGather, native: bool, n: int) -> Tensor:
    groups = team.open("lane", native=native)
    state = exchange.init(torch.zeros(n), groups)
    for _ in range(2):
        x_N = random(team.rank, 0, n)
        exchange.run(x_N, state, groups, 0)
    groups.leave(abort=False)
    assert state.keys() == ({"residual"} if exchange.error_feedback else set())
    return x_N


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("n", [1, 17, 160, 5003])
def test_two_ranks_encode_once(n: int, average: bool, feedback: bool, native: bool) -> None:
    """The mean of what the codec makes of each rank's chunks, the same on both."""
    codec = Int4(block=64)
    exchange = ScatterGather(codec, error_feedback=feedback, average=average)
    c = chunk_numel(n, 2)
    means = []
    for rank in range(2):
        x_2C, owed_2C = torch.zeros(2, c), torch.zeros(2, c)
        x_2C.view(-1)[:n] = random(rank, 0, n)
        for _ in range(2 if feedback else 1):
            decoded_2C = codec.decode(codec.encode(x_2C + owed_2C), c)
            owed_2C = x_2C + owed_2C - decoded_2C
        means.append(decoded_2C.view(-1)[:n])
    want = (means[0] + means[1]) * (0.5 if average else 1.0)
    first, second = run_teams(2, run_twice, exchange, native, n)
    assert same_bits(first, second)
    torch.testing.assert_close(first, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("gather", [None, Eden(bits=2)], ids=repr)
def test_more_ranks_and_rows_that_hold_no_element(gather: Any) -> None:
    exchange = ScatterGather(Int4(), error_feedback=True, gather_codec=gather)
    sizes = (16, 17, 33, 160, 5003)  # with 6 ranks some own nothing of the first ones
    over_gloo = run_teams(6, run_steps, exchange, False, sizes)
    for first, second in zip(over_gloo, run_teams(6, run_steps, exchange, True, sizes), strict=True):
        assert_same(first, second)


@pytest.mark.parametrize("size", [2, 4])
def test_rows_that_go_in_many_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over sockets that hold little."""
    prepare = team_sockets._prepare

    def small(sock: socket.socket) -> None:
        prepare(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    exchange, sizes = ScatterGather(Int4(), error_feedback=True), (17, 300_001, 33)
    over_gloo = run_teams(size, run_steps, exchange, False, sizes)
    monkeypatch.setattr(team_sockets, "_prepare", small)
    for first, second in zip(over_gloo, run_teams(size, run_steps, exchange, True, sizes), strict=True):
        assert_same(first, second)


def test_numbers_that_are_not_finite() -> None:
    def run(team: Team, native: bool) -> Tensor:
        groups = team.open("lane", native=native)
        x_N = random(team.rank, 0, 3000)
        x_N[5], x_N[2500] = float("nan"), float("inf")
        exchange = ScatterGather(Sign(), error_feedback=True)
        exchange.run(x_N, exchange.init(x_N, groups), groups, 0)
        groups.leave(abort=False)
        return x_N

    for first, second in zip(run_teams(2, run, False), run_teams(2, run, True), strict=True):
        assert first.isnan().any() and same_bits(first, second)


def scattered(rank: int, n: int, cuts: list[int]) -> tuple[Tensor, list[Piece]]:
    """A payload whose elements lie elsewhere, in pieces that end at `cuts`."""
    ends = [0, *[cut for cut in cuts if cut < n], n]
    pieces = [
        Piece(lo, hi, random(rank, index, hi - lo + 3)[3:], index, 0)
        for index, (lo, hi) in enumerate(itertools.pairwise(ends))
    ]
    return torch.full((n,), 7.0), pieces


def run_from(team: Team, exchange: ScatterGather, native: bool, cuts: list[int], weights: Any) -> Any:
    groups = team.open("lane", native=native)
    found = []
    for n in (40, 1500, 20011):
        x_N, pieces = scattered(team.rank, n, cuts)
        others = [random(9, piece.index, piece.hi - piece.lo) for piece in pieces]
        hook = None
        if weights is not None:
            hook = LerpHook(
                [None if w is None else (other, *w) for other, w in zip(others, weights(others), strict=True)]
            )
        state = exchange.init(x_N, groups)
        exchange.run_from(PayloadSource(x_N, pieces, hook), state, groups, 0)
        found.append((n, x_N, state, groups.world.meter.sent))
    groups.leave(abort=False)
    return found


def same_weights(others: list[Tensor]) -> list[tuple[float, float] | None]:
    return [(0.9, 0.25)] * len(others)


def some_without(others: list[Tensor]) -> list[tuple[float, float] | None]:
    return [None if index % 2 else (0.9, 0.25) for index in range(len(others))]


@pytest.mark.parametrize("weights", [None, same_weights, some_without])
@pytest.mark.parametrize("gather", [None, Int4(block=256)], ids=repr)
@pytest.mark.parametrize("codec", [MinMaxUInt8(), Sign(block=64)], ids=repr)
def test_elements_that_lie_in_pieces(codec: Any, gather: Any, weights: Any) -> None:
    exchange = ScatterGather(codec, error_feedback=isinstance(codec, Sign), gather_codec=gather)
    cuts = [1, 2, 37, 64, 65, 700, 701, 1024, 9001, 9002, 9003, 20010]
    for size in (2, 3):
        over_gloo = run_teams(size, run_from, exchange, False, cuts, weights)
        for first, second in zip(over_gloo, run_teams(size, run_from, exchange, True, cuts, weights), strict=True):
            assert_same(first, second)


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that exchanges took."""
    seen: list[str] = []
    for name in ("exchange", "exchange_encoded"):
        original = getattr(Mesh, name)

        def counted(self: Mesh, *args: Any, name: str = name, original: Any = original, **options: Any) -> None:
            seen.append(name)
            original(self, *args, **options)

        monkeypatch.setattr(Mesh, name, counted)
    return seen


@pytest.mark.skipif(not native_backends()[0], reason="needs compiled codecs")
@pytest.mark.parametrize(
    ("exchange", "way"),
    [
        (ScatterGather(MinMaxUInt8()), "exchange_encoded"),
        (ScatterGather(Int4(), error_feedback=True), "exchange_encoded"),
        (ScatterGather(Eden(), running_scale=True), "exchange_encoded"),
        (ScatterGather(Eden(), gather_codec=MinMaxUInt8()), "exchange_encoded"),
        (ScatterGather(codecs.get("top_k")), "exchange"),
    ],
    ids=repr,
)
def test_which_exchanges_need_the_interpreter(monkeypatch: pytest.MonkeyPatch, exchange: Exchange, way: str) -> None:
    seen = counting(monkeypatch)
    run_teams(3, run_steps, exchange, True, (1000,))
    assert seen == [way] * 6


def one_without_kernels(team: Team) -> Any:
    with codecs.use_backend("torch" if team.rank == 0 else "native"):
        return run_steps(team, ScatterGather(Int4(), error_feedback=True), True, (1000,))


@pytest.mark.skipif(not native_backends()[0], reason="needs compiled codecs")
def test_ranks_with_and_without_compiled_codecs_understand_each_other() -> None:
    want = run_teams(2, run_steps, ScatterGather(Int4(), error_feedback=True), False, (1000,))
    for first, second in zip(want, run_teams(2, one_without_kernels), strict=True):
        assert_same(first, second)
