"""What a compressed collective returns."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.engine.lanes.lane import Ticket
from bagua.errors import CommunicationError

__all__ = ["CompressedWork", "Outcome"]


class Outcome:
    """Whether a collective failed. Written by the lane before the work is done.

    Attributes:
        error: why; None if it did not.
    """

    def __init__(self) -> None:
        self.error: CommunicationError | None = None

    def check(self) -> None:
        """Raise it.

        Raises:
            CommunicationError: the collective failed.
        """
        if self.error is not None:
            raise CommunicationError(str(self.error)) from self.error.__cause__


class CompressedWork(dist.Work):
    """A collective under way on the group's lane.

    Args:
        tensors: what it writes.
        ticket: of the lane.
        future: done when the lane has done it; raises if it failed.
        outcome: what the lane says of it.
    """

    def __init__(
        self, tensors: Sequence[Tensor], ticket: Ticket, future: torch.futures.Future[list[Tensor]], outcome: Outcome
    ) -> None:
        super().__init__()
        self._tensors, self._ticket, self._future, self._outcome = list(tensors), ticket, future, outcome

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the results may be used by the caller; on NCCL: by the current stream.

        Args:
            timeout: none if it is zero.

        Raises:
            CommunicationError: the collective failed, or was not done within `timeout`.
        """
        if timeout > timedelta(0) and not self._ticket.ends_within(timeout.total_seconds()):
            raise CommunicationError(f"{self._ticket.label}: not done within {timeout.total_seconds():g} s")
        if not self._ticket.done:
            self._ticket.wait()
        self._outcome.check()
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ticket.done

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._ticket.done and self._outcome.error is None

    def exception(self) -> CommunicationError | None:
        """Why it failed; None if it did not."""
        return self._outcome.error if self._ticket.done else None

    def result(self) -> list[Tensor]:
        """The tensors that it writes."""
        return self._tensors

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """As `wait`."""
        self.wait()

    def get_future(self) -> Any:
        """Future of the list of tensors that it writes."""
        return self._future
