"""Finds the rank that failed first and made the others fail."""

from __future__ import annotations

import os
import signal
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

__all__ = ["FirstFailure"]

# A rank that ends so did not do it because a peer was gone, unless the launcher itself killed it.
_OWN_FAULT = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
_CLOSING_S = 5.0
_WHOLE_SECOND_S = 0.999


class FirstFailure(ChildFailedError):
    """torchrun's summary, whose root cause is the failure that came first and not one that followed from it.

    torchrun compares times in whole seconds, so that among ranks which fail together the lowest one wins, and
    a rank that was killed counts from the moment its end was noticed, after its peers had lost their
    connection.
    """

    def __init__(self, name: str, failures: dict[int, ProcessFailure]) -> None:
        for failure in failures.values():
            if failure.exitcode > 0 and not os.path.isfile(failure.error_file):
                failure.message = (
                    f"exit code {failure.exitcode}, no traceback on record; what the rank printed is above"
                )
        super().__init__(name, failures)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """The failure that comes first among those that are not the consequence of another."""
        earliest = min(_time_s(f) for f in self.failures.values())
        rank = min(self.failures, key=lambda r: (_consequence(self.failures[r], earliest), _time_s(self.failures[r])))
        return rank, self.failures[rank]


def _consequence(failure: ProcessFailure, earliest_s: float) -> int:
    """0 for a fault of the rank's own, 1 for what a lost peer brings about, 2 for what the launcher did."""
    extra = _extra(failure)
    # A rank that has recorded an exception may still have been stopped on its way out.
    if extra or failure.exitcode >= 0:
        return 1 if extra.get("peer_lost") else 0
    number = -failure.exitcode
    if number == signal.SIGKILL and _time_s(failure) > earliest_s + _CLOSING_S:
        return 2
    if number in _OWN_FAULT:
        return 0
    return 2 if number in (signal.SIGTERM, signal.SIGINT) else 1


def _time_s(failure: ProcessFailure) -> float:
    nanoseconds = _extra(failure).get("time_ns")
    if nanoseconds is not None:
        return nanoseconds / 1e9
    return failure.timestamp + _WHOLE_SECOND_S


def _extra(failure: ProcessFailure) -> dict[str, Any]:
    data: Any = failure.error_file_data
    message = data.get("message") if isinstance(data, dict) else None
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    return extra if isinstance(extra, dict) else {}
