"""What stands for the original's Rust core: starts the operations of a bucket when all of its tensors are marked."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.tensor import record_of

__all__ = ["BaguaBackend"]


class BaguaBackend:
    """The `_bagua_backend` of a module: buckets are exchanged in their order, over and over.

    Args:
        launch: begins to exchange a bucket and returns.
        wait: returns when all that was launched is done.
    """

    def __init__(self, launch: Callable[[BaguaBucket], None], wait: Callable[[], None]) -> None:
        self._launch, self._wait = launch, wait
        self._buckets: deque[BaguaBucket] = deque()
        self._launched: list[BaguaBucket] = []  # since the last wait

    def register_ordered_buckets(self, buckets: Sequence[BaguaBucket]) -> None:
        """Exchange these from now on, in this order, which must be the same on all ranks.

        Raises:
            ValueError: two buckets or two tensors have one name.
        """
        self.wait_pending_comm_ops()
        names = Counter(bucket.name for bucket in buckets)
        tensors = Counter(_name(tensor) for bucket in buckets for tensor in bucket.tensors)
        for what, counts in (("bucket", names), ("tensor", tensors)):
            twice = [name for name, count in counts.items() if count > 1]
            if twice:
                raise ValueError(f"buckets: the {what} name {twice[0]!r} is used twice")
        for bucket in self._buckets:
            bucket.scheduler = None
        self._buckets = deque(buckets)
        for bucket in buckets:
            bucket.scheduler = self
            bucket.marked.clear()

    def mark_communication_ready(self, tensor: Tensor, ready_cuda_event: int = 0) -> None:
        """Mark a tensor, and launch the buckets whose turn it is and whose tensors all are marked.

        Raises:
            RuntimeError: it is marked already, and its bucket waits; names what for.
        """
        record = record_of(tensor)
        bucket = None if record is None or record.bucket is None else record.bucket()
        if bucket is None or bucket.scheduler is not self:
            raise RuntimeError(f"tensor {_name(tensor)!r} is in no bucket of this module")
        if id(tensor) in bucket.marked:
            first = self._buckets[0]
            missing = ", ".join(first.missing[:5])
            raise RuntimeError(
                f"tensor {_name(tensor)!r} is marked ready again, and bucket {bucket.name!r} has not been exchanged "
                f"since: bucket {first.name!r} comes first and waits for {missing}"
            )
        bucket.marked.add(id(tensor))
        while self._buckets and len(self._buckets[0].marked) == len(self._buckets[0].tensors):
            first = self._buckets[0]
            first.marked.clear()
            self._buckets.rotate(-1)
            if first in self._launched:  # its flat tensor is in use
                self.wait_pending_comm_ops()
            self._launched.append(first)
            self._launch(first)

    def wait_pending_comm_ops(self) -> int:
        """Return when all buckets that were launched are exchanged; how many these were."""
        count = len(self._launched)
        self._launched.clear()
        self._wait()
        return count


def _name(tensor: Any) -> str:
    record = record_of(tensor)
    return "" if record is None else record.name
