"""Part 12: how long the CPU takes to launch a codec's kernels and whole exchanges, which run on the GPU afterwards.

While a thread of the backward pass launches an exchange it launches nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from bagua.codecs import Codec, Eden, Int4, MinMaxUInt8, Sign
from bagua.exchanges import AllReduce, Exchange, ScatterGather
from benchmarks.gpu import mirror
from benchmarks.gpu.record import Record

__all__ = ["run"]

_CODECS: tuple[Codec, ...] = (MinMaxUInt8(), Int4(), Sign(), Eden(), Eden(bits=2, states=8))
_EXCHANGES: tuple[Exchange, ...] = (
    *(
        AllReduce(),
        ScatterGather(MinMaxUInt8()),
        ScatterGather(Sign(), True),
        ScatterGather(Eden(), running_scale=True),
    ),
    ScatterGather(Eden(), running_scale=True, gather_codec=Eden(bits=2, states=8)),
)
_N = 1 << 16  # elements: so few that the GPU is done before the next launch


def run(record: Record) -> None:
    """A row for each operation of a codec, and each exchange of a mirrored team of two."""
    on_gpu = torch.cuda.is_available() and not record.dry
    device = torch.device("cuda" if on_gpu else "cpu")
    record.facts.update(device=str(device), elements=_N, includes_the_work=not on_gpu)
    for codec in _CODECS:
        with record.check(f"{codec!r}"):
            for name, call in _operations(codec, device).items():
                record.row(codec=repr(codec), operation=name, launch_us=_launch_us(call, device))
    team = mirror.MirrorTeam(mirror.nccl if on_gpu else mirror.gloo)
    groups = team.open("launches", nodes=[[0, 1]])
    for exchange in _EXCHANGES:
        with record.check(exchange.name), torch.no_grad():
            x = torch.randn(_N, device=device)
            state = exchange.init(x, groups)
            call = lambda exchange=exchange, x=x, state=state: exchange.run(x, state, groups, 0)  # noqa: E731
            record.row(exchange=exchange.name, launch_us=_launch_us(call, device))
    groups.leave(abort=False)


def _operations(codec: Codec, device: torch.device) -> dict[str, Callable[[], Any]]:
    n = _N // 2
    x = torch.randn(2, n, device=device)
    y, residual = torch.empty_like(x), torch.zeros_like(x)
    wire = codec.encode(x).clone()
    again, one = torch.empty_like(wire), torch.empty_like(wire[:1])
    return {
        "encode": lambda: codec.encode(x, out=again),
        "decode": lambda: codec.decode(wire, n, out=y),
        "encode_with_feedback": lambda: codec.encode_with_feedback(x, residual, out=again),
        "decode_mean_encode": lambda: codec.decode_mean_encode(wire, n, 0.5, out=one),
    }


def _launch_us(call: Callable[[], Any], device: torch.device) -> float:
    """The least mean of five times 20 calls, so that what else runs on the CPU hardly counts."""

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    call()
    means = []
    for _ in range(5):
        settle()
        began = time.perf_counter()
        for _ in range(20):
            call()
        means.append((time.perf_counter() - began) / 20)
    settle()
    return round(min(means) * 1e6, 1)
