"""Hosts that vanish without a word, and peers that only take their time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from bagua.bench.net_links import Namespaces, missing
from bagua.net.driver import Process

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

TIMEOUT_S = 2
# What the other end says. A flow on which nothing is under way learns it by keepalive, at either end.
SAYS = {"receiver": ("has not answered for too long", "lost: "), "sender": ("lost: ",)}


@contextmanager
def moving(seconds: float = 60) -> Iterator[tuple[Namespaces, Process, Process]]:
    """(hosts, sending process, receiving process) with a transfer under way over four flows."""
    with Namespaces() as hosts:
        env = {**hosts.environment, "BAGUA_NET_TIMEOUT_S": str(TIMEOUT_S)}
        env |= {"BAGUA_NET_ADAPT": "0", "BAGUA_NET_FLOWS": "4"}
        options = {"mode": "rate", "seconds": seconds, "bytes": 1 << 20, "timeout_seconds": 40}
        receiver = Process(env=env, prefix=hosts.prefixes[1], role="recv", **options)
        sender = Process(env=env, prefix=hosts.prefixes[0], role="send", **options)
        try:
            sender.give_handles(receiver.read_handles(1))
            receiver.await_transfer()
            yield hosts, sender, receiver
        finally:
            for process in (sender, receiver):
                process.kill()
                with suppress(ValueError):  # the test has waited for it
                    process.wait(60)


def vanish(hosts: Namespaces, index: int) -> None:
    """From now on the host takes no packets, and no end of the link notices."""
    command = ["ip", "address", "del", f"{hosts.addresses[index]}/24", "dev", "net0"]
    subprocess.run([*hosts.prefixes[index], *command], check=True, timeout=60)


@pytest.mark.parametrize("vanishing", ["receiver", "sender"])
def test_a_vanished_host_is_an_error(vanishing: str) -> None:
    with moving() as (hosts, sender, receiver):
        vanish(hosts, 1 if vanishing == "receiver" else 0)
        begin = time.monotonic()
        survivor = sender if vanishing == "receiver" else receiver
        ended = survivor.wait(TIMEOUT_S + 60)
        assert ended.status == 3 and ended.results[-1]["result"] == 6, ended
        assert any(text in ended.errors for text in SAYS[vanishing]), ended.errors
        assert time.monotonic() - begin > 0.5 * TIMEOUT_S, "a short loss is none of a host"


def test_a_host_that_vanishes_behind_a_full_buffer() -> None:
    """The receiver does not read: nothing is under way but the sender's questions whether there is room."""
    with moving() as (hosts, sender, receiver):
        os.kill(receiver.pid, signal.SIGSTOP)
        time.sleep(1)
        vanish(hosts, 1)
        ended = sender.wait(4 * TIMEOUT_S + 60)
        assert ended.status == 3 and ended.results[-1]["result"] == 6, ended
        assert any(text in ended.errors for text in SAYS["receiver"]), ended.errors


@pytest.mark.slow
def test_a_peer_that_takes_its_time_is_none_that_vanished() -> None:
    """Its host answers, however long it posts no receive."""
    with moving(seconds=3) as (_, sender, receiver):
        os.kill(receiver.pid, signal.SIGSTOP)
        time.sleep(5 * TIMEOUT_S)
        os.kill(receiver.pid, signal.SIGCONT)
        for process in (sender, receiver):
            process.read_result(30)
        for process in (sender, receiver):
            process.release()
        for process in (sender, receiver):
            ended = process.wait(60)
            assert ended.status == 0, (ended.results, ended.errors)
