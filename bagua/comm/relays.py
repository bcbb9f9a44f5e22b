"""Relays: two ranks whose own link is slow reach each other through a third one.

The rank that connects asks the relay for a way to the other rank. The relay lets in who knows its secret, connects to
that rank, and passes bytes on in a thread of compiled code until one end closes its connection. It connects to members
of the team only, at addresses that they have published. The two ends prove to each other that they know the listener's
secret, as on a connection of their own, and the relay does not look at what it passes on.

A relay lives as long as its connections, which may be longer than the lanes of its own rank. At the end of the script
it stays while bytes come through it: other ranks may need the rest of the last exchange.
"""

from __future__ import annotations

import atexit
import ctypes
import hmac
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from bagua.comm.mesh import load_mesh
from bagua.comm.shutdown import is_installed, while_others_end
from bagua.comm.team_sockets import Offer, Patience, admit, connect_to, digest
from bagua.errors import CommunicationError

__all__ = ["RELAY", "Relay", "Relaying", "Way", "ask_for", "await_quiet", "relay_for", "ways_of"]

RELAY = "relay"  # what a relay's offer is published as
_MAGIC = b"BAGUARLY"
_VERSION = 1
_GREETING = struct.Struct("<8sIII32s16s32s")  # magic, version, source, target, kind, nonce, digest
_QUIET_S = 1.0  # without a byte, after which nothing is on its way any more
_MOST_S = 600.0  # that a rank stays for others at the end of its script
_log = logging.getLogger("bagua")


@dataclass(frozen=True)
class Way:
    """A connection from rank `source` to rank `target` of the world, for the mesh of this name."""

    kind: str
    source: int
    target: int


@dataclass(frozen=True)
class Relay:
    """Whom to ask for a way: rank of the world, what it has published, and what to ask for."""

    rank: int
    offer: dict[str, Any]
    way: Way


def ways_of(published: Sequence[Mapping[str, Any]], routes: Mapping[tuple[int, int], int], rank: int) -> list[Way]:
    """Return all ways that go through `rank`.

    Args:
        published: by rank, offers by kind of mesh, with the `ranks` of each.
        routes: as `add_meshes` takes them.
    """
    ways: list[Way] = []
    for source, offers in enumerate(published):
        for kind, offer in offers.items():
            members = offer.get("ranks", ())
            below = members[: members.index(source)] if source in members else ()
            for target in below:
                if routes.get((min(source, target), max(source, target))) == rank:
                    ways.append(Way(kind, source, target))
    return ways


def ask_for(sock: socket.socket, relay: Relay) -> None:
    """Ask a relay, to which `sock` is connected, for a way. What is sent after that goes to its target."""
    nonce, way = secrets.token_bytes(16), relay.way
    proof = _proof(relay.offer, way, nonce)
    sock.sendall(_GREETING.pack(_MAGIC, _VERSION, way.source, way.target, way.kind.encode(), nonce, proof))


def relay_for(own: Offer, ways: Sequence[Way], published: Sequence[Mapping[str, Any]], patience: Patience) -> Relaying:
    """Let in those who ask for these ways, connect to their targets, and pass bytes on from now on.

    Raises:
        CommunicationError: names a rank that did not ask, or that cannot be reached.
    """

    def answer(_: socket.socket, greeting: bytes) -> Way | None:
        magic, version, source, target, kind, nonce, proof = _GREETING.unpack(greeting)
        if magic != _MAGIC or version != _VERSION:
            return None
        way = Way(kind.rstrip(b"\0").decode(errors="replace"), source, target)
        return way if hmac.compare_digest(proof, _proof(own.published, way, nonce)) else None

    def who(missing: set[Way]) -> str:
        return f"rank {', '.join(map(str, sorted({way.source for way in missing})))}"

    with ExitStack() as on_failure:
        pairs: list[socket.socket] = []
        found = admit(own, ways, _GREETING.size, answer, who, patience)
        for sock in found.values():
            on_failure.callback(sock.close)
        for way, sock in found.items():
            onward = connect_to(
                published[way.target][way.kind],
                own.published["host"],
                f"rank {way.target} for rank {way.source}",
                patience,
            )
            on_failure.callback(onward.close)
            pairs += [sock, onward]
        relaying = Relaying(pairs)
        on_failure.pop_all()
    return relaying


def _proof(offer: dict[str, Any], way: Way, nonce: bytes) -> bytes:
    about = struct.pack("<II32s", way.source, way.target, way.kind.encode())
    return digest(offer, b"relay", about, nonce)


class Relaying:
    """Connections that pass bytes on to each other, until one of each two ends.

    Args:
        socks: taken over; the first two belong together, the next two, and so on.

    Raises:
        CommunicationError: there is no memory or no thread for it.
    """

    def __init__(self, socks: Sequence[socket.socket]) -> None:
        library = load_mesh()
        self._library = library
        fds = (ctypes.c_int32 * len(socks))(*(sock.fileno() for sock in socks))
        self._relay = library.bagua_relay_new(len(socks) // 2, fds)
        if not self._relay:
            raise CommunicationError("no memory or thread for a relay")
        for sock in socks:
            sock.detach()
        _forget_ended()
        _alive.append(self)
        while_others_end(await_quiet)
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)

    @property
    def ended(self) -> bool:
        """Whether all of its connections have."""
        return self._relay is None or self._library.bagua_relay_quiet_us(self._relay) < 0

    @property
    def quiet_s(self) -> float:
        """Seconds since the last byte; infinite if it has ended."""
        return float("inf") if self.ended else self._library.bagua_relay_quiet_us(self._relay) / 1e6

    @property
    def num_bytes(self) -> int:
        """Passed on so far, in both directions."""
        return self._library.bagua_relay_bytes(self._relay) if self._relay else 0

    def cut(self) -> None:
        """End all connections. From any thread."""
        if self._relay is not None:
            self._library.bagua_relay_cut(self._relay)

    def free(self) -> None:
        """End all connections, and wait for its thread."""
        if self._relay is not None:
            self._library.bagua_relay_free(self._relay)
            self._relay = None

    def close_copies(self) -> None:
        """Close the descriptors of a forked child; the parent's relay goes on."""
        if self._relay is not None:
            self._library.bagua_relay_close_copies(self._relay)
            self._relay = None


_alive: list[Relaying] = []


def _forget_ended() -> None:
    for each in list(_alive):
        if each.ended:
            _alive.remove(each)
            each.free()


def await_quiet(most_s: float = _MOST_S) -> None:
    """Wait while bytes come through this rank's relays."""
    deadline, told = time.monotonic() + most_s, False
    while (quiet_s := min((each.quiet_s for each in _alive), default=float("inf"))) < _QUIET_S:
        if time.monotonic() > deadline:
            return
        if not told:
            _log.debug("other ranks still exchange through this one, so it stays")
            told = True
        time.sleep(min(_QUIET_S - quiet_s, 0.1) + 0.001)


def _at_exit() -> None:
    """For scripts without `bagua.init_process_group`, whose ranks do not wait for each other at the end."""
    if not is_installed():
        await_quiet()


def _in_child() -> None:
    for each in _alive:
        each.close_copies()
    _alive.clear()


os.register_at_fork(after_in_child=_in_child)
