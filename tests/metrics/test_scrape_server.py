"""Readers that say nothing neither keep descriptors of the process nor keep others out."""

from __future__ import annotations

import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

import pytest

from bagua.metrics import scrape_server
from bagua.metrics.scrape_server import ScrapeServer


class Answer(BaseHTTPRequestHandler):
    """Says yes."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"yes")

    def log_message(self, *_: object) -> None:
        """Nothing."""


def ask(server: ScrapeServer) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20) as reply:
        return reply.read()


def until(settled: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not settled():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def readers() -> int:
    return sum("process_request_thread" in each.name for each in threading.enumerate())


def test_silent_readers_are_few_and_keep_nobody_out() -> None:
    before = readers()
    server = ScrapeServer("127.0.0.1", 0, Answer)
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(60)]
    silent[30].sendall(b"GET /metrics HTTP/1.1\r\nHos")
    try:
        assert ask(server) == b"yes"
        until(lambda: readers() - before <= 16, "too many threads")
        assert silent[0].recv(1) == b"", "the oldest was ended"
    finally:
        server.close()
        until(lambda: readers() == before, "closing ends all connections")
        for each in silent:
            each.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), timeout=1)


def test_a_slow_reader_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape_server, "_LONGEST_S", 0.3)
    before = len(os.listdir("/proc/self/fd"))
    server = ScrapeServer("127.0.0.1", 0, Answer)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as slow:
        slow.sendall(b"GET /met")
        assert slow.recv(1) == b""
        assert ask(server) == b"yes"
    server.close()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, "descriptors are left")


def test_an_address_of_ipv6_and_a_port_in_use() -> None:
    first = ScrapeServer("127.0.0.1", 0, Answer)
    try:
        with pytest.raises(OSError):
            ScrapeServer("127.0.0.1", first.port, Answer)
    finally:
        first.close()
    try:
        second = ScrapeServer("::1", 0, Answer)
    except OSError:
        pytest.skip("no IPv6 here")
    with urllib.request.urlopen(f"http://[::1]:{second.port}/", timeout=20) as reply:
        assert reply.read() == b"yes"
    second.close()
