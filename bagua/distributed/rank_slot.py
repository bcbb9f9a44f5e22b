"""The place of one rank of a host: its process, its seat at the agent, and how often it was started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from bagua.distributed.rank_process import RankProcess, Start
from bagua.membership import Epoch, Member
from bagua.membership.epoch import NO_MODEL
from bagua.membership.seat import View
from bagua.membership.seat_service import SEAT, SeatService
from bagua.membership.transport import Transport

__all__ = ["RankSlot", "how_it_ended"]

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)  # not by a fault of the rank's own


class RankSlot:
    """One rank of this host; when it is started again, it is another one for the other members (`Member.seats`).

    Args:
        transport: runs the agent of the host.
        directory: of the host, for the seat and the tracebacks.
        start: starts the rank.
        local: local rank.
        size: how many ranks the host has.
        founder: the rank is in the first epoch.

    Attributes:
        local: local rank.
        starts: how often it was started.
        seat: its number at the agent; None before the first start of a newcomer.
        process: None while none runs.
        failure: how it ended the last time; None if it has not failed then.
        number: its rank in the summary of failures.
        waits_since: when it began to wait for a place; None: it is not to be started.
        over: it has ended for good.
        steps: that its weights had completed when it trained to the end; `NO_MODEL` before.
        blank: its last process ended without weights.
        lost: the last one with weights was killed, and others trained on.
    """

    def __init__(
        self, transport: Transport, directory: Path, start: Start, local: int, size: int, founder: bool
    ) -> None:
        self.local, self.starts, self.number, self.over = local, 0, local, False
        self.seat: int | None = local if founder else None
        self.process: RankProcess | None = None
        self.failure: ProcessFailure | None = None
        self.waits_since: float | None = time.monotonic()
        self.steps, self.blank, self.lost = NO_MODEL, True, False
        self._held, self._in_step = NO_MODEL, False  # when it ended last with weights
        self._transport, self._directory, self._start, self._size = transport, directory, start, size
        self._service: SeatService | None = None

    def has_place(self, epoch: Epoch | None, me: Member | None) -> bool:
        """Whether a rank that arrives can be started: its host is a member, and the one before it is in no group."""
        return epoch is not None and me is not None and self.seat not in me.seats

    def start(self, view: View, env: Mapping[str, str], arrives: bool) -> None:
        """Start the rank.

        Args:
            view: the members that it begins with.
            env: added to the environment of this launcher.
            arrives: the others train already, and it has no weights.
        """
        if arrives:
            self.lose()
            self.seat = self.local if self.seat is None else self.seat + self._size
            seat = self.seat
            self._transport.call(lambda agent, _: agent.rank_started(seat))
        assert self.seat is not None
        self._service = SeatService(self._transport, self._directory, self.seat)
        self.number = len(view.members) + self.local if view.rank is None else view.rank
        environment = {**os.environ, **env, SEAT: str(self._service.path)}
        where = self._directory / f"attempt_{self.starts}" / str(self.local)
        self.process = RankProcess(self._start, environment, where, self.local)
        self.starts += 1
        self.waits_since = None

    def poll(self) -> int | None:
        """Its exit code if it has ended just now."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        process, self.process = self.process, None
        self.failure = process.failure() if code else None
        held, in_step = self._transport.call(lambda agent, _: agent.seats.standing(self.seat))
        self.blank = held == NO_MODEL
        if not code:
            self.steps = held
        elif not self.blank:
            self._held, self._in_step, self.lost = held, in_step, -code in _FROM_OUTSIDE
        return code

    def finish(self) -> None:
        """It has trained to the end: nobody waits for its next step."""
        if (seat := self.seat) is not None:
            self._transport.call(lambda agent, _: agent.rank_over(seat))

    def is_missed(self, steps: int) -> bool:
        """Whether the job may lack what it was to do, although others have trained to the end, after so many steps.

        It may have been lost, or have failed by itself, after the last step, such as when it saved the model.
        """
        return not self.lost or (self._held >= steps and not self._in_step)

    def lose(self) -> None:
        """Its weights are lost, and what it still asked for does not count."""
        self.close()
        if (seat := self.seat) is not None:
            self._transport.call(lambda agent, now: agent.rank_ended(now, seat))

    def refresh(self) -> None:
        """Push the view, which has changed."""
        if self._service is not None:
            self._service.refresh()

    def send(self, number: int) -> None:
        """Send a signal. Takes no lock."""
        if (process := self.process) is not None:
            process.send(number)

    def close(self) -> None:
        """Serve its seat no more."""
        if self._service is not None:
            self._service.close()
            self._service = None


def how_it_ended(code: int) -> str:
    """In words: 'exit code 3', or the signal that has killed it."""
    return f"ended with exit code {code}" if code > 0 else f"been killed by {signal.Signals(-code).name}"
