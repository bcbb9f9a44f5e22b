"""A rank's seat at the agent of its launcher: the other end of `bagua.membership.seat_service`. Without torch."""

from __future__ import annotations

import operator
import os
import select
import socket
import threading
import time
from pathlib import Path
from typing import Any

from bagua.membership.actions import Verdict
from bagua.membership.messages import MessageError
from bagua.membership.seat import View
from bagua.membership.seat_frames import SEAT_VERSION, SeatFrames, pack, view_from_wire
from bagua.membership.seat_service import SEAT, short_path

__all__ = ["LauncherLost", "RemoteSeat"]

_READ = 1 << 16


class LauncherLost(ConnectionError):
    """The launcher of this host has ended, or does not answer: this rank cannot go on."""


class RemoteSeat:
    """Implements `bagua.membership.seat.Seat` in a rank that `bagua run --fault-tolerant` has started.

    `view` reads what the launcher has pushed and costs no round trip. The other calls wait for an answer.

    Args:
        path: of the socket. Default: what the launcher has set in `BAGUA_SEAT`.
        timeout_s: for the launcher to answer.

    Raises:
        ValueError: no path is given, and the environment has none.
        LauncherLost: nobody serves the socket.
    """

    def __init__(self, path: str | None = None, timeout_s: float = 300.0) -> None:
        path = path or os.environ.get(SEAT)
        if not path:
            raise ValueError(f"path: {SEAT} is not set; start the script with `bagua run --fault-tolerant`")
        self._path, self._timeout_s, self._pid = path, timeout_s, os.getpid()
        self._lock = threading.RLock()
        self._frames = SeatFrames()
        self._sequence = 0
        self._answers: dict[int, Any] = {}
        self._name, self._lost = "", ""
        self._view: View | None = None
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(Path(path)) as short:
                self._sock.connect(short)
        except OSError as error:
            self._sock.close()
            raise LauncherLost(f"the launcher does not serve the seat {path}: {error}") from None
        self._sock.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        try:
            while not self._name:
                self._await_message(deadline)
        except BaseException:
            self._sock.close()
            raise

    @property
    def name(self) -> str:
        """See `Seat`."""
        return self._name

    def view(self) -> View | None:
        """See `Seat`. While another thread waits for an answer, it is the view that was known before."""
        if self._lock.acquire(blocking=False):
            try:
                self._check()
                while self._receive():
                    pass
            finally:
                self._lock.release()
        return self._view

    def await_group(self, after: int, timeout_s: float) -> View:
        """See `Seat`."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._check()
            while True:
                while self._receive():
                    pass
                view = self._view
                if view is not None and view.rank is not None and view.group > after:
                    return view
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    suspected = self._call("suspected")
                    raise TimeoutError(f"no new epoch within {timeout_s:g} s; suspected: {suspected or 'nobody'}")
                self._poll.poll(left_s * 1000)

    def wants_weights(self) -> None:
        """See `Seat`."""
        self._call("wants_weights")

    def start_step(self, group: int, step: int) -> Verdict:
        """See `Seat`."""
        return Verdict(self._call("start_step", group=group, step=step))

    def arrived(self, group: int, step: int) -> None:
        """See `Seat`."""
        self._call("arrived", group=group, step=step)

    def finish_step(self, group: int, step: int) -> Verdict:
        """See `Seat`."""
        return Verdict(self._call("finish_step", group=group, step=step))

    def weights_fetched(self, epoch: int, step: int) -> Verdict:
        """See `Seat`."""
        return Verdict(self._call("weights_fetched", epoch=epoch, step=step))

    def exchange_failed(self, group: int) -> None:
        """See `Seat`."""
        self._call("exchange_failed", group=group)

    def close(self) -> None:
        """See `Seat`."""
        with self._lock:
            self._lost = self._lost or "this seat was closed"
            self._sock.close()

    def _call(self, verb: str, **numbers: int) -> Any:
        values = [operator.index(value) for value in numbers.values()]
        for name, value in zip(numbers, values, strict=True):
            if value < 0:
                raise ValueError(f"{name}={value}: must not be negative")
        with self._lock:
            self._check()
            self._sequence += 1
            sequence, deadline = self._sequence, time.monotonic() + self._timeout_s
            self._send(pack([sequence, verb, *values]), deadline)
            self._answers.clear()  # of a request that was given up
            while sequence not in self._answers:
                self._await_message(deadline)
            return self._answers.pop(sequence)

    def _check(self) -> None:
        if self._lost:
            raise LauncherLost(self._lost)
        if os.getpid() != self._pid:
            raise RuntimeError("a forked process has no seat: only the rank itself speaks to its launcher")

    def _send(self, frame: bytes, deadline: float) -> None:
        while frame:
            try:
                frame = frame[self._sock.send(frame) :]
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise self._silent() from None
                select.select([], [self._sock], [], 1.0)
            except OSError as error:
                raise self._ended(str(error)) from None

    def _await_message(self, deadline: float) -> None:
        while not self._receive():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise self._silent()
            self._poll.poll(left_s * 1000)

    def _receive(self) -> bool:
        """Take in what has come; False if nothing has."""
        try:
            data = self._sock.recv(_READ)
            messages = self._frames.feed(data)
        except BlockingIOError:
            return False
        except (OSError, MessageError) as error:
            raise self._ended(str(error)) from None
        if not data:
            raise self._ended("it closed the connection")
        for message in messages:
            self._take(message)
        return True

    def _take(self, message: list[Any]) -> None:
        try:
            if message[0] == "answer":
                self._answers[message[1]] = message[2]
            elif message[0] == "view":
                self._view = view_from_wire(message[1])
            elif message[0] == "hello" and message[1] == SEAT_VERSION:
                self._name, self._view = str(message[2]), view_from_wire(message[3])
            else:
                raise MessageError(f"launcher and rank are of different versions of bagua: {message!r:.80}")
        except (MessageError, IndexError, TypeError) as error:
            raise self._ended(str(error)) from None

    def _ended(self, why: str) -> LauncherLost:
        self._lost = f"the launcher of host {self._name or '?'} has ended ({why}): this rank cannot go on"
        return LauncherLost(self._lost)

    def _silent(self) -> LauncherLost:
        return LauncherLost(
            f"the launcher of host {self._name or '?'} has not answered for {self._timeout_s:g} s; it may be stopped"
        )
