"""Three agents on loopback, and the seats of their ranks: beside the agent, or behind a socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bagua.membership import Agent, Blocked, Epoch, Member, Options, Record
from bagua.membership.remote_seat import RemoteSeat
from bagua.membership.seat import LocalSeat, Seat, payload_of
from bagua.membership.seat_service import SeatService
from bagua.membership.transport import Transport

TOKEN = b"sixteen bytes or more"
LIMIT_S = 90.0


def wait_for(found: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not found():
        assert time.monotonic() < end, f"no {what} within {LIMIT_S} s"
        time.sleep(0.01)


class Hosts:
    """They count each other as lost by closed connections only, so a busy machine makes no difference.

    Args:
        directory: for the sockets of remote seats; None: the seats are local.
    """

    def __init__(self, directory: Path | None) -> None:
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in listeners]
        members = [Member(f"n{i}", 0, each, payload_of(f"store{i}:1")) for i, each in enumerate(addresses)]
        epoch, options = Epoch.first(members), Options(detect_s=20.0)
        self.transports = [
            Transport(
                Agent(Record("job", m.name, 0, m.address), options, time.monotonic(), epoch=epoch, payload=m.payload),
                sock,
                TOKEN,
            )
            for m, sock in zip(members, listeners, strict=True)
        ]
        wait_for(lambda: all(len(each.connected) == 2 for each in self.transports), "connections")
        self.services: list[SeatService] = []
        self.seats: list[Seat] = []
        self._pumps: list[threading.Thread] = []
        for at, transport in enumerate(self.transports):
            if directory is None:
                self.seats.append(LocalSeat(transport))
                continue
            (directory / str(at)).mkdir(mode=0o700)
            self.services.append(SeatService(transport, directory / str(at)))
            self._pumps.append(threading.Thread(target=_pump, args=(transport, self.services[-1])))
            self._pumps[-1].start()
            self.seats.append(RemoteSeat(str(self.services[-1].path)))

    def lose(self, at: int) -> None:
        """The launcher of a host ends."""
        if self.services:
            self.services[at].close()
        self.transports[at].close()

    def close(self) -> None:
        for seat in self.seats:
            seat.close()
        for transport in self.transports:
            transport.events.put(_END)
        for pump in self._pumps:
            pump.join(LIMIT_S)
            assert not pump.is_alive(), "a thread that waits for events has not ended"
        for at in range(len(self.transports)):
            self.lose(at)


_END = Blocked("the test has ended")


def _pump(transport: Transport, service: SeatService) -> None:
    """What the launcher does: an event of the membership makes the seats push a new view."""
    while transport.events.get() is not _END:
        service.refresh()
