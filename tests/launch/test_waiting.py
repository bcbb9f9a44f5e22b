"""A launcher that waits for the other nodes of its job can be ended."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from bagua.distributed import waiting
from bagua.distributed.waiting import end_while_waiting
from tests.launch.launching import RUN, Launcher, script

LIMIT_S = 30.0  # the store's own timeout is 60 s and more


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_waits_for_a_store_ends(tmp_path: Path, number: signal.Signals) -> None:
    """The store takes the connection and gives no answer: torch waits for it outside of Python."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        store.settimeout(120)
        place = ["--master-addr", "127.0.0.1", "--master-port", str(store.getsockname()[1])]
        launcher = Launcher(tmp_path, [*RUN, "--nnodes", "2", "--node-rank", "1", *place, script(tmp_path, "")])
        try:
            connection, _ = store.accept()
        finally:
            launcher.interrupt(number)
        with connection:
            ended = launcher.wait(LIMIT_S)
    assert ended.code == 128 + number
    assert f"ended by {number.name} while it waited for other nodes" in ended.err


def test_a_launcher_that_has_started_ranks_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need time to end. That torch has started them is seen by its handlers."""
    ended: list[int] = []
    monkeypatch.setattr(waiting, "_REACTS_S", 0.05)
    monkeypatch.setattr("os._exit", ended.append)
    received = threading.Event()

    def of_torch(number: int, frame: object) -> None:
        received.set()

    earlier = signal.getsignal(signal.SIGTERM)
    try:
        with end_while_waiting("bagua run"):
            signal.signal(signal.SIGTERM, of_torch)
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.5)
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert received.is_set() and ended == []


def test_signals_go_where_they_went_before() -> None:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    with reader, writer:
        earlier = signal.set_wakeup_fd(writer.fileno())
        try:
            with end_while_waiting("bagua run"):
                assert any(each.name == "bagua-waiting" for each in threading.enumerate())
            assert signal.set_wakeup_fd(earlier) == writer.fileno()
        finally:
            signal.set_wakeup_fd(earlier)
    assert not any(each.name == "bagua-waiting" for each in threading.enumerate())
