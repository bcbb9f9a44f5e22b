"""Connects the ranks of a team for the native transport.

Each rank listens on the address that gloo has chosen (`team_sockets`). The higher rank of a pair connects, or has a
third rank connect for it (`relays`), and both ends prove that they know the listener's secret.

All ranks publish, whether they can listen or not, and afterwards whether they are connected. So a rank that cannot
fails on all ranks at once.
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

from bagua.comm.groups import Group, Groups
from bagua.comm.mesh import Mesh
from bagua.comm.relays import RELAY, Relay, Way, ask_for, relay_for, ways_of
from bagua.comm.team_sockets import CONGESTION, Offer, Patience, admit, congestion_control, connect_to, digest, listen
from bagua.errors import CommunicationError

__all__ = ["CONGESTION", "MeshError", "add_meshes", "congestion_control"]

_MAGIC = b"BAGUAMSH"
_HELLO = struct.Struct("<8sII16s32s")  # magic, version, rank, nonce, digest
_REPLY = struct.Struct("<32s")
_VERSION = 1
_CONNECT_S = 60.0  # to connect all ranks, once all listen


class MeshError(CommunicationError):
    """The ranks cannot be connected for the native transport. Raised on all of them alike, with the same message."""


def add_meshes(
    lanes: Sequence[Groups],
    all_gather: Callable[[str, bytes], list[bytes]],
    timeout: timedelta,
    alert: Callable[[], object] | None = None,
    routes: Mapping[tuple[int, int], int] | None = None,
) -> None:
    """Connect the ranks of the world, and those that exchange for nodes. Collective over the world. Groups stay open.

    Args:
        lanes: groups of gloo of one lane or more, opened with the addresses at which it listens.
        all_gather: of the name of a stage and a small message; returns those of all ranks, by rank of the world.
        timeout: for later exchanges.
        alert: called now and then while this rank waits for others; may raise a `CommunicationError`.
        routes: by pair of ranks of the world, the lower one first, the rank through which they reach each other. Equal
            on all ranks.

    Raises:
        MeshError: on all ranks; names those that cannot listen or connect, and why.
        CommunicationError: a rank did not take part.
    """
    among = {
        f"{lane}/{kind}": group
        for lane, groups in enumerate(lanes)
        for kind, group in (("world", groups.world), ("inter", groups.inter or groups.column))
    }
    mine = {kind: group for kind, group in among.items() if group is not None and group.size > 1}
    world, routes = lanes[0].world, routes or {}
    rank = world.ranks[world.rank]
    made: dict[str, Mesh] = {}
    with ExitStack() as offers, ExitStack() as on_failure:
        own: dict[str, Offer] = {}

        def offer() -> Any:
            for kind, group in mine.items():
                own[kind] = listen(group.address, group.size)
                offers.callback(own[kind].close)
                if routes:
                    own[kind].published["ranks"] = group.ranks
            if rank in routes.values():
                own[RELAY] = listen(world.address, world.size)
                offers.callback(own[RELAY].close)
            return {kind: each.published for kind, each in own.items()}

        published = _agree(offer, partial(all_gather, "offers"))

        def join() -> Any:
            patience = Patience(time.monotonic() + min(timeout.total_seconds(), _CONNECT_S), alert)
            halves: dict[str, _Half] = {}
            for kind, group in mine.items():
                theirs = [published[each][kind] for each in group.ranks]
                relays = _relays_of(group, kind, published, routes)
                halves[kind] = _Half(group.rank, own[kind], theirs, relays, patience)
                on_failure.callback(halves[kind].close)
            # What others have asked this rank for is on its way by now, whatever they wait for next.
            if RELAY in own:
                relay = relay_for(own[RELAY], ways_of(published, routes, rank), published, patience)
                on_failure.callback(relay.cut)
            for kind, half in halves.items():
                made[kind] = half.finish(timeout.total_seconds())
                on_failure.callback(made[kind].close)

        _agree(join, partial(all_gather, "connections"))
        on_failure.pop_all()
    for kind, group in mine.items():
        group.mesh = made[kind]
        group.mesh.ranks = group.ranks


def _agree(act: Callable[[], Any], all_gather: Callable[[bytes], list[bytes]]) -> list[Any]:
    """What `act` returns on all ranks.

    Raises:
        MeshError: on all ranks, if it raised on one.
    """
    try:
        answer = {"done": act()}
    except (OSError, CommunicationError) as error:
        answer = {"problem": str(error)}
    answers = [json.loads(each) for each in all_gather(json.dumps(answer).encode())]
    problems = [f"rank {rank}: {each['problem']}" for rank, each in enumerate(answers) if "problem" in each]
    if problems:
        raise MeshError(f"the native transport cannot be opened: {'; '.join(problems)}")
    return [each["done"] for each in answers]


def _relays_of(
    group: Group, kind: str, published: Sequence[Mapping[str, Any]], routes: Mapping[tuple[int, int], int]
) -> dict[int, Relay]:
    """By place in the group, the relays through which this rank reaches lower places."""
    rank, found = group.ranks[group.rank], dict[int, Relay]()
    for place, peer in enumerate(group.ranks[: group.rank]):
        via = routes.get((min(rank, peer), max(rank, peer)))
        if via is not None:
            found[place] = Relay(via, published[via][RELAY], Way(kind, rank, peer))
    return found


class _Half:
    """Connections of this rank to all lower ones, which have not answered yet. Waits for no rank's own work.

    Args:
        rank: this process's rank among `offers`.
        own: its offer; the caller closes it.
        offers: what the ranks have published, by rank.
        relays: of those that are reached through a third rank.

    Raises:
        CommunicationError: names the rank that cannot be reached.
    """

    def __init__(
        self,
        rank: int,
        own: Offer,
        offers: Sequence[dict[str, Any]],
        relays: Mapping[int, Relay],
        patience: Patience,
    ) -> None:
        self._rank, self._own, self._size, self._patience = rank, own, len(offers), patience
        self._socks: dict[int, socket.socket] = {}
        self._proofs: dict[int, bytes] = {}
        self._named: dict[int, str] = {}
        try:
            for peer in range(rank):
                relay, offer = relays.get(peer), offers[peer]
                self._named[peer] = f"rank {peer}" + (f", through rank {relay.rank}," if relay else "")
                way = offer if relay is None else relay.offer
                sock = self._socks[peer] = connect_to(way, own.published["host"], self._named[peer], patience)
                if relay is not None:
                    ask_for(sock, relay)
                nonce = secrets.token_bytes(16)
                self._proofs[peer] = _proof(offer, b"reply", rank, peer, nonce)
                sock.sendall(_HELLO.pack(_MAGIC, _VERSION, rank, nonce, _proof(offer, b"hello", rank, peer, nonce)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections that no mesh has taken over."""
        for sock in self._socks.values():
            sock.close()
        self._socks.clear()

    def finish(self, timeout_s: float) -> Mesh:
        """Await the lower ranks' answers and the higher ranks. Collective.

        Args:
            timeout_s: for later exchanges.

        Raises:
            CommunicationError: names the ranks that are missing.
        """
        for peer, sock in self._socks.items():
            _await_reply(sock, self._named[peer], self._proofs[peer], self._patience)
        self._socks.update(_accept(self._rank, self._own, self._size, self._patience))
        fds = [self._socks[peer].detach() if peer != self._rank else -1 for peer in range(self._size)]
        self._socks.clear()
        return Mesh(self._rank, fds, timeout_s)


def _proof(offer: dict[str, Any], what: bytes, connecting: int, listening: int, nonce: bytes) -> bytes:
    return digest(offer, what, struct.pack("<II", connecting, listening), nonce)


def _await_reply(sock: socket.socket, who: str, proof: bytes, patience: Patience) -> None:
    data = b""
    try:
        while len(data) < _REPLY.size:
            patience.await_ready(sock, selectors.EVENT_READ)
            part = sock.recv(_REPLY.size - len(data))
            if not part:
                raise CommunicationError(f"{who} has closed the connection instead of greeting")
            data += part
    except OSError as error:
        raise CommunicationError(f"{who} does not greet: {error}") from error
    if not hmac.compare_digest(data, proof):
        raise CommunicationError(f"who answers for {who} does not know its secret")


def _accept(rank: int, own: Offer, size: int, patience: Patience) -> dict[int, socket.socket]:
    """The connections of all higher ranks, greeted."""

    def answer(sock: socket.socket, greeting: bytes) -> int | None:
        magic, version, peer, nonce, proof = _HELLO.unpack(greeting)
        known = magic == _MAGIC and version == _VERSION and rank < peer < size
        if not known or not hmac.compare_digest(proof, _proof(own.published, b"hello", peer, rank, nonce)):
            return None
        try:
            sock.sendall(_REPLY.pack(_proof(own.published, b"reply", peer, rank, nonce)))
        except OSError:
            return None
        return peer

    def who(missing: set[int]) -> str:
        return f"rank {', '.join(map(str, sorted(missing)))}"

    return admit(own, range(rank + 1, size), _HELLO.size, answer, who, patience)
