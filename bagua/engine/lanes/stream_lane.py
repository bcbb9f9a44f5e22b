"""Lanes of NCCL: exchanges are enqueued on a CUDA stream of their own, and nobody waits for them on the CPU."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from bagua.comm.groups import Groups
from bagua.comm.own_threads import start_thread
from bagua.engine.lanes.label import Label
from bagua.engine.lanes.lane import Lane, Run, Ticket

__all__ = ["StreamLane", "StreamTicket", "release"]

_POLL_S = 0.001
_DRAIN_S = 60.0  # for the stream of a lane that was dropped


class StreamLane(Lane):
    """A CUDA stream of its own, for collectives and codecs that only enqueue work (NCCL)."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        super().__init__(groups)
        # A number, and one context for all: with a device, torch looks at the environment and the driver each time.
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.Stream(device)
        self._on_stream = torch.cuda.stream(self._stream)
        # A model that is dropped takes its lanes along, while a peer may still receive what this rank has sent.
        self._finalizer = weakref.finalize(self, release, groups, lambda stream=self._stream: stream.query())
        self._finalizer.atexit = False

    def submit(self, run: Run, label: Label | str) -> Ticket:
        """Enqueue on the stream behind what the current stream has done so far."""
        ticket = StreamTicket(label)
        if self.broken is not None:
            ticket.error = self.broken
            ticket.finish(0.0)
            return ticket
        self._stream.wait_stream(torch.cuda.current_stream(self._index))
        with self._on_stream, torch.no_grad():
            ticket.begin_event.record(self._stream)
            ticket.execute(run)
            ticket.end_event.record(self._stream)
        self.broken = ticket.error
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Make the current stream wait; the calling thread continues. For a ticket of another lane, wait here."""
        if not isinstance(ticket, StreamTicket):
            ticket.wait()
        elif ticket.error is None:
            torch.cuda.current_stream(self._index).wait_event(ticket.end_event)

    def adopt(self, tensor: Tensor) -> None:
        """Keep its memory from other uses, should it be freed while the stream still works on it.

        Memory belongs to the stream that allocated it, and is free for that stream at once when the tensor goes: the
        weights of a module that is dropped between its forward and its backward pass, say.
        """
        if tensor.is_cuda:
            tensor.record_stream(self._stream)

    def close(self) -> None:
        """Wait for the stream, then give up the groups."""
        if self.broken is None:
            self._stream.synchronize()  # to end a communicator would end its kernels
        super().close()

    def stop(self, timeout_s: float) -> None:
        """Wait for the stream up to a limit. Aborting a communicator at once would cut the peers' last exchange."""
        deadline = time.monotonic() + timeout_s
        try:
            while self.broken is None and not self._stream.query() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            drained = self.broken is None and self._stream.query()
        except RuntimeError:  # the GPU has failed
            drained = False
        self._leave(abort=not drained)

    def _leave(self, abort: bool) -> None:
        self._finalizer.detach()
        super()._leave(abort)


def release(groups: Groups, drained: Callable[[], bool]) -> None:
    """Give up the groups of a lane that was dropped, in a thread: it waits for peers, which may drop theirs later.

    To drop an NCCL backend would abort it at once, and cut what peers still receive. A stream that does not come to its
    end waits for a peer that is gone: then the groups are aborted.

    Args:
        drained: whether all work of the lane's stream is over; raises RuntimeError if the GPU has failed.
    """
    ending = threading.Event()

    def work() -> None:
        deadline = time.monotonic() + _DRAIN_S
        try:
            while not (over := drained()) and time.monotonic() < deadline:
                if ending.wait(_POLL_S):
                    return
        except RuntimeError:
            over = False
        groups.leave(abort=not over)

    if not sys.is_finalizing():  # no thread can be started any more
        start_thread(work, "bagua-release", ending.set)


class StreamTicket(Ticket):
    """One launched exchange on a stream: done on the CPU once it is enqueued, over when the stream has come past it."""

    def __init__(self, label: Label | str) -> None:
        super().__init__(label)
        self.begin_event = torch.cuda.Event(enable_timing=True)
        self.end_event = torch.cuda.Event(enable_timing=True)

    @property
    def done(self) -> bool:
        """Whether the stream has come past it."""
        return super().done and (self.error is not None or self.end_event.query())

    def device_seconds(self) -> float | None:
        """Time on the stream, or None while it is not over. Does not block."""
        if self.error is not None or not self.end_event.query():
            return None
        return self.begin_event.elapsed_time(self.end_event) / 1000.0
