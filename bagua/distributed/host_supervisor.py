"""Supervises the ranks of one host while its agent takes part in the membership."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from bagua.distributed.failures import FirstFailure
from bagua.distributed.founding import Job, JoinError
from bagua.distributed.job_store import ServedStore
from bagua.distributed.rank_notes import ENDED, RankNotes, lost, trained
from bagua.distributed.rank_process import Start
from bagua.distributed.rank_slot import RankSlot, how_it_ended
from bagua.membership import Action, Blocked, Epoch, EpochBegan, Excluded, Left, Member, Slow
from bagua.membership.epoch import NO_MODEL
from bagua.membership.seat import View, describe_event, store_in, view_of
from bagua.membership.transport import Transport

__all__ = ["HostSupervisor"]

_POLL_S = 0.05
_CLOSE_S = 30.0  # for a rank to end after a signal, as torchrun's launcher leaves it
_LEAVE_S = 5.0  # for the others to decide without a host that a signal ends
_SERVE_S = 300.0  # for the ranks of the others to end after this host's, as torchrun's exit barrier has it
_EVENTS = 50
_ALONE_S = 10.0  # to go on waiting for hosts that cannot be heard
_HURRY_S = 1.0  # the same, for a host that a signal ends


class HostSupervisor:
    """Starts the ranks, watches them, and keeps the agent alive as long as others need its vote.

    A rank that is lost is left out alone: the others of this host train on. Those that are to be started again are
    newcomers.

    Args:
        job: what the host takes part in.
        served: its store.
        transport: runs its agent.
        directory: of its own, for the seat and the tracebacks.
        starts: start the ranks, by local rank.
        script: named in the summary of a failure.
        max_restarts: how often each rank that failed is started again, as a newcomer.
        join_s: for a newcomer to be admitted.
        say: writes a line to the log.
    """

    def __init__(
        self,
        job: Job,
        served: ServedStore,
        transport: Transport,
        directory: Path,
        starts: Sequence[Start],
        script: str,
        max_restarts: int,
        join_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._job, self._served, self._transport, self._say = job, served, transport, say
        self._script = script
        self._max_restarts, self._join_s = max_restarts, join_s
        self._name: str = transport.call(lambda agent, _: agent.name)
        self._detect_s: float = transport.call(lambda agent, _: agent.options.detect_s)
        self._notes = RankNotes(served.store, self._name)
        size = len(starts)
        self._slots = [
            RankSlot(transport, directory, start, local, size, job.founder) for local, start in enumerate(starts)
        ]
        self._signal: int | None = None
        self._signal_told = False
        self._kill = self._leaves = self._hurries = False
        self._close_by = self._serve_until = 0.0
        self._ended = self._left = False
        self._alone_since: float | None = None
        self._events: deque[tuple[float, str]] = deque(maxlen=_EVENTS)  # that the ranks do not know

    def run(self) -> None:
        """Until the ranks have ended, and the others do not need this host any more.

        Raises:
            FirstFailure: a rank has failed and was not started again.
            SignalException: a signal has ended the host.
            JoinError: no place for a rank was found.
        """
        try:
            with self._signals():
                while not self._is_over():
                    self._take_event()
                    self._watch()
        finally:
            self._kill_ranks()
            for slot in self._slots:
                slot.close()
            self._transport.close()
            self._notes.close()
        if self._signal is not None:
            raise SignalException(f"signal {self._signal}", signal.Signals(self._signal))
        if failures := self._failures:
            raise FirstFailure(self._script, failures)

    def describe(self) -> dict[str, Any]:
        """For observers, see `bagua.status`. From any thread."""
        epoch, suspected = self._transport.call(lambda agent, _: (agent.epoch, agent.suspected))
        members = () if epoch is None else epoch.members
        note = self._job.note
        return {
            "job": note.job if note.run_id == "none" else f"{note.run_id}/{note.job}",
            "host": self._name,
            "fault_tolerant": True,
            "epoch": 0 if epoch is None else epoch.number,
            "members": [[each.name, each.trains, store_in(each.payload)] for each in members],
            "suspected": suspected,
            "events": list(self._events),
        }

    # -- the membership ------------------------------------------------------------------------------------------

    def _take_event(self) -> None:
        try:
            event = self._transport.events.get(timeout=_POLL_S)
        except queue.Empty:
            event = None
        self._tell_signal()  # before the losses that follow from it
        if event is None:
            return
        if not self._ended or self._failures:
            self._say(_told(event))
        for slot in self._slots:
            slot.refresh()
        if isinstance(event, Slow | Blocked | Excluded):
            self._events.append((time.time(), _told(event)))
        if isinstance(event, EpochBegan | Excluded):
            self._alone_since = None
            contacts = tuple(member.address for member in event.epoch.members)
            self._served.note(replace(self._job.note, number=event.epoch.number, contacts=contacts))
            self._notes.settle(event.epoch.by_name.keys(), event.epoch.number)
            self._make_way(event)
        self._left |= isinstance(event, Left)

    def _make_way(self, event: EpochBegan | Excluded) -> None:
        """Others open new groups, so they train on: ranks of this host that have ended must not be waited for there."""
        previous = event.previous if isinstance(event, EpochBegan) else None
        if previous is None or event.epoch.group == previous.group:
            return
        for slot in self._slots:
            if slot.over:
                slot.lose()
        if self._ended and not self._leaves:
            self._leave()

    def _known(self) -> tuple[Epoch | None, Member | None]:
        return self._transport.call(lambda agent, _: (agent.epoch, agent.member))

    # -- the ranks -----------------------------------------------------------------------------------------------

    @property
    def _failures(self) -> dict[int, ProcessFailure]:
        """How ranks that failed have ended, by their numbers in the summary."""
        return {slot.number: slot.failure for slot in self._slots if slot.failure is not None}

    def _watch(self) -> None:
        if self._transport.failed:
            raise JoinError("the agent of this host has failed; its traceback is above")
        now = time.monotonic()
        for slot in self._slots:
            if slot.process is None:
                if self._signal is None and slot.waits_since is not None:
                    self._await_place(slot, now, slot.waits_since)
            elif (code := slot.poll()) is None:
                self._watch_running(slot, now)
            else:
                self._rank_ended(slot, code)
        if self._signal is not None and not self._hurries and all(slot.process is None for slot in self._slots):
            self._leave()

    def _rank_ended(self, slot: RankSlot, code: int) -> None:
        if code == 0 and self._signal is None:
            slot.finish()
            self._end_rank(slot)
            return
        slot.lose()
        if not slot.blank:
            slot.lost &= self._others_train()
        for each in self._slots:  # another rank of this host may have to fetch the weights now
            each.refresh()
        if self._signal is not None:
            slot.over = True
        elif slot.starts <= self._max_restarts:
            self._say(f"{self._called(slot)} has {how_it_ended(code)}; it is started again once it has a place")
            slot.waits_since = time.monotonic()
        else:
            others = any(not each.over for each in self._slots if each is not slot)
            goes_on = "the others of this host go on" if others else "this host leaves the job"
            self._say(f"{self._called(slot)} has {how_it_ended(code)}; {goes_on}")
            self._end_rank(slot)

    def _end_rank(self, slot: RankSlot) -> None:
        """It has ended for good. The last one ends the host: it leaves the job to the others if it has failed."""
        slot.over, slot.waits_since = True, None
        if all(each.over for each in self._slots):
            if slot.failure is not None:
                self._leave()
            else:
                self._end(_SERVE_S)

    def _called(self, slot: RankSlot) -> str:
        return "the rank of this host" if len(self._slots) == 1 else f"rank {slot.local} of this host"

    def _kill_ranks(self) -> None:
        for slot in self._slots:
            if slot.process is not None:
                slot.process.kill()

    def _leave(self) -> None:
        self._leaves, self._hurries = True, self._signal is not None
        self._transport.call(lambda agent, now: agent.leave(now))
        self._end(max(_LEAVE_S, 3 * self._detect_s) if self._hurries else _SERVE_S)

    def _await_place(self, slot: RankSlot, now: float, since: float) -> None:
        """Start a rank as soon as it has a place: that of a founder, or beside the members that train."""
        epoch, me = self._known()
        founders = self._job.note.founders
        if slot.has_place(epoch, me):
            assert epoch is not None
            view = view_of(epoch, self._name, 0, seat=-1)
            slot.start(view, self._environment(slot, view), arrives=True)
        elif me is not None and self._job.founder and not slot.starts:
            view = view_of(founders, self._name, 0, slot.local)
            slot.start(view, self._environment(slot, view), arrives=False)
        elif now - since > self._join_s:
            if slot.failure is None:
                raise JoinError(f"no member of the job has admitted this host within {self._join_s:g} s")
            self._say(f"{self._called(slot)} was not admitted again within {self._join_s:g} s")
            slot.over, slot.waits_since = True, None
            if all(each.over for each in self._slots):
                self._end(0.0)

    def _environment(self, slot: RankSlot, view: View) -> Mapping[str, str]:
        """A newcomer's default group is its own: nobody would come to another before it trains."""
        newcomer = view.rank is None
        rank, size = ("0", "1") if newcomer else (str(view.rank), str(len(view.members)))
        hosts = [member.name for member in self._job.note.founders.trainers]
        node, nodes = ("0", "1") if newcomer else (str(hosts.index(self._name)), str(len(hosts)))
        host, _, port = (self._served.address if newcomer else view.store).rpartition(":")
        return {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": str(slot.local),
            "LOCAL_WORLD_SIZE": str(len(self._slots)),
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": nodes,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": size,
            "ROLE_NAME": "default",
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": self._job.note.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(slot.starts),
            "TORCHELASTIC_MAX_RESTARTS": str(self._max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "BAGUA_ARRIVES": "1" if newcomer else "0",
        }

    def _watch_running(self, slot: RankSlot, now: float) -> None:
        process = slot.process
        assert process is not None
        if self._signal is not None and (self._kill or now > self._close_by):
            process.kill()
        elif (stopped_s := process.stopped_s(now)) > self._detect_s:
            self._say(f"{self._called(slot)} (pid {process.pid}) has been stopped for {stopped_s:.1f} s; it is killed")
            process.kill()

    # -- the end -------------------------------------------------------------------------------------------------

    def _end(self, serve_s: float) -> None:
        """All ranks have ended for good. The agent goes on until the others do not need its vote."""
        self._ended = True
        for slot in self._slots:
            slot.waits_since = None
        self._serve_until = time.monotonic() + serve_s

    def _is_over(self) -> bool:
        epoch, _ = self._known()
        goes_on, has_weights, joining = self._transport.call(
            lambda agent, _: (agent.seats.goes_on, agent.held != NO_MODEL, agent.joining)
        )
        if epoch is None or (goes_on and not self._ended):
            return self._ended and self._kill
        # Those that want to join, too: they would wait for a job that has ended.
        hosts = {member.name: store_in(member.payload) for member in (*epoch.members, *joining)}
        steps = max(slot.steps for slot in self._slots)
        if self._ended:
            note = ENDED if steps == NO_MODEL else trained(steps)
        else:  # the others wait for weights that those have left behind who have trained to the end
            note = lost(epoch.number) if self._failures and not has_weights else ""
        self._notes.tell(hosts, note)
        waited_for = self._waited_for(epoch)
        if not self._ended:
            if not waited_for:
                self._stop_without_model(max(steps, self._notes.trained(_others(epoch, self._name))))
            return False
        if self._left or self._kill or time.monotonic() > self._serve_until:
            return True
        # One that has ended itself is told, too: it may wait for this host, if that trains in a later epoch.
        untold = hosts.keys() - {self._name, *self._notes.delivered}
        return (not waited_for and not untold) or self._is_alone(waited_for | untold)

    def _is_alone(self, others: set[str]) -> bool:
        """Whether those that are left cannot be heard for a while: they have ended, or this host is cut off."""
        now = time.monotonic()
        if not others <= self._transport.call(lambda agent, _: agent.suspected).keys():
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        wait_s = _HURRY_S if self._hurries else max(_ALONE_S, 3 * self._detect_s)
        return self._alone_since is not None and now - self._alone_since > wait_s

    def _waited_for(self, epoch: Epoch) -> set[str]:
        """Other hosts that train, and may have weights."""
        others = _others(epoch, self._name)
        return others - self._notes.without_weights(others, epoch.number)

    def _others_train(self) -> bool:
        epoch, _ = self._known()
        goes_on: bool = self._transport.call(lambda agent, _: agent.seats.goes_on)
        return goes_on or (epoch is not None and bool(self._waited_for(epoch)))

    def _stop_without_model(self, steps: int) -> None:
        """Ranks without weights end when all that had them have ended or lost them: nobody can give them any.

        Args:
            steps: after which others have trained to the end; `NO_MODEL` if none has. It does not matter then that a
                rank was lost before, whether it was started again or not.
        """
        over = "" if steps == NO_MODEL else "; others have trained to the end"
        self._say(f"no rank is left that has the weights: the job ends{over}")
        self._kill_ranks()
        for slot in self._slots:
            if not slot.over and steps != NO_MODEL and not slot.is_missed(steps):
                slot.failure = None
            slot.process, slot.over = None, True
        self._end(_SERVE_S)

    # -- signals -------------------------------------------------------------------------------------------------

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass on what ends a launcher to the ranks. SIGHUP is left as it is under nohup."""
        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        earlier = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _tell_signal(self) -> None:
        """Not in the handler, which may have interrupted another line."""
        if self._signal is not None and not self._signal_told:
            self._signal_told = True
            name = signal.Signals(self._signal).name
            self._say(f"received {name}; it is passed on to the ranks, which are killed after {_CLOSE_S:g} s")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Takes no lock: the main thread may hold it."""
        self._kill |= self._signal is not None  # a second one does not wait
        self._signal = self._signal or number
        self._close_by = time.monotonic() + _CLOSE_S
        for slot in self._slots:
            slot.send(number)


def _others(epoch: Epoch, name: str) -> set[str]:
    """Hosts that train, but this one."""
    return {member.name for member in epoch.trainers} - {name}


def _told(event: Action) -> str:
    text = describe_event(event)
    reason = event.epoch.reason if isinstance(event, EpochBegan) and event.previous is not None else ""
    return f"{text} ({reason})" if reason else text
