"""Follows backward passes: which gradients have come, which buckets are full, what is missing at the end.

One synchronised pass:
  a gradient comes  -> its bucket counts down; full buckets are announced in the agreed order
  the pass ends     -> buckets that still wait are announced; then `on_end`; then missing gradients are settled
The first synchronised pass only records in which order gradients come.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bagua.engine.bucket import Bucket
from bagua.engine.graph_task import accumulates
from bagua.engine.usage import UsageBoard

__all__ = ["Backward"]


class Backward:
    """The backward passes of one module.

    Args:
        names, params: the trainable parameters; elsewhere a parameter is its index here.
        usage: who used what, on all ranks.
        views_are_gradients: whether bucket views hold gradients (else gradients are only counted).
        alone: a single rank; nothing is exchanged, so nothing is copied or settled.
        on_begin: called before each pass.
        on_first: called at the end of the first pass with the order of arrival; must call `set_buckets`.
        on_ready: called with each bucket, in order.
        on_end: called when every bucket has been ready; afterwards the pass counts as done.
        finish: called before missing gradients are settled; returns when all exchanges are over.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        usage: UsageBoard,
        *,
        views_are_gradients: bool,
        alone: bool,
        on_begin: Callable[[], None],
        on_first: Callable[[list[int]], None],
        on_ready: Callable[[Bucket], None],
        on_end: Callable[[], None],
        finish: Callable[[], None],
    ) -> None:
        self.sync = True  # False within no_sync
        self.static_graph = False  # every pass uses the same parameters as often as the first
        self.open = False  # a synchronised pass has begun and is not over
        self.count = 0  # synchronised passes that are over; the same on all ranks
        self._names, self._params, self._usage = names, params, usage
        self.views_are_gradients, self._alone = views_are_gradients, alone
        self._on_begin, self._on_first, self._on_ready, self._on_end = on_begin, on_first, on_ready, on_end
        self._finish = finish
        self._callback_queued = False
        self._arrived = bytearray(len(params))
        self._used = bytearray(len(params))  # within no_sync, since the last synchronised pass
        self._uncounted = False  # a single rank, in a pass: nobody needs to know which gradients have come
        self.exchanged = False  # in this pass; if not, no rank may wait for another's set of used parameters
        self._order: list[int] = []
        self._repeats: dict[int, int] = {}  # with a static graph: gradients of a pass after a parameter's first one
        self._repeats_left = 0  # in this pass
        self._static_used: int | None = None  # on this rank; bits
        self._static_union: int | None = None  # on any rank
        self._last_exchanged = -1  # the last pass, before this one, with an exchange
        self._shadow = False  # the pass is one of other ranks
        self._buckets: Sequence[Bucket] = ()
        self._views: list[Tensor] = []
        self._bucket_of: list[int] = []
        self._sizes: list[int] = []
        self._waiting: list[int] = []  # per bucket: gradients still to come
        self._next = 0  # first bucket not yet announced

    def set_buckets(self, buckets: Sequence[Bucket]) -> None:
        """From now on gradients belong to `buckets`."""
        position = {name: index for index, name in enumerate(self._names)}
        self._buckets = buckets
        self._bucket_of = [0] * len(self._names)
        self._views = [torch.empty(0)] * len(self._names)
        for bucket in buckets:
            for name, view in zip(bucket.names, bucket.views, strict=True):
                self._bucket_of[position[name]] = bucket.index
                self._views[position[name]] = view
        self._sizes = [len(bucket.params) for bucket in buckets]
        for index, times in self._repeats.items() if buckets else ():
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
            self._begin()
        arrived = self._arrived
        if arrived[index]:
            self._arrived_twice(index)
            return
        arrived[index] = 1
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
        if self.sync and not self._callback_queued and accumulates():
            self._begin()

    def sparse_ready(self) -> None:
        """autograd has accumulated a sparse gradient, which no bucket waits for."""
        if self.sync and not self._callback_queued:
            self._begin()

    def end(self) -> None:
        """Close the pass that is open: announce what still waits, let the algorithm finish, settle what is missing."""
        self.open = self._callback_queued = False
        if not self._buckets:
            self._on_first(self._order)
        self._uncounted = False
        complete = 0 not in self._arrived
        kept = {} if complete or self._alone or not self.views_are_gradients else self._fill_missing()
        if self._next < len(self._buckets):
            self._waiting = [0] * len(self._buckets)
            self._announce()
        self._on_end()
        if kept and self.exchanged:
            self._settle(kept)
        if self.static_graph and not self._shadow:
            self._check_static()
        self._used = bytearray(len(self._params))
        self.count += 1

    def _begin(self) -> None:
        if not self.open:
            self._on_begin()
            self._open()
        self._callback_queued = True
        ref = weakref.ref(self)

        def backward_ended() -> None:
            backward = ref()
            if backward is not None:
                backward._graph_task_ended()

        torch.autograd.Variable._execution_engine.queue_callback(backward_ended)  # pyright: ignore

    def _open(self) -> None:
        self.open = True
        if self.exchanged:  # in the last pass, or after it at the end of the step
            self._last_exchanged = self.count - 1
        self.exchanged = False
        self._arrived = bytearray(len(self._params))
        self._uncounted = self._alone and bool(self._buckets)
        self._order = []
        self._repeats_left = sum(self._repeats.values())
        self._waiting = list(self._sizes)
        self._next = 0

    def shadow(self) -> None:
        """Make a pass in which no gradient comes, beside one of other ranks."""
        self._open()
        self._shadow = True
        self.end()
        self._shadow = False

    def _graph_task_ended(self) -> None:
        self._callback_queued = False
        # A reentrant checkpoint runs a backward pass within the backward pass, which ends here too. Gradients of
        # other segments are still to come, unless all are there.
        nested = torch._C._current_autograd_node() is not None
        complete = 0 not in self._arrived and not self._repeats_left and not (self.static_graph and not self._buckets)
        if self.open and (complete or not nested):
            self.end()

    def _announce(self) -> None:
        last = len(self._buckets) - 1
        while self._next <= last and self._waiting[self._next] == 0:
            bucket = self._buckets[self._next]
            if self._next == last and self.views_are_gradients and not self._alone:
                self._usage.publish(self.count, self._used_bits(), self._last_exchanged)
            if self.views_are_gradients and not self._alone:
                bucket.gather()
            self._next += 1
            try:
                self._on_ready(bucket)
            finally:
                bucket.bring()  # if nothing was launched

    def _used_bits(self) -> int:
        return _bits(self._used) | _bits(self._arrived)

    def _arrived_twice(self, index: int) -> None:
        if not self._buckets:
            if self.static_graph:
                self._repeats[index] = self._repeats.get(index, 0) + 1
                self._order.remove(index)
                self._order.append(index)
            return
        number = self._bucket_of[index]
        if number < self._next:
            raise RuntimeError(
                f"parameter {self._names[index]!r} got another gradient in the same backward pass after its "
                "bucket had left: a reentrant checkpoint uses it in several segments; use use_reentrant=False or "
                "static_graph=True"
            )
        if index in self._repeats:
            self._repeats_left -= 1
            self._waiting[number] -= 1
            if self._waiting[number] == 0 and number == self._next:
                self._announce()

    def _check_static(self) -> None:
        used = self._used_bits()
        if self._static_used is None:
            self._static_used = used
        elif used != self._static_used:
            changed = [name for i, name in enumerate(self._names) if (used ^ self._static_used) >> i & 1]
            raise RuntimeError(
                f"static_graph=True, but other parameters are used than in the first step: {', '.join(changed[:5])}"
            )

    @torch.no_grad()
    def _fill_missing(self) -> dict[int, Tensor | None]:
        """Make the parts of the buckets for which no gradient came count with what `.grad` holds.

        Returns, for each parameter that was not used at all since the last synchronised pass, its gradient as it
        was (None if none).
        """
        kept: dict[int, Tensor | None] = {}
        for index, arrived in enumerate(self._arrived):
            if not arrived:
                grad, view = self._params[index].grad, self._views[index]
                if not self._used[index]:
                    kept[index] = view.clone() if grad is view else grad
                if grad is None:
                    view.zero_()
        return kept

    @torch.no_grad()
    def _settle(self, kept: dict[int, Tensor | None]) -> None:
        """Give parameters that other ranks used the mean, and those that nobody used what they had."""
        self._finish()
        union = self._static_union
        if union is None:
            union = self._usage.union(self.count, self._used_bits())
            if self.static_graph and not self._shadow:
                self._static_union = union
        for index, grad in kept.items():
            if union >> index & 1:
                self._params[index].grad = self._views[index]
            elif grad is not None:
                self._views[index].copy_(grad)


def _bits(flags: bytearray) -> int:
    """Flag i as bit i."""
    return int(bytes(flags[::-1]).translate(_ASCII), 2)


_ASCII = b"01" + bytes(254)
