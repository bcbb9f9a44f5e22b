"""Lanes: where exchanges run, first in first out, beside the training thread."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch._C._profiler import _RecordFunctionFast  # torch.profiler.record_function takes 16 us instead of 0.6

from bagua.comm.groups import Groups
from bagua.engine.gate import Gate

__all__ = ["BackgroundLane", "InlineLane", "JointTicket", "Lane", "StreamLane", "ThreadLane", "Ticket", "make_lane"]

Run = Callable[[], None]


class Ticket:
    """One launched exchange: wait for it, then read how long it took."""

    def __init__(self, label: str) -> None:
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
        """Run it here and now, keeping error and duration. The time spent at `gate` is not the exchange's."""
        started = time.perf_counter() - (gate.waited_s if gate else 0.0)
        try:
            with _RecordFunctionFast(f"bagua::run {self.label}"):
                run()
        except BaseException as error:  # surfaces in the thread that waits, whatever it is
            self.error = error
        self.finish(time.perf_counter() - started - (gate.waited_s if gate else 0.0))

    def finish(self, seconds: float) -> None:
        """Mark as ended."""
        self.seconds, self.ended = seconds, time.perf_counter()
        self._done.set()

    def wait(self) -> None:
        """Block until it has ended."""
        self._done.wait()


class JointTicket(Ticket):
    """Stands for the parts of one launch, which run on several lanes."""

    def __init__(self, label: str, parts: Sequence[Ticket]) -> None:
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
    def submit(self, run: Run, label: str) -> Ticket:
        """Queue `run`."""

    def wait(self, ticket: Ticket) -> None:
        """Return when what the ticket stands for may be used by the caller."""
        ticket.wait()

    def close(self) -> None:
        """End the lane and give up its groups. What is queued still runs, unless the lane is broken."""
        self.abandon()

    def stop(self, timeout_s: float) -> None:
        """End the lane at the end of the process; what does not end in time is left behind."""
        self.abandon()

    def abandon(self) -> None:
        """Give up the groups at once. Dropping them closes their connections, so that peers fail soon too."""
        for group in (self.groups.world, self.groups.intra, self.groups.inter):
            if group is not None:
                group.pg = group.p2p = None
        self.groups.buffers.clear()


class InlineLane(Lane):
    """Runs everything at once in the calling thread: no overlap, no threads, for tests and simulation."""

    def submit(self, run: Run, label: str) -> Ticket:
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
    """One worker thread, for collectives that block (gloo)."""

    def __init__(self, groups: Groups, gate: Gate | None = None) -> None:
        super().__init__(groups)
        self._queue: queue.SimpleQueue[tuple[Run, Ticket] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._queue, gate), name="bagua-lane", daemon=True)
        self._thread.start()
        # The thread holds the queue, not the lane: a lane nobody holds is collected, and its thread ends.
        self._finalizer = weakref.finalize(self, _end, self._queue, gate)
        self._finalizer.atexit = False

    def submit(self, run: Run, label: str) -> Ticket:
        """Queue for the thread."""
        ticket = Ticket(label)
        with _RecordFunctionFast(f"bagua::launch {label}"):
            self._queue.put((run, ticket))
        return ticket

    def close(self) -> None:
        """Let the thread end, then give up the groups."""
        self._finalizer()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.abandon()

    def stop(self, timeout_s: float) -> None:
        """Let the thread end. One that is stuck in a collective keeps its groups: to free them would wait too."""
        self._finalizer()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self.abandon()


def _end(jobs: queue.SimpleQueue[tuple[Run, Ticket] | None], gate: Gate | None) -> None:
    if gate is not None:
        gate.closing.set()
    jobs.put(None)


def _work(jobs: queue.SimpleQueue[tuple[Run, Ticket] | None], gate: Gate | None) -> None:
    broken: BaseException | None = None
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            run, ticket = job
            del job
            if broken is None:
                ticket.execute(run, gate)
                broken = ticket.error
            else:
                ticket.error = broken
                ticket.finish(0.0)
            # A blocked `get` must not keep the last job's tensors, nor through them a dropped model, alive.
            del run, ticket
    if gate is not None:
        gate.leave()


class BackgroundLane(ThreadLane):
    """A thread that may wait as long as it has to, on a GPU too: neither the CPU nor the stream of the training
    thread ever waits for it.

    Attributes:
        gate: where jobs wait for the other ranks' lanes. A job must hold the gate and not the lane, or a dropped
            lane would never end.
    """

    def __init__(self, groups: Groups, gate: Gate, device: torch.device) -> None:
        super().__init__(groups, gate)
        self.gate = gate
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, run: Run, label: str) -> Ticket:
        """Queue for the thread; on a GPU behind what the current stream has done so far."""
        if self._stream is None:
            return super().submit(run, label)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        return super().submit(partial(_on_stream, self._stream, ready, run), label)

    def abandon(self) -> None:
        """Leave the gate too, so that no rank waits for this one."""
        self._finalizer()
        super().abandon()


def _on_stream(stream: torch.cuda.Stream, ready: torch.cuda.Event, run: Run) -> None:
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        run()
        stream.synchronize()  # done means over, so that nobody needs an event


class StreamLane(Lane):
    """A CUDA stream of its own, for collectives and codecs that only enqueue work (NCCL)."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        super().__init__(groups)
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, run: Run, label: str) -> Ticket:
        """Enqueue on the stream behind what the current stream has done so far."""
        ticket = _StreamTicket(label)
        if self.broken is not None:
            ticket.error = self.broken
            ticket.finish(0.0)
            return ticket
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            ticket.begun.record(self._stream)
            ticket.execute(run)
            ticket.ended.record(self._stream)
        self.broken = ticket.error
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Make the current stream wait; the calling thread goes on. For a ticket of another lane, wait here."""
        if not isinstance(ticket, _StreamTicket):
            ticket.wait()
        elif ticket.error is None:
            torch.cuda.current_stream(self._device).wait_event(ticket.ended)


class _StreamTicket(Ticket):
    def __init__(self, label: str) -> None:
        super().__init__(label)
        self.begun = torch.cuda.Event(enable_timing=True)
        self.ended = torch.cuda.Event(enable_timing=True)

    @property
    def done(self) -> bool:
        """Whether the stream has come past it."""
        return super().done and (self.error is not None or self.ended.query())

    def device_seconds(self) -> float | None:
        """Time on the stream, or None while it is not over. Does not block."""
        if self.error is not None or not self.ended.query():
            return None
        return self.begun.elapsed_time(self.ended) / 1000.0


def make_lane(groups: Groups, device: torch.device) -> Lane:
    """Return the kind of lane that fits the groups' backend."""
    if groups.world.backend == "nccl":
        return StreamLane(groups, device)
    return InlineLane(groups) if groups.world.backend == "local" else ThreadLane(groups)
