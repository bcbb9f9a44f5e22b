"""Work for the next groups in a thread of its own, while the training thread goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

from bagua.comm.own_threads import start_thread
from bagua.errors import CommunicationError

__all__ = ["Opening"]

_LOOK_S = 0.5  # between two looks at whether the work has been cancelled
_T = TypeVar("_T")


class Opening(Generic[_T]):
    """Runs `work` in a thread. The training thread calls `rest` now and then, and `result` once it is `done`.

    Args:
        work: gets this object, and may use the weights within `weights_at_rest` only.
        end: asks the work to end.
    """

    def __init__(self, work: Callable[[Opening[_T]], _T], end: Callable[[], object] | None = None) -> None:
        self._changed = threading.Condition()
        self._wanted = self._resting = self._cancelled = False
        self._result: _T | None = None
        self._error: BaseException | None = None
        self._end = end
        self._thread = start_thread(partial(self._run, work), "bagua-opening", self._ask_to_end)

    def _run(self, work: Callable[[Opening[_T]], _T]) -> None:
        try:
            self._result = work(self)
        except BaseException as error:  # raised again in the training thread, whatever it is
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants the result any more."""
        return self._cancelled

    def result(self) -> _T:
        """What `work` has returned, once it is done; raises what it has raised."""
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def rest(self) -> None:
        """In the training thread, between two steps: leave the weights to the work while it wants them."""
        with self._changed:
            if self._wanted:
                self._resting = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._wanted)
                self._resting = False

    @contextmanager
    def weights_at_rest(self) -> Iterator[None]:
        """In the work: within it the training thread makes no step.

        Raises:
            CommunicationError: the work was cancelled.
        """
        with self._changed:
            self._wanted = True
            while not self._changed.wait_for(lambda: self._resting, _LOOK_S):
                if self._cancelled:
                    self._wanted = False
                    raise CommunicationError("the process ends")
        try:
            yield
        finally:
            with self._changed:
                self._wanted = False
                self._changed.notify_all()

    def _ask_to_end(self) -> None:
        self._cancelled = True
        if self._end is not None:
            self._end()

    def cancel(self, timeout_s: float) -> None:
        """Ask the work to end, and wait for that."""
        self._ask_to_end()
        self._thread.join(timeout_s)
