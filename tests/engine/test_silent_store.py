"""An exchange fails while the store does not answer: what it is asked then ends soon, whatever the timeout."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

import bagua
from bagua.algorithms.base import Exactness, Payload
from bagua.comm.team import Team
from bagua.engine.failures import Failures
from bagua.engine.lanes.lane import Ticket

TIMEOUT_S = 120.0


class SilentStore:
    """As the client of a server that is stopped."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def check(self, keys: list[str]) -> bool:
        return self.over.wait()

    def set(self, key: str, value: bytes) -> None:
        self.over.wait()


def test_the_error_does_not_wait_for_another_timeout() -> None:
    store = SilentStore()
    team = Team(1, 3, store, timedelta(seconds=TIMEOUT_S), "gloo")
    algorithm = SimpleNamespace(payload=Payload.GRAD, uneven="", exactness=Exactness.EXACT)
    state = SimpleNamespace(step=3, algorithm=algorithm)
    pool = SimpleNamespace(abandon=lambda: None)
    failures = Failures(cast(Any, state), team, cast(Any, pool), cast(Any, SimpleNamespace(count=3)), "1")
    ticket = Ticket("all_reduce step 3 bucket 0")
    ticket.error = RuntimeError("timed out")
    ticket.finish(TIMEOUT_S)
    try:
        started = time.monotonic()
        failures.look_for_broken()
        with pytest.raises(bagua.CommunicationError, match="timed out; rank 0, which serves the store, gave no answer"):
            failures.fail(ticket)
        assert time.monotonic() - started < TIMEOUT_S / 4
    finally:
        store.over.set()
