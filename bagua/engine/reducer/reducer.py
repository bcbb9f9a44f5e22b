"""The reducer: counts ready gradients, announces complete buckets, handles missing gradients at the end of a pass.

One synchronised pass:
  a gradient is ready -> its bucket counts down; complete buckets are announced in the agreed order
  the pass ends       -> remaining buckets are announced; exchanges finish; then missing gradients are settled
The first synchronised pass only records the order in which gradients become ready.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bagua.engine.reducer.bucket import Bucket
from bagua.engine.reducer.create_graph import GradientGraphs
from bagua.engine.reducer.gradient_streams import GradientStreams
from bagua.engine.reducer.graph_task import accumulates, refuse_compiled_autograd
from bagua.engine.reducer.hook_order import HookOrder
from bagua.engine.reducer.own_gradients import OwnGradients
from bagua.engine.reducer.pass_listener import PassListener
from bagua.engine.reducer.static_graph import StaticGraph
from bagua.engine.reducer.unused_params import UsageBoard, bitmap
from bagua.engine.training_state import TrainingState
from bagua.errors import CommunicationError

__all__ = ["Reducer"]

_DROP_S = 1.0  # how long a thread of a GPU may take to drop a pass that an exception has ended


class Reducer:
    """Counts the gradients of backward passes and announces buckets that are complete.

    Args:
        names, params: the trainable parameters; elsewhere a parameter is its index here.
        usage: which parameters each rank used.
        state: tells whether something was exchanged.
        views_are_gradients: whether bucket views hold gradients (else gradients are only counted).
        static_graph: every pass uses the same parameters as often as the first.
        gradient_as_bucket_view: `.grad` stays a view of its bucket after a pass; else it becomes a tensor of its own.
        alone: a single rank; nothing is exchanged, so nothing is copied or settled.

    Attributes:
        sync: False within `no_sync`.
        open: a synchronised pass has begun and is not over.
        count: synchronised passes that are over; the same on all ranks.
        failed_to_end: an exception came at the end of a pass, when others may be done with it.
        first: the parameter whose gradient began the pass, and holds more than it did before; -1: none has come.
        thread: in which the last pass began: that of `backward()`, or autograd's own of a GPU.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        usage: UsageBoard,
        state: TrainingState,
        *,
        views_are_gradients: bool,
        static_graph: bool,
        gradient_as_bucket_view: bool,
        alone: bool,
    ) -> None:
        self.sync = True
        self.open = False
        self.count = 0
        self._asked: Callable[[], bool] = lambda: True
        self._listener: Callable[[], PassListener | None] = lambda: None
        self._names, self._params, self._usage, self._state = names, params, usage, state
        self.views_are_gradients, self._alone = views_are_gradients, alone
        self._static = StaticGraph() if static_graph else None
        self.failed_to_end = False
        self.first = -1
        self.thread = 0
        self._running = False  # autograd holds what it is to call at the end of a pass
        self._dropped = False  # it did not call that: an exception has ended the open pass
        self._graphs = GradientGraphs()
        self._own = None if gradient_as_bucket_view or alone else OwnGradients()
        self._hook_order: HookOrder | None = None
        self._callback_queued = False
        self._arrived = bytearray(len(params))
        self._used = bytearray(len(params))  # within no_sync, since the last synchronised pass
        self._uncounted = False  # a single rank, in a pass: nobody needs to know which gradients have come
        self._order: list[int] = []
        self._last_exchanged = -1  # the last pass, before this one, with an exchange
        self._shadow = False  # the pass is one of other ranks
        self._buckets: Sequence[Bucket] = ()
        self._views: list[Tensor] = []
        self._bucket_of: list[int] = []
        self._position: dict[str, int] = {}
        self._sizes: list[int] = []
        self._waiting: list[int] = []  # per bucket: gradients still to come
        self._next = 0  # first bucket not yet announced
        on_gpu = bool(params) and params[0].is_cuda and not alone
        self._streams = GradientStreams(params[0].device) if on_gpu else None

    def listen(self, listener: PassListener) -> None:
        """Report events to `listener`. Keeps only a weak reference: the listener holds the reducer."""
        self._listener = weakref.ref(listener)

    @property
    def listener(self) -> PassListener:
        """The listener."""
        listener = self._listener()
        assert listener is not None, "the engine is gone"
        return listener

    def ask(self, asked: Callable[[], bool]) -> None:
        """Synchronise only those passes at whose beginning `asked` returns true."""
        self._asked = asked

    def keep_last(self, hooks: HookOrder) -> None:
        """Before each pass, move the hooks that call `gradient_ready` behind all others of their parameter."""
        self._hook_order = None if self._alone else hooks

    def is_to_sync(self) -> bool:
        """Whether a pass that begins now is to be synchronised."""
        return self.sync and self._asked()

    @property
    def accumulated(self) -> bool:
        """Whether there were passes within `no_sync` since the last synchronised one."""
        return any(self._used)

    def set_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Use `buckets` from now on."""
        self._position = position = {name: index for index, name in enumerate(self._names)}
        self._buckets = buckets
        self._bucket_of = [0] * len(self._names)
        self._views = [torch.empty(0, device="cpu")] * len(self._names)
        for bucket in buckets:
            for name, view in zip(bucket.names, bucket.views, strict=True):
                self._bucket_of[position[name]] = bucket.index
                self._views[position[name]] = view
        self._sizes = [len(bucket.params) for bucket in buckets]
        for index, times in self._static.repeats.items() if self._static is not None and buckets else ():
            self._sizes[self._bucket_of[index]] += times
        self._waiting = list(self._sizes)
        self._next = 0

    def gradient_ready(self, index: int) -> None:
        """autograd has accumulated the gradient of parameter `index`."""
        # Runs once per parameter and step: lean on purpose.
        if self._uncounted:
            return
        if not self.sync:
            self._used[index] = 1
            return
        if not self._callback_queued:
            if not self._asked():
                self._used[index] = 1
                return
            self._begin(index)
        arrived = self._arrived
        if arrived[index]:
            self._arrived_twice(index)
            return
        arrived[index] = 1
        if self._streams is not None:
            self._streams.note()
        if not self._buckets:
            self._order.append(index)
            return
        number = self._bucket_of[index]
        waiting = self._waiting
        left = waiting[number] = waiting[number] - 1
        if left == 0 and number == self._next:
            self._announce()

    def enter(self) -> None:
        """A backward pass has reached the module's output."""
        if self.sync and not self._callback_queued and self._asked() and accumulates():
            self._begin()

    def sparse_ready(self) -> None:
        """autograd has accumulated a sparse gradient, which no bucket waits for."""
        if self.sync and not self._callback_queued and self._asked():
            self._begin()

    def end(self) -> None:
        """End the open pass: announce the remaining buckets, wait for exchanges, settle missing gradients."""
        try:
            self._end()
        except CommunicationError as error:
            if not self.listener.pass_lost(error):
                raise
            self.forget()
            self.count += 1

    def _end(self) -> None:
        self.open = self._callback_queued = False
        if not self._buckets:
            self.listener.order_learned(self._order)
        self._uncounted = False
        complete = 0 not in self._arrived
        kept = {} if complete or self._alone or not self.views_are_gradients else self._fill_missing()
        if self._next < len(self._buckets):
            self._waiting = [0] * len(self._buckets)
            self._announce()
        self.listener.buckets_done()
        if kept and self._state.exchanged:
            self._settle(kept)
        if self._graphs:
            self.listener.finish_exchanges()
            self._graphs.deliver(self._params, self._views)
        self._give_back()
        if self._static is not None and not self._shadow:
            self._static.check(self._used_bits(), self._names)
        self._used = bytearray(len(self._params))
        self.count += 1

    def _give_back(self) -> None:
        """Let `.grad` be a tensor of its own again, if it is to be one."""
        if self._own is not None and self.views_are_gradients:
            self.listener.finish_exchanges(on_host=False)
            self._own.give_back(self._params, self._views)

    def _begin(self, first: int = -1) -> None:
        refuse_compiled_autograd()
        if not self.open:
            self.first = first
            if self._hook_order is not None and self.views_are_gradients:
                self._hook_order.restore()
            self.listener.pass_begins()
            self._open()
        self._callback_queued = self._running = True
        self.thread = threading.get_ident()
        self._graphs.wanted = torch.is_grad_enabled() and self.views_are_gradients and not self._alone
        torch.autograd.Variable._execution_engine.queue_callback(_EndOfPass(self))  # pyright: ignore

    @property
    def broken_off(self) -> bool:
        """Whether an exception has ended a synchronised pass; to be asked outside of backward passes."""
        if self.failed_to_end:
            return True
        waits = self.open and self._callback_queued and torch._C._current_graph_task_id() == -1
        return waits and not self.runs_elsewhere

    @property
    def runs_elsewhere(self) -> bool:
        """Whether another thread is in a synchronised pass; to be asked outside of backward passes.

        For a moment after an exception it may still seem so where gradients are on a GPU.
        """
        return self._running and self.thread != threading.get_ident()

    def stays_elsewhere(self) -> bool:
        """As `runs_elsewhere`, for certain: whether no exception is just ending the pass."""
        deadline = time.monotonic() + (_DROP_S if self._streams is not None else 0.0)
        while self.runs_elsewhere and time.monotonic() < deadline:
            time.sleep(0.001)
        return not self._dropped

    def dropped(self) -> None:
        """autograd has given up a pass because of an exception. Called by a destructor, in any thread."""
        self._running = False
        if self.open:
            self._dropped = True
            self.listener.pass_broke_off()

    def forget(self) -> None:
        """Drop an interrupted pass as if it had never begun; for passes without exchanges."""
        self.open = self._callback_queued = self._uncounted = self.failed_to_end = False
        self._graphs.clear()
        self._used = bytearray(len(self._params))

    @torch.no_grad()
    def void(self) -> None:
        """Complete a pass that was interrupted on all ranks, so that they are in step again; gradients become zero."""
        self.open = self._callback_queued = self._uncounted = False
        if not self._buckets:
            self.listener.order_learned(self._order)
        self._waiting = [0] * len(self._buckets)
        self._announce()
        self.listener.finish_exchanges()
        self._graphs.clear()
        for bucket in self._buckets:
            bucket.flat.zero_()
        self._give_back()
        self._used = bytearray(len(self._params))
        self.count += 1

    def _open(self) -> None:
        self.open, self._dropped = True, False
        if self._own is not None:
            self._own.clear()
        if self._state.exchanged:  # in the last pass, or after it at the end of the step
            self._last_exchanged = self.count - 1
        self._state.exchanged = False
        self._arrived = bytearray(len(self._params))
        self._uncounted = self._alone and bool(self._buckets)
        self._order = []
        if self._static is not None:
            self._static.begin_pass()
        self._waiting = list(self._sizes)
        self._next = 0
        if self._streams is not None:
            self._streams.clear()

    def shadow(self) -> None:
        """Run a pass without gradients, to match one of other ranks."""
        used, self._used = self._used, bytearray(len(self._params))
        self._open()
        self._shadow = True
        self.end()
        self._shadow = False
        self._used = used  # what this rank has accumulated is for its next pass

    def graph_task_ended(self) -> None:
        """autograd has ended a backward pass, perhaps one within another."""
        self._callback_queued = False
        try:
            self._graph_task_ended()
        finally:
            self._running = False

    def _graph_task_ended(self) -> None:
        # A reentrant checkpoint runs a backward pass within the backward pass, which ends here too. Gradients of
        # other segments are still to come, unless all are there.
        nested = torch._C._current_autograd_node() is not None
        static = self._static
        complete = 0 not in self._arrived and (static is None or (not static.repeats_left and bool(self._buckets)))
        if self.open and (complete or not nested):
            try:
                self.end()
            except BaseException:
                self.failed_to_end = True
                self.listener.pass_broke_off()
                raise

    def _announce(self) -> None:
        last = len(self._buckets) - 1
        while self._next <= last and self._waiting[self._next] == 0:
            bucket = self._buckets[self._next]
            if self._next == last and self.views_are_gradients and not self._alone:
                self._usage.publish(self.count, self._used_bits(), self._last_exchanged)
            if self.views_are_gradients and not self._alone:
                several = self._streams is not None and self._streams.join()
                if self._graphs.wanted:
                    self._graphs.note(bucket, self._position)
                without = bucket.gather()
                if several and self._streams is not None:
                    self._streams.keep(bucket.away.values())
                if self._own is not None:
                    self._own.note(bucket, self._position)
                self._mend(bucket, without)
            self._next += 1
            try:
                self.listener.bucket_ready(bucket)
            finally:
                bucket.bring()  # if nothing was launched

    def _mend(self, bucket: Bucket, without: Sequence[int]) -> None:
        """Give the mean to used parameters whose `.grad` was set to None before their bucket was launched."""
        for position in without:
            index = self._position[bucket.names[position]]
            if self._arrived[index] or self._used[index]:
                self._params[index].grad = self._views[index]

    def _used_bits(self) -> int:
        return bitmap(self._used) | bitmap(self._arrived)

    def _arrived_twice(self, index: int) -> None:
        if not self._buckets:
            if self._static is not None:
                self._static.note_repeat(index)
                self._order.remove(index)
                self._order.append(index)
            return
        number = self._bucket_of[index]
        if number < self._next:
            raise RuntimeError(
                f"parameter {self._names[index]!r} got another gradient in the same backward pass after its "
                "bucket was launched: a reentrant checkpoint uses it in several segments; use use_reentrant=False or "
                "static_graph=True"
            )
        if self._static is not None and index in self._static.repeats:
            self._static.repeats_left -= 1
            self._waiting[number] -= 1
            if self._waiting[number] == 0 and number == self._next:
                self._announce()

    @torch.no_grad()
    def _fill_missing(self) -> dict[int, Tensor | None]:
        """Fill the bucket parts of missing gradients with what `.grad` holds.

        Returns, for each parameter that was not used at all since the last synchronised pass, its gradient as it
        was (None if none).
        """
        kept: dict[int, Tensor | None] = {}
        for index, arrived in enumerate(self._arrived):
            if not arrived:
                grad, view = self._params[index].grad, self._views[index]
                if not self._used[index]:
                    kept[index] = view.clone() if grad is view else grad
        if kept:
            self.listener.params_missing(list(kept))
        return kept

    @torch.no_grad()
    def _settle(self, kept: dict[int, Tensor | None]) -> None:
        """Give the mean to parameters that other ranks used, and restore the gradient of those that no rank used."""
        self.listener.finish_exchanges()
        static = self._static
        union = None if static is None else static.union
        if union is None:
            union = self._usage.union(self.count, self._used_bits())
            if static is not None and not self._shadow:
                static.union = union
        self.listener.params_unused([index for index in kept if not union >> index & 1])
        for index, grad in kept.items():
            if union >> index & 1:
                self._params[index].grad = self._views[index]
            elif grad is not None:
                self._views[index].copy_(grad)


class _EndOfPass:
    """Called by autograd at the end of a pass. Where an exception ends the pass, it is dropped instead."""

    def __init__(self, reducer: Reducer) -> None:
        self._ref, self._called = weakref.ref(reducer), False

    def __call__(self) -> None:
        self._called = True
        reducer = self._ref()
        if reducer is not None:
            reducer.graph_task_ended()

    def __del__(self) -> None:
        reducer = self._ref()
        if not self._called and reducer is not None:
            reducer.dropped()
