"""How ranks are arranged: their order in rings, given or measured, and through whom slow pairs send."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

import torch

from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team
from bagua.engine.startup.ring_order import best_ring, worth_of
from bagua.engine.startup.routes import best_routes, slowest_share

__all__ = ["MEASURED", "Arrangement", "RankOrder", "arrange", "check_rank_order", "check_routes", "why_no_order"]

MEASURED = "measured"
RankOrder = Sequence[int] | Literal["measured"] | None
_VARIABLE = "BAGUA_RANK_ORDER"
_ROUTES = ("measured", "direct")
_ROUTES_VARIABLE = "BAGUA_ROUTES"
_HOME = "bagua.auto.links"  # it lies above the engine, and is imported when first asked for
# A ring counts as faster from this ratio of slowest links on: below it measurements differ by chance, and with them
# the order of sums would.
_CLEARLY = 1.2


def check_rank_order(asked: Any) -> tuple[int, ...] | Literal["measured"] | None:
    """Return what was asked for, or what BAGUA_RANK_ORDER says ("measured", or ranks with commas between them).

    Raises:
        ValueError, TypeError: it is no order of ranks; names the argument or the variable.
    """
    name = "rank_order"
    if asked is None:
        text, name = os.environ.get(_VARIABLE, "").strip(), _VARIABLE
        if not text:
            return None
        words = text.split(",")
        asked = text if text == MEASURED or not all(word.strip().isdigit() for word in words) else [*map(int, words)]
    if isinstance(asked, str):
        if asked != MEASURED:
            raise ValueError(f"{name}: expected {MEASURED!r} or a list of ranks, got {asked!r}")
        return MEASURED
    if not isinstance(asked, Sequence) or any(isinstance(each, bool) or not isinstance(each, int) for each in asked):
        raise TypeError(f"{name}: expected {MEASURED!r} or a list of ranks, got {asked!r}")
    if sorted(asked) != list(range(len(asked))):
        raise ValueError(f"{name}: expected each rank from 0 on once, got {list(asked)}")
    return tuple(asked)


def check_routes(asked: Any) -> str | None:
    """Return what was asked for, or what BAGUA_ROUTES says.

    Raises:
        ValueError: it is neither "measured" nor "direct"; names the argument or the variable.
    """
    name = "routes"
    if asked is None:
        asked, name = os.environ.get(_ROUTES_VARIABLE, "").strip() or None, _ROUTES_VARIABLE
    if asked is not None and asked not in _ROUTES:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, _ROUTES))}, got {asked!r}")
    return asked


def why_no_order(
    asked: tuple[int, ...] | Literal["measured"] | None, routes: str | None, team: Team
) -> ValueError | None:
    """Why these ranks cannot have that order, or those routes; None if they can."""
    if routes == MEASURED and team.backend not in ("gloo", "nccl"):
        return ValueError('routes: "measured" measures links, and simulated ranks have none')
    if asked == MEASURED and team.backend not in ("gloo", "nccl"):
        return ValueError('rank_order: "measured" measures links, and simulated ranks have none; give a list')
    if isinstance(asked, tuple) and len(asked) != team.size:
        return ValueError(f"rank_order: {list(asked)} holds {len(asked)} ranks, and there are {team.size}")
    return None


@dataclass(frozen=True)
class Arrangement:
    """The order of the ranks and their routes, as `Team` has them, and lines for the log."""

    order: tuple[int, ...] = ()
    routes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


def arrange(
    order: tuple[int, ...] | Literal["measured"] | None,
    routes: str | None,
    team: Team,
    nodes: Sequence[Sequence[int]],
    device: torch.device,
    native: bool,
) -> Arrangement:
    """Find the order of the ranks, rank 0 first, and the routes of slow pairs. Collective if it measures.

    The order is () where all links are much the same: small sums then need not take the ring.

    Args:
        order: as `check_rank_order` returns it.
        routes: as `check_routes` returns it; None: as the order is.
        team: its groups are in the order of the ranks.
        nodes: ranks by node. In a ring the ranks of a node follow one another.
        native: the native transport will connect the ranks; nothing else has routes.

    Raises:
        ValueError: the ranks of a node do not follow one another in a given order; the same on all ranks.
        CommunicationError: a rank was lost while links were measured.
    """
    lines: list[str] = []
    given: tuple[int, ...] = ()
    if isinstance(order, tuple) and team.size > 1:
        at = order.index(0)
        given = (*order[at:], *order[:at])
        _check_together(given, nodes)
        lines.append(f"rank_order: rings in the order {_text(given)}")
    routed = routes == MEASURED or (routes is None and order == MEASURED)
    if routes == MEASURED and team.size > 1 and not native:
        lines.append("routes: none, since the native transport does not carry this module's exchanges")
    elif routes == MEASURED and team.size > 1 and len(nodes) < 3:
        lines.append("routes: none, since there is no third host")
    ordered, routed = order == MEASURED and len(nodes) > 3, routed and native and len(nodes) > 2
    if order == MEASURED and not ordered and team.size > 1:
        so = "" if routed else ", so none was measured"
        lines.append(f"rank_order: all rings of {len(nodes)} hosts have the same links{so}")
    if not ordered and not routed:
        return Arrangement(given, {}, tuple(lines))
    links = import_module(_HOME).measure_links(team, nodes, device, every_pair=True)
    message = _choose(links, nodes, ordered, routed) if team.rank == 0 else None
    found, ways, told = decode(team.broadcast_bytes("arrangement of ranks", message))
    by_rank = {pair: rank for a, b, via in ways for pair, rank in _ranks_of(nodes[a], nodes[b], nodes[via])}
    return Arrangement(tuple(found) or given, by_rank, (*lines, *told))


def _ranks_of(some: Sequence[int], others: Sequence[int], via: Sequence[int]) -> list[tuple[tuple[int, int], int]]:
    """Routes between the ranks of two nodes, shared by the ranks of a third one."""
    return [((min(a, b), max(a, b)), via[(i + k) % len(via)]) for i, a in enumerate(some) for k, b in enumerate(others)]


def _choose(links: Any, nodes: Sequence[Sequence[int]], ordered: bool, routed: bool) -> bytes:
    leaders = [node[0] for node in nodes]
    ways = {(each.source, each.target): each for each in links.between}
    rates = [[1.0 if a == b else min(ways[a, b].bits_per_s, ways[b, a].bits_per_s) for b in leaders] for a in leaders]
    latencies = [[0.0 if a == b else min(ways[a, b].latency_s, ways[b, a].latency_s) for b in leaders] for a in leaders]
    order, told = _ring(rates, nodes) if ordered else ((), "")
    routes = best_routes(rates, latencies, links.outward) if routed else {}
    what = f"measured the links of {len(nodes)} hosts in {links.seconds:.1f} s"
    lines = [f"rank_order: {what}; {told}"] if ordered else []
    if routes:
        by = ", ".join(f"{leaders[a]}-{leaders[b]} through {leaders[via]}" for (a, b), via in sorted(routes.items()))
        direct, shared = slowest_share(rates, {}), slowest_share(rates, routes)
        gain = f"the slowest pair has {shared / 1e6:.0f} Mbit/s, and {direct / 1e6:.0f} directly"
        lines.append(f"routes: {what}; pairs of ranks that send through another one: {by}: {gain}")
    elif routed:
        lines.append(f"routes: {what}; all pairs send directly")
    return encode((order, [(a, b, via) for (a, b), via in sorted(routes.items())], lines))


def _ring(rates: Sequence[Sequence[float]], nodes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], str]:
    """The order of the ranks, and what is told of it."""
    ring, plain = best_ring(rates), list(range(len(nodes)))
    (least, _), (before, _) = worth_of(ring, rates), worth_of(plain, rates)
    if least < _CLEARLY * before:
        slowest = min(rate for a, row in enumerate(rates) for b, rate in enumerate(row) if a != b)
        order = () if before < _CLEARLY * slowest else tuple(rank for node in nodes for rank in node)
        return order, f"the ranks keep their order, whose slowest link has {before / 1e6:.0f} Mbit/s"
    order = tuple(rank for place in ring for rank in nodes[place])
    gain = f"slowest link {least / 1e6:.0f} Mbit/s, and {before / 1e6:.0f} in the order of the ranks"
    return order, f"rings in the order {_text(order)}: {gain}"


def _check_together(order: Sequence[int], nodes: Sequence[Sequence[int]]) -> None:
    for node in nodes:
        inside = [rank in node for rank in order]
        borders = sum(one != other for one, other in zip(inside, [*inside[1:], inside[0]], strict=True))
        if borders > 2:
            ranks = ", ".join(map(str, node))
            raise ValueError(f"rank_order: the ranks of one host must follow one another, and {ranks} do not")


def _text(order: Sequence[int]) -> str:
    return ",".join(map(str, order))
