"""Shared memory of the relay and the cluster: settings and counters. Layout: relay.cpp."""

from __future__ import annotations

import ctypes
import mmap
import struct
from pathlib import Path

from bagua.lab.link import Link

__all__ = ["ABI", "PAIR_WORDS", "Control"]

ABI = 1
_HEADER_WORDS = 16
_PORT_WORDS = 24
PAIR_WORDS = 6
_HEADER = ("abi", "ports", "cpu_ns", "frames", "late", "late_max_ns", "late_sum_ns", "wakes", "starved", "pairs")
_SETTINGS = ("up_bps", "down_bps", "latency_ns", "jitter_ns", "loss", "flow_bps", "queue_bytes")
_COUNTERS = (
    *("sent_bytes", "received_bytes", "sent_frames", "received_frames"),
    *("queue_drops", "loss_drops", "cut_drops", "port_drops"),
)
_PAIR = ("bps", "latency_ns", "queue_bytes", "bytes", "drops", "shares")
_PORT = {name: index for index, name in enumerate((*_SETTINGS, "cut", *_COUNTERS))}


class Control:
    """A view of the shared file. One 64-bit word is written in one piece, so no lock is needed."""

    def __init__(self, path: Path, num_hosts: int, create: bool = False) -> None:
        size = 8 * (_HEADER_WORDS + num_hosts * _PORT_WORDS + num_hosts**2 * PAIR_WORDS)
        self._num_hosts = num_hosts
        with path.open("w+b" if create else "r+b") as file:
            if create:
                file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self.words = (ctypes.c_uint64 * (size // 8)).from_buffer(self._map)
        if create:
            self.words[0], self.words[1] = ABI, num_hosts

    def set_link(self, host: int, link: Link) -> None:
        """Changes a host's link; frames that are on their way keep their time."""
        bandwidth, latency_ns, jitter_ns, loss, flow, queue = link.settings()
        bits = struct.unpack("<Q", struct.pack("<d", loss))[0]
        for name, value in zip(
            _SETTINGS, (bandwidth, bandwidth, latency_ns, jitter_ns, bits, flow, queue), strict=True
        ):
            self.words[self._index(host, name)] = value

    def set_pair(self, sender: int, receiver: int, link: Link) -> None:
        """Changes the path from one host to another: a bandwidth with its queue, and a latency; 0 for neither."""
        bandwidth, latency_ns, _, _, _, queue = link.settings()
        for name, value in (("bps", bandwidth), ("latency_ns", latency_ns), ("queue_bytes", queue)):
            self.words[self._pair_index(sender, receiver, name)] = value
        self.words[_HEADER.index("pairs")] = 1

    def share_pair(self, sender: int, receiver: int, first: tuple[int, int]) -> None:
        """The path from one host to another has no bandwidth and queue of its own, but those of the path `first`."""
        path = first[0] * self._num_hosts + first[1]
        self.words[self._pair_index(sender, receiver, "shares")] = path + 1

    def pair(self, sender: int, receiver: int, name: str) -> int:
        """A setting or counter of a path: one of `_PAIR`."""
        return int(self.words[self._pair_index(sender, receiver, name)])

    def set_cut(self, host: int, cut: bool) -> None:
        """Makes the relay drop what comes from and goes to the host."""
        self.words[self._index(host, "cut")] = int(cut)

    def counter(self, host: int, name: str) -> int:
        """One of `_COUNTERS`."""
        return int(self.words[self._index(host, name)])

    def header(self, name: str) -> int:
        """One of `_HEADER`."""
        return int(self.words[_HEADER.index(name)])

    def close(self) -> None:
        """Ends the view; no method works afterwards."""
        del self.words
        self._map.close()

    def _pair_index(self, sender: int, receiver: int, name: str) -> int:
        before = sender * self._num_hosts + receiver
        return _HEADER_WORDS + self._num_hosts * _PORT_WORDS + before * PAIR_WORDS + _PAIR.index(name)

    @staticmethod
    def _index(host: int, name: str) -> int:
        return _HEADER_WORDS + host * _PORT_WORDS + _PORT[name]
