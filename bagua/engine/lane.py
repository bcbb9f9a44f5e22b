"""Lanes: where exchanges run, first in first out, beside the training thread."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch.autograd.profiler import record_function

from bagua.comm.groups import Groups

__all__ = ["InlineLane", "Lane", "StreamLane", "ThreadLane", "Ticket", "make_lane"]

Run = Callable[[], None]


class Ticket:
    """One launched exchange: wait for it, then read how long it took."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def execute(self, run: Run) -> None:
        """Run it here and now, keeping error and duration."""
        started = time.perf_counter()
        try:
            with record_function(f"bagua::run {self.label}"):
                run()
        except BaseException as error:  # surfaces in the thread that waits, whatever it is
            self.error = error
        self.finish(time.perf_counter() - started)

    def finish(self, seconds: float) -> None:
        """Mark as ended."""
        self.seconds = seconds
        self._done.set()

    def wait(self) -> None:
        """Block until it has ended."""
        self._done.wait()


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
                group.pg = None
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

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups)
        self._queue: queue.SimpleQueue[tuple[Run, Ticket] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._queue,), name="bagua-lane", daemon=True)
        self._thread.start()
        # The thread holds the queue, not the lane: a lane nobody holds is collected, and its thread ends.
        self._finalizer = weakref.finalize(self, self._queue.put, None)
        self._finalizer.atexit = False

    def submit(self, run: Run, label: str) -> Ticket:
        """Queue for the thread."""
        ticket = Ticket(label)
        with record_function(f"bagua::launch {label}"):
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


def _work(jobs: queue.SimpleQueue[tuple[Run, Ticket] | None]) -> None:
    broken: BaseException | None = None
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            run, ticket = job
            del job
            if broken is None:
                ticket.execute(run)
                broken = ticket.error
            else:
                ticket.error = broken
                ticket.finish(0.0)
            # A blocked `get` must not keep the last job's tensors, nor through them a dropped model, alive.
            del run, ticket


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
        """Make the current stream wait; the calling thread goes on."""
        assert isinstance(ticket, _StreamTicket)
        if ticket.error is None:
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
