"""What an exchange does on each rank: phases of arithmetic, of bytes to other ranks, and of waiting for theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from bagua.codecs import Codec, Eden, Fp16
from bagua.comm.groups import STRAIGHT_CHUNK_BYTES
from bagua.exchanges import (
    AllGather,
    AllReduce,
    DifferenceGossip,
    Exchange,
    Gossip,
    Hierarchical,
    PowerSGD,
    ScatterGather,
)
from bagua.plan.cluster import Cluster, Costs

__all__ = ["Phase", "TorchAverage", "TorchPowerSGD", "UnknownCourseError", "phases_of", "total_sent"]

_FEW = 2.0  # peers, whose ways limit as those of a ring
# Passes over a tensor that a randomized Hadamard rotation costs, there and back: `python -m benchmarks.codecs`.
_ROTATION, _ROTATION_BACK = 1.0, 0.4
# The search through a trellis, by bits and states, in parts of `Costs.search_s`, and passes to look its centroids up.
_SEARCH, _LOOK_UP = {(1, 8): 0.45, (1, 32): 1.0, (2, 8): 0.75}, 0.6
_FEEDBACK = 1.0  # passes to add residuals and keep what is left: the same benchmark, 0.5 to 1.1 by codec
# Passes by which casts of fp16, and gloo's sums of it, cost more than those of bf16: CPU time, both on one machine.
_FP16_CAST, _FP16_SUM = 0.5, 2.0
_RECEIVERS: dict[tuple[str, int], float] = {}
_Turns = tuple[float, float]
_NONE: _Turns = (0.0, 0.0)


class _Passes(NamedTuple):
    """What a rank does to a tensor of which rows are exchanged.

    Attributes:
        reads, writes: passes over the tensor to encode it, and over the result.
        turns: passes to rotate blocks before they are encoded, and back after they are decoded.
    """

    reads: float
    writes: float = 1.0
    turns: _Turns = _NONE


class _Means(NamedTuple):
    """Bytes of all means on the wire, and their turns."""

    wire: float
    turns: _Turns


class TorchPowerSGD(PowerSGD):
    """PowerSGD as DDP's hook computes it, with three all-reduces in a ring."""


class TorchAverage(AllReduce):
    """All weights copied to one tensor, divided and averaged in a ring, as torch's `PeriodicModelAverager` does."""


@dataclass(frozen=True)
class _Steps:
    """Arithmetic of PowerSGD before the mean of left factors, before that of right factors, and after it.

    Attributes:
        products: matrix products.
        passes: over the matrices, to add, subtract or copy them.
    """

    products: tuple[int, int, int]
    passes: tuple[int, int, int]


# Residuals are added as gradients are read; what is left of them and the result are products.
_OWN_STEPS = _Steps(products=(1, 2, 1), passes=(1, 0, 0))
# Residuals are added, gradients copied and results subtracted one by one.
_TORCH_STEPS = _Steps(products=(1, 1, 1), passes=(3, 0, 3))
_PRODUCT_PASS = 0.9  # of a pass: a product of low rank reads or writes the matrix. Fitted, as are torch's passes.


class UnknownCourseError(ValueError):
    """How an algorithm spends a step cannot be told from what it declares."""


@dataclass(frozen=True)
class Phase:
    """A part of an exchange that begins when the part before it has ended, on this rank and, with bytes, on its peers.

    Attributes:
        before_s: CPU seconds before the first byte leaves.
        beside_s: CPU seconds while bytes are sent and received.
        host_bytes: that leave the host over its link, in units of the link's full rate.
        device_bytes: that leave the device to others of its host.
        wait_s: latencies, one after the other.
        sent: bytes that leave the host, as they are counted.
    """

    before_s: float = 0.0
    beside_s: float = 0.0
    host_bytes: float = 0.0
    device_bytes: float = 0.0
    wait_s: float = 0.0
    sent: float = 0.0


def phases_of(
    exchange: Exchange, n: int, cluster: Cluster, costs: Costs, momenta: bool = False, gathered: bool = False
) -> list[Phase]:
    """Phases of one exchange of `n` fp32 elements among all ranks of `cluster`.

    Args:
        momenta: gradients are turned into momenta as they are read, and means of momenta back into gradients.
        gathered: see `bagua.exchanges.gathering`.

    Raises:
        UnknownCourseError: the exchange is of an unknown kind.
    """
    if cluster.ranks == 1 or n == 0:
        return []
    if isinstance(exchange, Hierarchical):
        leaders = replace(cluster, devices=1)
        among = phases_of(exchange.inner, n, leaders, costs, momenta, gathered) if cluster.hosts > 1 else []
        if cluster.devices == 1:
            return among
        up = _within_host(n, cluster, costs, reads=1)
        return [up, *among, replace(up, before_s=0.0)]
    if isinstance(exchange, TorchAverage):
        size, wire = cluster.ranks, 4.0 * n
        return [Phase(before_s=2 * n * costs.element_s), _ring(n, wire, size, cluster, costs, reads=1.0)]
    if isinstance(exchange, AllReduce):
        return _all_reduce(exchange, n, cluster, costs, gathered)
    if isinstance(exchange, ScatterGather):
        made = exchange.mean_codec(cluster.ranks)
        wire, back = (
            each.wire_bytes(-(-n // cluster.ranks), torch.float32) * cluster.ranks for each in (exchange.codec, made)
        )
        reads = 1.0 + (_FEEDBACK if exchange.error_feedback or exchange.running_scale else 0.0) + momenta
        passes = _Passes(reads, 1.0 + momenta, _turns(exchange.codec, costs))
        if cluster.ranks == 2:
            return _swapped(n, wire, cluster, costs, passes)
        course = _gathered if gathered else _to_owners_and_back
        return course(n, wire, cluster, costs, passes, _Means(back, _turns(made, costs)))
    if isinstance(exchange, AllGather):
        sent, peers = exchange.bytes_per_rank(n, cluster.ranks), float(cluster.ranks - 1)
        return _to_peers(n, sent, cluster, costs, peers=peers, mixed=1.0)
    if isinstance(exchange, Gossip):
        peers = _mean_receivers(exchange, cluster.ranks)
        return _to_peers(n, peers * exchange.codec.wire_bytes(n, torch.float32), cluster, costs, peers=max(1.0, peers))
    if isinstance(exchange, DifferenceGossip):
        peers = len(exchange.topology.receivers(0, cluster.ranks, 0))
        return _to_peers(n, exchange.bytes_per_rank(n, cluster.ranks), cluster, costs, peers=float(peers), reads=2.0)
    if isinstance(exchange, PowerSGD):
        return _low_rank(exchange, cluster, costs, gathered)
    raise UnknownCourseError(f"algorithms: what the exchange {exchange.name!r} does on the way is not known")


def _turns(codec: Codec, costs: Costs) -> _Turns:
    """Passes by which encoding and decoding cost more than with a codec that looks at each element once."""
    if not isinstance(codec, Eden):
        return _NONE
    if codec.states == 1:
        return _ROTATION, _ROTATION_BACK
    search = _SEARCH[codec.bits, codec.states] * costs.search_s / costs.element_s
    return _ROTATION + search, _ROTATION_BACK + _LOOK_UP


def _mean_receivers(exchange: Gossip, size: int) -> float:
    """Ranks that get this rank's values in a step. Kept: the period of some topologies has as many steps as ranks."""
    key = repr(exchange.topology), size
    if key not in _RECEIVERS:
        numel = 1024
        sent = exchange.bytes_per_rank(numel, size)
        _RECEIVERS[key] = sent / exchange.codec.wire_bytes(numel, torch.float32)
    return _RECEIVERS[key]


def _within_host(n: int, cluster: Cluster, costs: Costs, reads: float) -> Phase:
    """A sum to the host's leader, or its copy back: pipelined along the devices."""
    wait = (cluster.devices - 1) * (cluster.inner_latency + costs.wake_s)
    return Phase(before_s=reads * n * costs.element_s, device_bytes=4.0 * n, wait_s=wait)


def _all_reduce(exchange: AllReduce, n: int, cluster: Cluster, costs: Costs, gathered: bool = False) -> list[Phase]:
    size = cluster.ranks
    wire = float(exchange.codec.wire_bytes(n, torch.float32))
    reads = 1.0 if exchange.codec.lossless else 3.0
    if isinstance(exchange.codec, Fp16):
        reads += _FP16_CAST + _FP16_SUM * (size - 1) / size
    if gathered and size == 2:
        return _gathered(n, wire, cluster, costs, _Passes(reads))
    straight = not exchange.codec.lossless or wire <= size * STRAIGHT_CHUNK_BYTES
    if cluster.devices == 1 and wire <= exchange.direct_bytes and straight:
        course = _gathered if gathered else _to_owners_and_back
        return course(n, wire, cluster, costs, _Passes(reads))
    return [_ring(n, wire, size, cluster, costs, reads)]


def _ring(n: int, wire: float, size: int, cluster: Cluster, costs: Costs, reads: float) -> Phase:
    """An all-reduce in a ring; on many devices the better of a ring and of two binary trees, as NCCL chooses.

    Each host's link carries what its last device passes on: 2 (R-1)/R times the tensor.
    """
    sent = 2 * wire * (size - 1) / size
    rounds = 2 * (size - 1)
    hop = cluster.latency if cluster.hosts > 1 else cluster.inner_latency
    if cluster.devices > 1:
        rounds = min(rounds, 2 * math.ceil(math.log2(size)))
    wait = rounds * (hop + costs.wake_s)
    beside = 2 * sent * costs.wire_s_per_byte + reads * n * costs.element_s + 2 * rounds * costs.message_s
    crosses = cluster.hosts > 1
    return Phase(
        beside_s=beside,
        host_bytes=sent / (costs.link_efficiency * cluster.ring_share) if crosses else 0.0,
        device_bytes=sent if cluster.devices > 1 else 0.0,
        wait_s=wait,
        sent=sent if crosses else 0.0,
    )


def _to_owners_and_back(
    n: int, wire: float, cluster: Cluster, costs: Costs, passes: _Passes, means: _Means | None = None
) -> list[Phase]:
    """Each rank's part to its owner; the owner's result to all. Rows leave as they are encoded.

    Args:
        means: None: as on the way to their owners.
    """
    reads, writes, (forth, back) = passes
    returned, (mean_forth, mean_back) = (wire, passes.turns) if means is None else means
    size = cluster.ranks
    sent, returned = wire * (size - 1) / size, returned * (size - 1) / size
    row_s = (reads + forth) * n * costs.element_s / size
    efficiency = costs.mesh_efficiency * cluster.mesh_share
    away, wait = _away(sent, cluster, costs, efficiency)
    traffic = _traffic_s(sent, size - 1, costs)
    scatter = Phase(row_s, row_s * (size - 1) + traffic, *away, wait, away[0] * efficiency)
    # A chunk of each rank is decoded, the mean is encoded.
    combine = n * (1 + back + (1 + mean_forth) / size) * costs.element_s
    away, wait = _away(returned, cluster, costs, efficiency)
    beside = (writes + mean_back) * n * costs.element_s + _traffic_s(returned, size - 1, costs)
    gather = Phase(combine, beside, *away, wait, away[0] * efficiency)
    return [scatter, gather, Phase(before_s=n * costs.element_s / size)]


def _gathered(
    n: int, wire: float, cluster: Cluster, costs: Costs, passes: _Passes, means: _Means | None = None
) -> list[Phase]:
    """Each rank sends all it has to all others, and forms all means itself. Arguments as of `_to_owners_and_back`."""
    reads, writes, (forth, back) = passes
    mean_forth, mean_back = passes.turns if means is None else means.turns
    size = cluster.ranks
    sent = wire * (size - 1)
    efficiency = costs.mesh_efficiency * cluster.mesh_share
    away, wait = _away(sent, cluster, costs, efficiency)
    means_s = n * (size * (1 + back) + 1 + mean_forth + writes + mean_back) * costs.element_s
    encode_s = (reads + forth) * n * costs.element_s
    beside = _traffic_s(sent, size - 1, costs)
    return [Phase(encode_s, beside, *away, wait, away[0] * efficiency), Phase(before_s=means_s)]


def _swapped(n: int, wire: float, cluster: Cluster, costs: Costs, passes: _Passes) -> list[Phase]:
    """Two ranks send each other both rows; both decode the mean of each."""
    reads, writes, (forth, back) = passes
    row_s = (reads + forth) * n * costs.element_s / 2
    decode_s = (1 + writes + 2 * back) * n * costs.element_s / 2  # of both versions of a row
    efficiency = costs.mesh_efficiency * cluster.mesh_share
    away, wait = _away(wire, cluster, costs, efficiency)
    beside = row_s + decode_s + _traffic_s(wire, 2, costs)
    return [Phase(row_s, beside, *away, wait, away[0] * efficiency), Phase(before_s=decode_s)]


def _to_peers(
    n: int,
    sent: float,
    cluster: Cluster,
    costs: Costs,
    peers: float,
    reads: float = 1.0,
    mixed: float | None = None,
) -> list[Phase]:
    """A message to each peer, whose answers are mixed into the rank's own tensor.

    Args:
        mixed: passes over the tensor for that, if not one for each peer: sparse answers cost next to nothing.
    """
    efficiency = costs.link_efficiency * (cluster.mesh_share if peers > _FEW else cluster.ring_share)
    away, wait = _away(sent, cluster, costs, efficiency)
    traffic = _traffic_s(sent, peers, costs)
    mixing = Phase(before_s=(peers if mixed is None else mixed) * n * costs.element_s)
    return [Phase(reads * n * costs.element_s, traffic, *away, wait, away[0] * efficiency), mixing]


def _low_rank(exchange: PowerSGD, cluster: Cluster, costs: Costs, gathered: bool = False) -> list[Phase]:
    """A mean of left factors and one of right factors and all that is not compressed, each after a matrix product.

    Torch's hook has three means, one after the other.
    """
    left = right = rest = compressed = 0
    flops = 0.0
    for n, m in exchange.shapes:
        if r := exchange.rank_of(n, m):
            left, right, compressed, flops = left + n * r, right + m * r, compressed + n * m, flops + 2.0 * n * m * r
        else:
            rest += n * m
    steps = _TORCH_STEPS if isinstance(exchange, TorchPowerSGD) else _OWN_STEPS
    first, second, third = (
        Phase(
            before_s=products * flops * costs.matmul_s_per_flop
            + (passes + products * _PRODUCT_PASS) * compressed * costs.element_s
        )
        for products, passes in zip(steps.products, steps.passes, strict=True)
    )
    if isinstance(exchange, TorchPowerSGD):  # each in its turn: what is not compressed, left factors, right factors
        mean, parts = AllReduce(direct_bytes=0), ([first], rest, [], left, [second], right, [third])
    else:
        mean, parts = AllReduce(exchange.codec), ([first], left, [second], right + rest, [third])
    found: list[Phase] = []
    for part in parts:
        found += part if isinstance(part, list) else phases_of(mean, part, cluster, costs, gathered=gathered)
    return found


def _away(sent: float, cluster: Cluster, costs: Costs, efficiency: float) -> tuple[tuple[float, float], float]:
    """Bytes for the link and between devices, and the latency, of `sent` bytes spread over all other ranks."""
    if cluster.hosts == 1:
        return (0.0, sent), cluster.inner_latency + costs.wake_s
    outside = (cluster.ranks - cluster.devices) / (cluster.ranks - 1)
    over_link = cluster.devices * sent * outside  # all devices of a host share its link
    return (over_link / efficiency, sent * (1 - outside)), cluster.latency + costs.wake_s


def _traffic_s(sent: float, peers: float, costs: Costs) -> float:
    """CPU seconds of sending `sent` bytes in `peers` messages and receiving as much."""
    return 2 * sent * costs.wire_s_per_byte + 2 * peers * costs.message_s


def total_sent(phases: Sequence[Phase]) -> float:
    """Bytes that leave a host."""
    return sum(phase.sent for phase in phases)
