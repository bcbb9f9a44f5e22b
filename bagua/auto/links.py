"""Measurement of the links between hosts: rate of one flow and of several, latency, both ways; in bounded time."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from bagua.comm.groups import Group
from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team

__all__ = ["Link", "Links", "measure_links", "rounds_of"]

_FLOWS = 4
_PINGS = 5
_FIRST_BYTES = 32 * 2**10
_MOST_BYTES = 32 * 2**20
_GROWTH = 4
_LONG_ENOUGH_S = 0.03  # for a transfer to say something of the rate, beside round trips and slow start
_ROUND_TRIPS = 3
_OUTWARD_S = 0.2  # for which a host sends to all others at once
_MOST_ROUNDS = 4  # with more hosts than that, not every pair is measured
_AGAIN = 2
_SLOW = 0.8  # of what both ends have with others: such a pair is measured twice


@dataclass(frozen=True)
class Link:
    """The way from one rank to another.

    Attributes:
        source, target: ranks.
        one_flow: payload bits per second over one connection.
        several_flows: over four connections at once.
        latency_s: one way, half of a round trip of a small message.
    """

    source: int
    target: int
    one_flow: float
    several_flows: float
    latency_s: float

    @property
    def bits_per_s(self) -> float:
        """The rate that exchanges can have."""
        return max(self.one_flow, self.several_flows)


@dataclass(frozen=True)
class Links:
    """All links that were measured.

    Attributes:
        between: nodes.
        within: nodes, where they have several ranks.
        seconds: that the measurement took.
        outward: bits per second that the first rank of each node sends to those of all others at once, in the order of
            the nodes. Measured with all pairs, over gloo; else ().

    Examples:
        >>> from bagua.auto.links import Link, Links
        >>> Links((Link(0, 1, 9e7, 9e7, 5e-3), Link(1, 0, 8e7, 8e7, 5e-3)), (), 0.5).bandwidth
        80000000.0
    """

    between: tuple[Link, ...]
    within: tuple[Link, ...]
    seconds: float
    outward: tuple[float, ...] = ()

    @property
    def bandwidth(self) -> float:
        """Bits per second of the slowest node's way out or in, for which all wait; within a node if it is alone.

        The best of a node's measurements counts: what disturbs one of them is not the link.
        """
        links = self.between or self.within
        outward: dict[int, float] = {}
        inward: dict[int, float] = {}
        for each in links:
            outward[each.source] = max(outward.get(each.source, 0.0), each.bits_per_s)
            inward[each.target] = max(inward.get(each.target, 0.0), each.bits_per_s)
        return min(*outward.values(), *inward.values())

    @property
    def ring_bandwidth(self) -> float:
        """Where each node sends to the next one only: the slowest of those ways, as far as it was measured."""
        rates = {(each.source, each.target): each.bits_per_s for each in self.between}
        nodes = sorted({each.source for each in self.between})
        ways = zip(nodes, nodes[1:] + nodes[:1], strict=True)
        return min([self.bandwidth, *(rates[way] for way in ways if way in rates)])

    @property
    def mesh_bandwidth(self) -> float:
        """Where each node sends the same to all others at once: its slowest way has one share of its rate."""
        others = len({each.source for each in self.between}) - 1
        return min([self.bandwidth, *(others * each.bits_per_s for each in self.between)])

    def differs(self, other: Links, factor: float) -> bool:
        """Whether a rate has changed by `factor` or more: of hosts, or of the ways between them."""
        pairs = (
            (self.bandwidth, other.bandwidth),
            (self.ring_bandwidth, other.ring_bandwidth),
            (self.mesh_bandwidth, other.mesh_bandwidth),
        )
        return any(max(pair) >= factor * min(pair) for pair in pairs)

    @property
    def latency_s(self) -> float:
        """The median, one way."""
        return statistics.median(each.latency_s for each in self.between or self.within)

    @property
    def asymmetry(self) -> float:
        """The largest ratio of the rates of the two ways of a pair."""
        rates = {(each.source, each.target): each.bits_per_s for each in self.between or self.within}
        pairs = [(rate, rates[b, a]) for (a, b), rate in rates.items() if a < b and (b, a) in rates]
        return max((max(pair) / min(pair) for pair in pairs), default=1.0)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            **asdict(self),
            "between": [asdict(e) for e in self.between],
            "within": [asdict(e) for e in self.within],
        }

    @classmethod
    def from_dict(cls, data: Any) -> Links:
        """The inverse of `as_dict`."""
        return cls(
            tuple(Link(**each) for each in data["between"]),
            tuple(Link(**each) for each in data["within"]),
            data["seconds"],
            tuple(data.get("outward", ())),
        )


def rounds_of(count: int, most: int = _MOST_ROUNDS) -> list[list[tuple[int, int]]]:
    """Pairs of `count` hosts, in rounds in which each host is in one pair at most; all pairs if `most` suffices.

    Examples:
        >>> from bagua.auto.links import rounds_of
        >>> rounds_of(4)
        [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    even = count + count % 2
    every: list[list[tuple[int, int]]] = []
    ring = list(range(1, even))
    for _ in range(even - 1):
        seats = [0, *ring]
        pairs = [(seats[k], seats[even - 1 - k]) for k in range(even // 2)]
        every.append(sorted((min(a, b), max(a, b)) for a, b in pairs if max(a, b) < count))
        ring = [ring[-1], *ring[:-1]]
    step = -(-len(every) // most)
    return every[::step]


def measure_links(
    team: Team, nodes: Sequence[Sequence[int]], device: torch.device, *, every_pair: bool = False
) -> Links:
    """Measure, between the first ranks of nodes and between the first two ranks of a node. Collective.

    A host takes part in one measurement at a time. Takes about a second for each round of pairs on slow links, and
    four rounds at most; less on fast links. Pairs that are slower than both their hosts are with others are measured
    twice, as something may have disturbed the first time.

    Args:
        every_pair: measure all pairs of nodes, in as many rounds as there are nodes, less one if they are even; and
            what each node sends to all others at once.

    Raises:
        CommunicationError: a rank is lost; names it.
    """
    key, team = team.next_lane(), replace(team, order=())  # below, ranks are places in groups
    leaders = [node[0] for node in nodes]
    within = [(node[0], node[1]) for node in nodes if len(node) > 1]
    started = time.perf_counter()
    mine: list[Link] = []
    with ExitStack() as stack:
        groups = [team.open(f"links/{key}/{k}") for k in range(_FLOWS)]
        for each in groups:
            stack.enter_context(team.naming_missing_ranks("measurement of links", f"links/{key}/missing", each))
        flows = [each.world for each in groups]
        rounds = rounds_of(len(leaders), len(leaders) if every_pair else _MOST_ROUNDS)
        for pairs in ([(leaders[a], leaders[b]) for a, b in each] for each in rounds):
            mine += _measure_mine(flows, pairs, device)
        mine += _measure_mine(flows, within, device)
        found = _gathered(team, mine)
        slow = _slow_pairs([each for each in found if each.source in leaders and each.target in leaders])
        if slow:
            mine = []
            for pairs in ([(leaders[a], leaders[b]) for a, b in each] for each in rounds_of(len(leaders))):
                mine += _measure_mine(flows, [pair for pair in pairs if pair in slow], device)
            found = _better(found, _gathered(team, mine))
        outward: tuple[float, ...] = ()
        if every_pair and team.backend == "gloo" and len(leaders) > 2:
            own = _measure_outward(flows[0], leaders, found, device)
            told = [decode(each) for each in team.all_gather_bytes("measured ways out", encode(own))]
            outward = tuple(told[rank] for rank in leaders)
    for each in groups:
        each.leave(abort=False)
    inner = set(itertools.chain(within, ((b, a) for a, b in within)))
    seconds = decode(team.broadcast_bytes("measured links", _seconds(team, started)))
    return Links(
        tuple(each for each in found if (each.source, each.target) not in inner),
        tuple(each for each in found if (each.source, each.target) in inner),
        seconds,
        outward,
    )


def _gathered(team: Team, mine: Sequence[Link]) -> list[Link]:
    reports = team.all_gather_bytes("measured links", encode([asdict(each) for each in mine]))
    return [Link(**link) for report in reports for link in decode(report)]


def _slow_pairs(links: Sequence[Link]) -> set[tuple[int, int]]:
    """Pairs with a way slower than both its ends are elsewhere: a slow way, or a measurement that was disturbed."""
    outward: dict[int, float] = {}
    inward: dict[int, float] = {}
    for each in links:
        outward[each.source] = max(outward.get(each.source, 0.0), each.bits_per_s)
        inward[each.target] = max(inward.get(each.target, 0.0), each.bits_per_s)
    return {
        (min(each.source, each.target), max(each.source, each.target))
        for each in links
        if each.bits_per_s < _SLOW * min(outward[each.source], inward[each.target])
    }


def _better(links: Sequence[Link], again: Sequence[Link]) -> list[Link]:
    """The best of two measurements of each way."""
    second = {(each.source, each.target): each for each in again}
    found: list[Link] = []
    for one in links:
        two = second.get((one.source, one.target), one)
        flows = max(one.one_flow, two.one_flow), max(one.several_flows, two.several_flows)
        found.append(Link(one.source, one.target, *flows, min(one.latency_s, two.latency_s)))
    return found


def _seconds(team: Team, started: float) -> bytes | None:
    return encode(round(time.perf_counter() - started, 3)) if team.rank == 0 else None


def _measure_mine(flows: Sequence[Group], pairs: Sequence[tuple[int, int]], device: torch.device) -> list[Link]:
    """Measure the pair that this rank is in; returns the way from this rank to the other."""
    rank = flows[0].rank
    for low, high in pairs:
        if rank == low:
            link = _send(flows, high, device)
            _answer(flows, high, device)
            return [link]
        if rank == high:
            _answer(flows, low, device)
            return [_send(flows, low, device)]
    return []


def _send(flows: Sequence[Group], peer: int, device: torch.device) -> Link:
    trip_s = min(_transfer(flows[:1], peer, 1, device) for _ in range(_PINGS))
    nbytes, seconds = _FIRST_BYTES, 0.0
    while True:
        seconds = _transfer(flows[:1], peer, nbytes, device)
        if nbytes * _GROWTH > _MOST_BYTES or seconds - trip_s >= max(_LONG_ENOUGH_S, _ROUND_TRIPS * trip_s):
            break
        nbytes *= _GROWTH
    one = min([seconds, _transfer(flows[:1], peer, nbytes, device)])
    several = min(_transfer(flows, peer, nbytes // len(flows), device) for _ in range(_AGAIN))
    _tell(flows[0], peer, 0, 0, device)
    least_s = max(trip_s / 4, 1e-6)  # where a round trip is all there is to a transfer
    rates = [8.0 * nbytes / max(each - trip_s, least_s) for each in (one, several)]
    return Link(flows[0].rank, peer, rates[0], rates[1], trip_s / 2)


def _measure_outward(flow: Group, leaders: Sequence[int], links: Sequence[Link], device: torch.device) -> float:
    """Bits per second that this rank sends to all other leaders at once, to each in proportion to its link.

    One leader sends at a time. A network card that several links share shows in it. 0 for a rank that is no leader.
    """
    found, rates = 0.0, {(each.source, each.target): each for each in links}
    if flow.rank not in leaders:
        return found
    for source in leaders:
        others = [rank for rank in leaders if rank != source]
        ways = [rates[source, rank] for rank in others]
        seconds = min(_OUTWARD_S, 8.0 * _MOST_BYTES / max(way.bits_per_s for way in ways))
        sizes = [max(int(way.bits_per_s * seconds / 8), 1) for way in ways]
        trip_s = 2 * max(way.latency_s for way in ways)
        for _ in range(_AGAIN):
            if flow.rank == source:
                payloads = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
                answers = [torch.zeros(1, dtype=torch.uint8, device=device) for _ in others]
                started = time.perf_counter()
                works = [flow.send(each, rank, 1) for each, rank in zip(payloads, others, strict=True)]
                works += [flow.recv(each, rank, 2) for each, rank in zip(answers, others, strict=True)]
                for work in works:
                    work.wait()
                took_s = time.perf_counter() - started
                found = max(found, 8.0 * sum(sizes) / max(took_s - trip_s, took_s / 4))
            else:
                size = sizes[others.index(flow.rank)]
                flow.recv(torch.empty(size, dtype=torch.uint8, device=device), source, 1).wait()
                flow.send(torch.ones(1, dtype=torch.uint8, device=device), source, 2).wait()
    return found


def _transfer(flows: Sequence[Group], peer: int, nbytes: int, device: torch.device) -> float:
    """Send `nbytes` over each of `flows` and await the answer; returns seconds."""
    _tell(flows[0], peer, nbytes, len(flows), device)
    payload = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    _synchronize(device)
    started = time.perf_counter()
    for work in [flow.send(payload, peer, 1) for flow in flows]:
        work.wait()
    flows[0].recv(torch.zeros(1, dtype=torch.uint8, device=device), peer, 2).wait()
    _synchronize(device)
    return time.perf_counter() - started


def _tell(flow: Group, peer: int, nbytes: int, flows: int, device: torch.device) -> None:
    """Announce a transfer and wait until the peer is ready for it; no bytes: there is none to come."""
    flow.send(torch.tensor([nbytes, flows], dtype=torch.int64, device=device), peer, 0).wait()
    flow.recv(torch.zeros(1, dtype=torch.uint8, device=device), peer, 3).wait()


def _answer(flows: Sequence[Group], peer: int, device: torch.device) -> None:
    while True:
        head = torch.zeros(2, dtype=torch.int64, device=device)
        flows[0].recv(head, peer, 0).wait()
        nbytes, count = head.tolist()
        targets = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
        # In the order of the sender: transfers of a pair over NCCL run one after the other, whatever their tags.
        flows[0].send(torch.ones(1, dtype=torch.uint8, device=device), peer, 3).wait()
        if not nbytes:
            return
        for work in [flow.recv(each, peer, 1) for flow, each in zip(flows, targets, strict=False)]:
            work.wait()
        flows[0].send(torch.ones(1, dtype=torch.uint8, device=device), peer, 2).wait()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
