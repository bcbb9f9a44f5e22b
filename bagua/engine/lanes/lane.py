"""Lanes: queues (threads or CUDA streams) that run exchanges in order, in parallel to the training thread."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from bagua.comm.abortable_nccl import AbortableNccl
from bagua.comm.gloo_connections import GlooConnections
from bagua.comm.groups import Groups
from bagua.comm.mesh import Mesh
from bagua.comm.own_threads import start_thread
from bagua.engine.lanes.gate import Gate
from bagua.engine.lanes.label import Label, span
from bagua.errors import CommunicationError

__all__ = [
    "BackgroundLane",
    "InlineLane",
    "JointTicket",
    "Lane",
    "ThreadLane",
    "Ticket",
]

Run = Callable[[], None]
_STUCK_S = 0.2  # for a transfer to end after its connection was cut, as it does where gloo notices


class Ticket:
    """One launched exchange: wait for it, then read how long it took."""

    def __init__(self, label: Label | str) -> None:
        self.label = label
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.ended = 0.0  # time.perf_counter() at its end
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def execute(self, run: Run, gate: Gate | None = None) -> None:
        """Run it in this thread, recording error and duration. Time spent at `gate` does not count."""
        started = time.perf_counter() - (gate.waited_s if gate else 0.0)
        try:
            with span("run", self.label):
                run()
        except BaseException as error:  # surfaces in the thread that waits, whatever it is
            # Frames of a failed exchange hold its transfers, and these the connections and a thread of gloo.
            traceback.clear_frames(error.__traceback__)
            self.error = error
        self.finish(time.perf_counter() - started - (gate.waited_s if gate else 0.0))
        del self, run  # the traceback holds this frame: no cycle, which would stay until the garbage collector runs

    def finish(self, seconds: float) -> None:
        """Mark as ended."""
        self.seconds, self.ended = seconds, time.perf_counter()
        self._done.set()

    def wait(self) -> None:
        """Block until it has ended."""
        self._done.wait()

    def ends_within(self, seconds: float) -> bool:
        """Block until it has ended, but not longer than that; whether it has."""
        return self._done.wait(seconds)


class JointTicket(Ticket):
    """Stands for the parts of one launch, which run on several lanes."""

    def __init__(self, label: Label | str, parts: Sequence[Ticket]) -> None:
        self.label = label
        self.parts = tuple(parts)

    @property
    def done(self) -> bool:
        """Whether all parts have ended."""
        return all(part.done for part in self.parts)

    @property
    def error(self) -> BaseException | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of the first part that failed."""
        return next((part.error for part in self.parts if part.error is not None), None)

    def wait(self) -> None:
        """Block until all parts have ended."""
        for part in self.parts:
            part.wait()


class Lane(ABC):
    """Runs what is submitted, in order, one at a time, over groups of its own."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.broken: BaseException | None = None

    @abstractmethod
    def submit(self, run: Run, label: Label | str) -> Ticket:
        """Queue `run`."""

    def wait(self, ticket: Ticket) -> None:
        """Return when what the ticket stands for may be used by the caller."""
        ticket.wait()

    def close(self) -> None:
        """End the lane and give up its groups. What is queued still runs, unless the lane is broken."""
        self._leave(abort=self.broken is not None)

    def stop(self, timeout_s: float) -> None:
        """End the lane at the end of the process; what does not end in time is left behind."""
        self._leave(abort=self.broken is not None)

    def abandon(self) -> None:
        """Drop the groups at once. That closes their connections, so peers fail soon too."""
        self._leave(abort=True)

    def sever(self) -> None:
        """Cut the connections, so that what is in flight fails, here and at the peers. From any thread."""
        self.groups.sever()

    def leave_stuck(self) -> bool:
        """After `sever`: if a job cannot end for a while all the same, leave it behind and fail it with what is queued.

        Returns whether the lane is left behind.
        """
        return False

    def adopt(self, tensor: Tensor) -> None:
        """Register a tensor before the first job that uses it. Once is enough."""

    def _leave(self, abort: bool) -> None:
        self.groups.leave(abort)


_Jobs: TypeAlias = "queue.SimpleQueue[tuple[Run, Ticket] | None]"


class InlineLane(Lane):
    """Runs each exchange immediately in the calling thread: no overlap, no threads; for tests and simulation."""

    def submit(self, run: Run, label: Label | str) -> Ticket:
        """Run now."""
        ticket = Ticket(label)
        if self.broken is not None:
            ticket.error = self.broken
            ticket.finish(0.0)
        else:
            ticket.execute(run)
            self.broken = ticket.error
        return ticket


class ThreadLane(Lane):
    """One worker thread, for collectives that block (gloo, and NCCL between ranks that may be lost).

    On a GPU the thread works on a stream of its own and a job ends when the GPU has done it: who has waited for the
    ticket needs no event, on whichever stream.
    """

    def __init__(self, groups: Groups, gate: Gate | None = None, device: torch.device | None = None) -> None:
        super().__init__(groups)
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self._queue: _Jobs = queue.SimpleQueue()
        self._running: list[Ticket] = []
        self._cut: float | None = None
        self._left: CommunicationError | None = None
        nccl = groups.world.pg if groups.world.abortable else None
        free = partial(_free, self._queue, gate, groups.world.connections, groups.world.mesh, nccl)
        self._thread = start_thread(partial(_work, self._queue, self._running, gate), "bagua-lane", free)
        # The thread holds the queue, not the lane: a lane nobody holds is collected, and its thread ends.
        self._finalizer = weakref.finalize(self, _end, self._queue, gate)
        self._finalizer.atexit = False

    def submit(self, run: Run, label: Label | str) -> Ticket:
        """Queue for the thread; on a GPU behind what the current stream has done so far."""
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._stream.device))
            run = partial(_on_stream, self._stream, ready, run)
        ticket = Ticket(label)
        if self._left is not None:
            ticket.error = self._left
            ticket.finish(0.0)
            return ticket
        run = partial(contextvars.copy_context().run, run)  # the caller's settings, such as `codecs.use_backend`
        with span("launch", label):
            self._queue.put((run, ticket))
        return ticket

    def close(self) -> None:
        """Let the thread end, then give up the groups."""
        self._finalizer()
        if self._thread is not threading.current_thread() and self._left is None:
            self._thread.join()
        self._leave(abort=False)  # every job is over; a failed lane has been abandoned before

    def stop(self, timeout_s: float) -> None:
        """Let the thread end. One that is stuck in a collective keeps its groups: to free them would wait too."""
        self._finalizer()
        self._thread.join(timeout_s)
        world = self.groups.world
        if self._thread.is_alive() and (world.connections is not None or world.abortable or self.groups.native):
            self.sever()  # a thread that returned while the interpreter ends would abort the process
            self._thread.join(_STUCK_S)
        if not self._thread.is_alive():
            self.abandon()

    def sever(self) -> None:
        """Cut the connections; see `Lane.sever`."""
        super().sever()
        self._cut = time.monotonic()

    def leave_stuck(self) -> bool:
        """The thread ends with the transfer that holds it, at the timeout of the groups."""
        if self._left is not None:
            return True
        if self._cut is None or not self.groups.give_up_wait(self._cut, _STUCK_S):
            return False
        self._left = CommunicationError("its connections were cut in the middle of a transfer")
        tickets, ends = list(self._running), False
        with suppress(queue.Empty):
            while True:
                job = self._queue.get_nowait()
                ends |= job is None
                tickets += [] if job is None else [job[1]]
        if ends:
            self._queue.put(None)
        for ticket in tickets:
            ticket.error = self._left
            ticket.finish(0.0)
        return True


def _end(jobs: _Jobs, gate: Gate | None) -> None:
    if gate is not None:
        gate.closing.set()
    jobs.put(None)


def _free(
    jobs: _Jobs,
    gate: Gate | None,
    connections: GlooConnections | None,
    mesh: Mesh | None,
    nccl: AbortableNccl | None,
) -> None:
    """At exit, of a lane that nobody holds any more and whose thread is in a collective."""
    _end(jobs, gate)
    if nccl is not None:
        nccl.abort(wait=False)
    if mesh is not None:
        mesh.abort()
    if connections is not None:
        connections.shut_down()


def _work(jobs: _Jobs, running: list[Ticket], gate: Gate | None) -> None:
    broken: BaseException | None = None
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            run, ticket = job
            running.append(ticket)
            del job
            if broken is None:
                ticket.execute(run, gate)
                broken = ticket.error
            else:
                ticket.error = broken
                ticket.finish(0.0)
            # A blocked `get` must not keep the last job's tensors, nor through them a dropped model, alive.
            running.clear()
            del run, ticket
    del broken  # as in `Ticket.execute`: its traceback holds this frame
    if gate is not None:
        gate.leave()


class BackgroundLane(ThreadLane):
    """A thread that may wait without limit, on a GPU too: neither the CPU nor the stream of the training
    thread ever waits for it.

    Attributes:
        gate: where jobs wait for the other ranks' lanes. A job must hold the gate and not the lane, or a dropped
            lane would never end.
        timeout_s: the process group's.
    """

    def __init__(self, groups: Groups, gate: Gate, device: torch.device, timeout_s: float) -> None:
        super().__init__(groups, gate, device)
        self.gate = gate
        self.timeout_s = timeout_s

    def abandon(self) -> None:
        """Leave the gate too, so that no rank waits for this one."""
        self.gate.fail()
        self._finalizer()
        super().abandon()


def _on_stream(stream: torch.cuda.Stream, ready: torch.cuda.Event, run: Run) -> None:
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        run()
        stream.synchronize()  # done means over, so that nobody needs an event
