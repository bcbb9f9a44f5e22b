"""Sums over the native transport have the bits that gloo's ring has, and those of the formula."""

from __future__ import annotations

import math
import socket
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bagua.comm import team_sockets
from bagua.comm.collectives import all_reduce_, sum_of_pieces_
from bagua.comm.mesh import SUMMED, Mesh, why_no_mesh
from bagua.comm.team import Team
from tests.rank_threads import run_teams

pytestmark = pytest.mark.skipif(bool(why_no_mesh()), reason=why_no_mesh() or "there is one")
SIZES = (1, 2, 3, 7, 64, 1025, 40_003)
SEGMENT = 1 << 20  # bytes; gloo's largest
Bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def summand(rank: int, n: int, dtype: torch.dtype) -> Tensor:
    x_N = torch.randn(n, generator=torch.Generator().manual_seed(1000 * rank + n), dtype=torch.float64)
    x_N[: n // 4] *= 1e-6  # denormal in fp16
    x_N[n // 2 :: 7] *= 3e4  # some sums of these are not finite in fp16
    if n > 3:
        x_N[3] = -0.0
    return x_N.to(dtype)


def sums(team: Team, native: bool, dtype: torch.dtype, sizes: tuple[int, ...]) -> list[tuple[Tensor, int]]:
    """The sums, and the bytes counted after each."""
    groups = team.open("lane", native=native)
    found = []
    for n in sizes:
        found.append((all_reduce_(groups.world, summand(team.rank, n, dtype)), groups.world.meter.sent))
    groups.leave(abort=False)
    return found


def in_a_ring(parts: list[Tensor]) -> Tensor:
    """Chunk c: rank c - 1 begins, and each rank before it adds its own; rank c is the last."""
    size, n, width = len(parts), parts[0].numel(), parts[0].element_size()
    segments = math.ceil(max(math.ceil(n * width / SEGMENT), 2 * size) / size)
    c = segments * math.ceil(math.ceil(n * width / (segments * size)) / width)
    total = torch.empty_like(parts[0])
    for chunk in range(size):
        cut = slice(chunk * c, (chunk + 1) * c)
        acc = parts[chunk - 1][cut]
        for step in range(2, size + 1):
            own = parts[(chunk - step) % size][cut]
            acc = own + acc if own.dtype is torch.bfloat16 else torch.from_numpy(own.numpy() + acc.numpy())
        total[cut] = acc
    return total


def same_bits(x: Tensor, y: Tensor) -> bool:
    bits = Bits[x.element_size()]
    return torch.equal(x.view(bits), y.view(bits))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", SUMMED, ids=str)
def test_the_bits_of_gloo_and_of_the_formula(size: int, dtype: torch.dtype) -> None:
    over_gloo = run_teams(size, sums, False, dtype, SIZES)
    native = run_teams(size, sums, True, dtype, SIZES)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = [in_a_ring([summand(rank, n, dtype) for rank in range(size)]) for n in SIZES]
    for first, second in zip(over_gloo, native, strict=True):
        for want, (x_N, sent), (y_N, sent_too) in zip(wanted, first, second, strict=True):
            assert same_bits(x_N, y_N) and same_bits(want, y_N)
            assert sent == sent_too


def test_chunks_of_several_segments() -> None:
    sizes = (SEGMENT, 3 * SEGMENT // 2 + 5)  # more than 2 segments of gloo's for each of 2 ranks
    over_gloo = run_teams(2, sums, False, torch.float32, sizes)
    for first, second in zip(over_gloo, run_teams(2, sums, True, torch.float32, sizes), strict=True):
        for (x_N, _), (y_N, _) in zip(first, second, strict=True):
            assert same_bits(x_N, y_N)


@pytest.fixture
def small_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets that hold little, so that transfers stop and go on at any byte."""
    prepare = team_sockets._prepare

    def small(sock: socket.socket) -> None:
        prepare(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    monkeypatch.setattr(team_sockets, "_prepare", small)


@pytest.mark.usefixtures("small_sockets")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_transfers_that_stop_at_any_byte(dtype: torch.dtype) -> None:
    n = 150_001
    want = in_a_ring([summand(rank, n, dtype) for rank in range(4)])
    for ((x_N, _),) in run_teams(4, sums, True, dtype, (n,)):
        assert same_bits(x_N, want)


def scaled(team: Team, native: bool, n: int, cuts: list[int], inside: bool) -> Tensor:
    """A mean of pieces; every other one of them lies in the payload if `inside`."""
    groups = team.open("lane", native=native)
    x_N, summands_N = torch.full((n,), 9.0), summand(team.rank, n, torch.float32)
    pieces: list[tuple[int, Tensor]] = []
    for number, (lo, hi) in enumerate(zip([0, *cuts], [*cuts, n], strict=True)):
        if inside and number % 2:
            x_N[lo:hi] = summands_N[lo:hi]
            pieces.append((lo, x_N[lo:hi]))
        else:
            pieces.append((lo, summands_N[lo:hi].clone()))
    factor = 1.0 / team.size
    if native:
        sum_of_pieces_(groups.world, x_N, pieces, factor)
    else:
        for lo, x in pieces:
            torch.mul(x, factor, out=x_N[lo : lo + x.numel()])
        all_reduce_(groups.world, x_N)
    groups.leave(abort=False)
    return x_N


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("n", [5, 30_000, 300_001])
def test_summands_that_lie_in_pieces_and_have_a_factor(n: int, inside: bool) -> None:
    cuts = [cut for cut in (1, 2, 4, 100, 9_999, 10_000, 20_001, 250_000) if cut < n]
    over_gloo = run_teams(3, scaled, False, n, cuts, inside)
    for first, second in zip(over_gloo, run_teams(3, scaled, True, n, cuts, inside), strict=True):
        assert same_bits(first, second)


@pytest.mark.parametrize(("size", "n"), [(2, 4_000_000), (4, 8_000_001)])
def test_pieces_that_are_longer_than_sockets_hold(size: int, n: int) -> None:
    """Sockets take any number of bytes. Nothing of an element may leave before it is written: `x_N` holds others."""
    cuts = [n // 3 + 1, n // 2]
    over_gloo = run_teams(size, scaled, False, n, cuts, False)
    for first, second in zip(over_gloo, run_teams(size, scaled, True, n, cuts, False), strict=True):
        assert same_bits(first, second)


def flushed_sum(team: Team, n: int) -> Tensor:
    """Of denormals of fp16, in a thread where those of fp32 are zero."""
    groups = team.open("lane", native=True)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        found = all_reduce_(groups.world, torch.arange(1, n + 1, dtype=torch.int16).view(torch.float16))
    finally:
        torch.set_flush_denormal(False)
    groups.leave(abort=False)
    return found


@pytest.mark.parametrize("n", [1, 7, 64, 1023])
def test_denormal_halves_count_where_denormals_are_flushed(n: int) -> None:
    for total in run_teams(2, flushed_sum, n):
        assert torch.equal(total.view(torch.int16), torch.arange(2, 2 * n + 2, 2, dtype=torch.int16))


def others(team: Team) -> list[Tensor]:
    """Sums and operations that no mesh has."""
    groups = team.open("lane", native=True)
    found = [
        all_reduce_(groups.world, torch.arange(10) + team.rank),
        all_reduce_(groups.world, torch.arange(10.0) * (-1) ** team.rank, "max"),
    ]
    groups.leave(abort=False)
    return found


def test_what_it_does_not_carry_goes_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Mesh, *args: Any) -> None:
        raise AssertionError("goes over the mesh")

    monkeypatch.setattr(Mesh, "sum_", refuse)
    for total, largest in run_teams(2, others):
        assert torch.equal(total, 2 * torch.arange(10) + 1) and torch.equal(largest, torch.arange(10.0))
