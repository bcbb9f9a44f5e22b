"""Speed of collectives relative to the link: the backend's own, and this package's.

Legend: N = fp32 elements of a tensor, R = ranks. A collective of "size" bytes has a tensor of 4 N bytes on each rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

import bagua
from bagua.bench.bounds import all_to_all_mean, payload_bits_per_s
from bagua.comm.collectives import all_gather_rows, all_to_all_rows, swap
from bagua.comm.groups import Groups
from bagua.comm.team import Team

__all__ = ["OPERATIONS", "SIZES", "Operation", "Transfers", "measure_transfer", "open_groups"]

SIZES = (16 << 10, 256 << 10, 1 << 20, 4 << 20, 10 << 20, 40 << 20)
_MIN_TRIES, _MAX_TRIES = 3, 50


class Operation(NamedTuple):
    """A collective.

    Attributes:
        name: of the row.
        make: gives what is run, from tensor size (elements) and groups.
        traffic: (bytes that a host sends, messages that depend on one another), from elements and ranks.
    """

    name: str
    make: Callable[[int, Groups], Callable[[], object]]
    traffic: Callable[[int, int], tuple[float, int]]


@dataclass(frozen=True)
class Transfers:
    """What the workers are told; see `Job`. Names of cases are "OPERATION/BYTES"."""

    kind: ClassVar[str] = "primitives"

    budget_s: float
    timeout_s: float
    cases: tuple[tuple[int, str], ...]
    switches: bool = False


def _mean(bits: float) -> Callable[[int, int], tuple[float, int]]:
    def traffic(n: int, ranks: int) -> tuple[float, int]:
        found = all_to_all_mean(n, ranks, bits)
        return found.bytes_per_host, found.num_messages

    return traffic


def _half(n: int, ranks: int) -> tuple[float, int]:
    """Each rank's part of N/R elements to or from every other."""
    return 4 * n * (ranks - 1) / ranks, min(1, ranks - 1)


def _torch_all_reduce(n: int, groups: Groups) -> Callable[[], object]:
    x_N = torch.zeros(n)
    return lambda: dist.all_reduce(x_N)


def _torch_all_to_all(n: int, groups: Groups) -> Callable[[], object]:
    x_N, out_N = torch.zeros(n), torch.zeros(n)
    return lambda: dist.all_to_all_single(out_N, x_N)


def _torch_all_gather(n: int, groups: Groups) -> Callable[[], object]:
    x_N, out_N = torch.zeros(n // groups.size), torch.zeros(n)
    return lambda: dist.all_gather_into_tensor(out_N, x_N)


def _exchange(codec: str, direct: bool = True) -> Callable[[int, Groups], Callable[[], object]]:
    def make(n: int, groups: Groups) -> Callable[[], object]:
        chosen = bagua.exchanges.mix("complete", codec)
        if direct and isinstance(chosen, bagua.exchanges.AllReduce):
            chosen = bagua.exchanges.ScatterGather(chosen.codec)
        groups.world.direct = direct
        x_N = torch.randn(n)
        state = chosen.init(x_N, groups)
        return lambda: chosen.run(x_N, state, groups, 0)

    return make


def _rows(n: int, groups: Groups) -> torch.Tensor:
    return torch.zeros(groups.size, 4 * n // groups.size, dtype=torch.uint8)


def _all_to_all_rows(n: int, groups: Groups) -> Callable[[], object]:
    rows_RW, out_RW = _rows(n, groups), _rows(n, groups)
    return lambda: all_to_all_rows(groups.world, out_RW, rows_RW)


def _all_gather_rows(n: int, groups: Groups) -> Callable[[], object]:
    rows_RW = _rows(n, groups)
    return lambda: all_gather_rows(groups.world, rows_RW)


def _swap(n: int, groups: Groups) -> Callable[[], object]:
    """With one peer: ranks 0 and 1, 2 and 3, ...; the last of an odd number has none."""
    mine, theirs = torch.zeros(n), torch.zeros(n)
    peer = groups.rank ^ 1
    pairs = ([(peer, mine)], [(peer, theirs)]) if peer < groups.size else ([], [])
    return lambda: swap(groups.world, *pairs)


_ALL = (
    Operation("torch all_reduce", _torch_all_reduce, _mean(32)),
    Operation("torch all_to_all_single", _torch_all_to_all, _half),
    Operation("torch all_gather_into_tensor", _torch_all_gather, _half),
    Operation("mean by gloo", _exchange("identity", direct=False), _mean(32)),
    Operation("mean, direct", _exchange("identity"), _mean(32)),
    Operation("mean, uint8", _exchange("minmax_uint8"), _mean(8)),
    Operation("mean, 1 bit", _exchange("sign"), _mean(1)),
    Operation("all_to_all_rows", _all_to_all_rows, _half),
    Operation("all_gather_rows", _all_gather_rows, _half),
    Operation("swap with one peer", _swap, lambda n, ranks: (4 * n, 1) if ranks > 1 else (0, 0)),
)
OPERATIONS = {each.name: each for each in _ALL}


def open_groups() -> Groups:
    """The groups on which exchanges run, one rank a node."""
    team = Team.of(None, torch.device("cpu"))
    groups = team.open("bench", False, tuple((rank,) for rank in range(team.size)))
    return groups


def measure_transfer(name: str, groups: Groups, control: Any, budget_s: float) -> dict[str, Any]:
    """Run one case on this rank; a collective.

    Returns:
        the seconds of each try, from a common start to this rank's end, and what was sent.
    """
    operation, _, size = name.partition("/")
    chosen, n = OPERATIONS[operation], int(size) // 4 // groups.size * groups.size
    run = chosen.make(n, groups)
    run()  # allocates
    dist.barrier(control)
    started = time.perf_counter()
    run()
    everyone: list[Any] = [None] * groups.size
    dist.all_gather_object(everyone, time.perf_counter() - started, control)
    num_tries = max(_MIN_TRIES, min(_MAX_TRIES, int(budget_s / max(everyone))))
    tries: list[float] = []
    for _ in range(num_tries):
        dist.barrier(control)
        started = time.perf_counter()
        run()
        tries.append(time.perf_counter() - started)
    sent, messages = chosen.traffic(n, groups.size)
    return {"tries_s": tries, "bytes_per_host": sent, "num_messages": messages}


def row_of(name: str, ranks: list[dict[str, Any]], bits_per_s: float, latency_s: float) -> dict[str, Any]:
    """A row: of each try the slowest rank counts, of the tries the median."""
    operation, _, size = name.partition("/")
    measured_s = statistics.median(max(each) for each in zip(*(rank["tries_s"] for rank in ranks), strict=True))
    bound_s = 8 * ranks[0]["bytes_per_host"] / payload_bits_per_s(bits_per_s) + ranks[0]["num_messages"] * latency_s
    return {
        "operation": operation,
        "size_bytes": int(size),
        "measured_ms": 1000 * measured_s,
        "bytes_per_host": ranks[0]["bytes_per_host"],
        "num_messages": ranks[0]["num_messages"],
        "bound_ms": 1000 * bound_s,
        "efficiency": bound_s / measured_s if measured_s > 0 else None,
        "num_tries": len(ranks[0]["tries_s"]),
    }
