"""Measures a link with real sockets: rate of a stream, round trips of small messages.

The functions take hosts of a cluster; started as a file this is the program that runs on them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bagua.lab.host import Host

__all__ = ["measure_rate", "measure_round_trips"]

_CHUNK = 1 << 20
_PORT = 5201
_PROGRAM = [sys.executable, "-I", "-S", str(Path(__file__).resolve())]


def measure_rate(sender: Host, receiver: Host, seconds: float = 1.0, streams: int = 1, port: int = _PORT) -> float:
    """Sends for a while over TCP.

    Returns:
        bits per second of payload that arrived, counted after the first 0.2 s.

    Raises:
        RuntimeError: if nothing came through.
    """
    address = [receiver.address, str(port)]
    server = receiver.popen([*_PROGRAM, "sink", *address, str(streams), str(seconds)], stdout=-1, text=True)
    client = sender.popen([*_PROGRAM, "source", *address, str(streams), str(seconds + 0.4)])
    try:
        out, _ = server.communicate(timeout=seconds + 20)
        client.wait(20)
    finally:
        server.kill()
        client.kill()
    if server.returncode or not out:
        raise RuntimeError(f"no stream from {sender.name} to {receiver.name}")
    return float(json.loads(out))


def measure_round_trips(sender: Host, receiver: Host, num: int = 50, port: int = _PORT + 1) -> list[float]:
    """Bounces a message of one byte over TCP.

    Returns:
        seconds of each round trip, in order.

    Raises:
        RuntimeError: if the connection fails.
    """
    address = [receiver.address, str(port)]
    server = receiver.popen([*_PROGRAM, "echo", *address])
    client = sender.popen([*_PROGRAM, "ping", *address, str(num)], stdout=-1, text=True)
    try:
        out, _ = client.communicate(timeout=60)
    finally:
        server.kill()
        client.kill()
    if client.returncode or not out:
        raise RuntimeError(f"no answers from {receiver.name} to {sender.name}")
    return list(json.loads(out))


def _connect(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(address, timeout=10)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _sink(address: tuple[str, int], streams: int, seconds: float) -> None:
    import selectors

    selector = selectors.DefaultSelector()
    with socket.create_server(address) as listener:
        listener.settimeout(10)
        for _ in range(streams):
            selector.register(listener.accept()[0], selectors.EVENT_READ)
    buffer = bytearray(_CHUNK)
    total, begin = 0, time.monotonic() + 0.2
    counted_from = begin
    while (now := time.monotonic()) < begin + seconds:
        for key, _ in selector.select(0.1):
            total += key.fileobj.recv_into(buffer)  # pyright: ignore
        if now < begin:
            total, counted_from = 0, time.monotonic()
    print(total * 8 / (time.monotonic() - counted_from))


def _source(address: tuple[str, int], streams: int, seconds: float) -> None:
    import threading

    def pump(sock: socket.socket) -> None:
        data = bytes(_CHUNK)
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                sock.sendall(data)
        except OSError:
            return  # the receiver has seen enough

    threads = [threading.Thread(target=pump, args=(_connect(address),), daemon=True) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 5)


def _no_delay(sock: socket.socket) -> None:
    """Neither Nagle nor BBR, whose pacing holds back single bytes once it has estimated a rate from such."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _echo(address: tuple[str, int]) -> None:
    with socket.create_server(address) as listener:
        listener.settimeout(10)
        sock, _ = listener.accept()
        _no_delay(sock)
        while data := sock.recv(1):
            sock.sendall(data)


def _ping(address: tuple[str, int], num: int) -> None:
    sock = _connect(address)
    _no_delay(sock)
    trips = []
    for _ in range(num):
        started = time.perf_counter()
        sock.sendall(b"x")
        if not sock.recv(1):
            raise SystemExit("the other end has closed the connection")
        trips.append(time.perf_counter() - started)
    print(json.dumps(trips))


def _main(argv: list[str]) -> None:
    with contextlib.suppress(OSError):  # the link is measured, not the machine's load; the relay goes first
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    role, address = argv[0], (argv[1], int(argv[2]))
    if role == "sink":
        _sink(address, int(argv[3]), float(argv[4]))
    elif role == "source":
        _source(address, int(argv[3]), float(argv[4]))
    elif role == "echo":
        _echo(address)
    else:
        _ping(address, int(argv[3]))


if __name__ == "__main__":
    _main(sys.argv[1:])
