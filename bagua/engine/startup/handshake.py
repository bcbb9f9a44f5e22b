"""The handshake: compares modules and options of all ranks before any collective."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from bagua.comm.store_team import decode, decode_alike, encode
from bagua.comm.team import Team
from bagua.engine.startup.sparse_buffers import KIND, REMEDY
from bagua.errors import RankMismatchError

__all__ = ["Agreement", "shake_hands"]


@dataclass(frozen=True)
class Agreement:
    """Result of the handshake.

    Attributes:
        nodes: ranks by node.
        all_ready: every rank has an engine on the module that still works.
        over_gloo: by rank, why it uses gloo; "": it does not have to.
    """

    nodes: tuple[tuple[int, ...], ...]
    all_ready: bool
    over_gloo: tuple[str, ...]


def shake_hands(
    team: Team,
    signature: list[list[str]],
    options: dict[str, str],
    problem: Exception | None,
    ready: bool,
    over_gloo: str,
) -> Agreement:
    """Compare all ranks' arguments; raise on every rank if one has a problem or they differ. Collective.

    Args:
        team: the ranks.
        signature: rows of (kind, name, shape, dtype), compared in order.
        options: other values that must be equal, by name.
        problem: error of this rank, if any; raised here, reported to the others.
        ready: whether an earlier engine of the module can still exchange on this rank.
        over_gloo: see `Agreement`.

    Raises:
        RankMismatchError: another rank has a problem or is in another call, or the first difference found; names rank
            and tensor.
        CommunicationError: a rank did not arrive within the timeout.
    """
    full = encode(signature)
    brief: dict[str, Any] = {
        "node": team.node,
        "digest": hashlib.sha256(full).hexdigest(),
        "options": options,
        "ready": ready,
        "over gloo": over_gloo,
        "problem": None if problem is None else f"{type(problem).__name__}: {problem}",
    }
    what = "bagua.distribute()"
    briefs = decode_alike(what, team.all_gather_bytes(what, encode(brief)), brief)
    if problem is not None:
        raise problem
    for rank, other in enumerate(briefs):
        if other["problem"] is not None:
            raise RankMismatchError(f"rank {rank} cannot distribute its module: {other['problem']}")
    for rank, other in enumerate(briefs):
        for name, value in briefs[0]["options"].items():
            if other["options"].get(name) != value:
                raise RankMismatchError(
                    f"{name} differs: rank {rank} has {other['options'].get(name)}, rank 0 has {value}"
                )
    if any(other["digest"] != briefs[0]["digest"] for other in briefs):
        # Rare and fatal, so a second, larger all-gather is cheaper than always sending every list.
        lists = [decode(message) for message in team.all_gather_bytes("comparison of parameters", full)]
        for rank, other in enumerate(lists):
            if other != lists[0]:
                raise RankMismatchError(_first_difference(lists[0], other, rank))
    nodes = team.discover_sites([other["node"] for other in briefs])
    ready = all(other["ready"] for other in briefs)
    return Agreement(nodes, ready, tuple(other["over gloo"] for other in briefs))


def _first_difference(ours: list[list[str]], theirs: list[list[str]], rank: int) -> str:
    for (kind, name, shape, dtype), (kind2, name2, shape2, dtype2) in zip(ours, theirs, strict=False):
        if (kind, name) != (kind2, name2):
            return f"ranks hold different tensors: rank {rank} has {kind2} {name2!r} where rank 0 has {kind} {name!r}"
        if kind == KIND and (shape, dtype) != (shape2, dtype2):
            return f"{kind} {name!r} is [{shape2}] {dtype2} on rank {rank} and [{shape}] {dtype} on rank 0; {REMEDY}"
        if shape != shape2:
            return f"{kind} {name!r} has shape [{shape2}] on rank {rank} and [{shape}] on rank 0"
        if dtype != dtype2:
            return f"{kind} {name!r} is {dtype2} on rank {rank} and {dtype} on rank 0"
    longer, who = (theirs, f"rank {rank}") if len(theirs) > len(ours) else (ours, "rank 0")
    kind, name, *_ = longer[min(len(ours), len(theirs))]
    return f"rank {rank} holds {len(theirs)} tensors, rank 0 {len(ours)}: only {who} has {kind} {name!r}"
