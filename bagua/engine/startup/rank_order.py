"""The order of ranks in rings: given by hand, or made from measured links."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal

import torch

from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team
from bagua.engine.startup.ring_order import best_ring, worth_of

__all__ = ["MEASURED", "RankOrder", "check_rank_order", "order_of", "why_no_order"]

MEASURED = "measured"
RankOrder = Sequence[int] | Literal["measured"] | None
_VARIABLE = "BAGUA_RANK_ORDER"
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


def why_no_order(asked: tuple[int, ...] | Literal["measured"] | None, team: Team) -> ValueError | None:
    """Why these ranks cannot have that order; None if they can."""
    if asked == MEASURED and team.backend not in ("gloo", "nccl"):
        return ValueError('rank_order: "measured" measures links, and simulated ranks have none; give a list')
    if isinstance(asked, tuple) and len(asked) != team.size:
        return ValueError(f"rank_order: {list(asked)} holds {len(asked)} ranks, and there are {team.size}")
    return None


def order_of(
    asked: tuple[int, ...] | Literal["measured"] | None,
    team: Team,
    nodes: Sequence[Sequence[int]],
    device: torch.device,
) -> tuple[tuple[int, ...], str]:
    """Return the order, rank 0 first, and a line for the log. Collective if it measures.

    () is the order of the ranks where all links are much the same: small sums then need not take the ring.

    Args:
        asked: as `check_rank_order` returns it.
        team: its groups are in the order of the ranks.
        nodes: ranks by node. In a ring the ranks of a node follow one another.

    Raises:
        ValueError: the ranks of a node do not follow one another in a given order; the same on all ranks.
        CommunicationError: a rank was lost while links were measured.
    """
    if asked is None or team.size == 1:
        return (), ""
    if isinstance(asked, tuple):
        at = asked.index(0)
        order = (*asked[at:], *asked[:at])
        _check_together(order, nodes)
        return order, f"rank_order: rings in the order {_text(order)}"
    if len(nodes) <= 3:
        return (), f"rank_order: all rings of {len(nodes)} hosts have the same links, so none was measured"
    links = import_module(_HOME).measure_links(team, nodes, device, every_pair=True)
    message = _choose(links, nodes) if team.rank == 0 else None
    order, line = decode(team.broadcast_bytes("order of ranks", message))
    return tuple(order), line


def _choose(links: Any, nodes: Sequence[Sequence[int]]) -> bytes:
    leaders = [node[0] for node in nodes]
    ways = {(each.source, each.target): each.bits_per_s for each in links.between}
    rates = [[1.0 if a == b else min(ways[a, b], ways[b, a]) for b in leaders] for a in leaders]
    ring, plain = best_ring(rates), list(range(len(nodes)))
    (least, _), (before, _) = worth_of(ring, rates), worth_of(plain, rates)
    what = f"rank_order: measured the links of {len(nodes)} hosts in {links.seconds:.1f} s"
    if least < _CLEARLY * before:
        equal = before < _CLEARLY * min(ways.values())
        order = () if equal else tuple(rank for node in nodes for rank in node)
        kept = f"the ranks keep their order, whose slowest link has {before / 1e6:.0f} Mbit/s"
        return encode((order, f"{what}; {kept}"))
    order = tuple(rank for place in ring for rank in nodes[place])
    gain = f"slowest link {least / 1e6:.0f} Mbit/s, and {before / 1e6:.0f} in the order of the ranks"
    return encode((order, f"{what}; rings in the order {_text(order)}: {gain}"))


def _check_together(order: Sequence[int], nodes: Sequence[Sequence[int]]) -> None:
    for node in nodes:
        inside = [rank in node for rank in order]
        borders = sum(one != other for one, other in zip(inside, [*inside[1:], inside[0]], strict=True))
        if borders > 2:
            ranks = ", ".join(map(str, node))
            raise ValueError(f"rank_order: the ranks of one host must follow one another, and {ranks} do not")


def _text(order: Sequence[int]) -> str:
    return ",".join(map(str, order))
