"""`Cluster`: hosts, the links between them, and the processes on them."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from types import TracebackType
from typing import Any

from bagua.lab.errors import LabError
from bagua.lab.host import Host
from bagua.lab.link import Link
from bagua.lab.namespaces import Namespaces
from bagua.lab.pacing import Pacing
from bagua.lab.pairs import Pairs, both_ways, shared_paths
from bagua.lab.rendezvous import command_for, rendezvous_environment
from bagua.lab.report import Report

__all__ = ["MAX_HOSTS", "MODES", "WIRES", "Cluster"]

MAX_HOSTS = 64
MODES = ("auto", "namespaces", "pacing")
WIRES = ("auto", "veth", "tbf", "relay", "tap", "packet")
_WORD = re.compile("[a-z0-9_]+")
_FIRST_PORT = 29500  # below the ports that the kernel hands out; a host's namespace has them to itself
_logger = logging.getLogger("bagua")


class Cluster:
    """Hosts on this machine, joined by a switch. A context manager: its end ends all.

    Args:
        hosts: how many, 1 to 64.
        link: every host's link to the switch. None, or one without limits: plain veth devices and a bridge, the
            fastest there is; nothing can be limited, cut or delayed later.
        pairs: links between two hosts, by sender and receiver: a bandwidth with its queue, and a latency, which then
            holds in place of the hosts' own. The link of (a, b) also holds for (b, a), unless that is given too. A
            frame crosses the sender's uplink, the link of the pair and the receiver's downlink. Hosts in a tuple share
            the link: `{((0, 1), (2, 3)): Link("100mbit")}` joins two sites of two hosts. Needs the relay.
        mode: "namespaces" emulates all of it; "pacing" only a bandwidth for each socket, without any privilege;
            "auto" takes the first, or the second with a warning.
        wire: what carries the frames: "veth" (a bridge; nothing is emulated), "tbf" (veth and the kernel's token
            buckets: a bandwidth, a queue and cuts) or "relay" (all of a link, at 1 to 2.5 ns of CPU a byte); of the
            latter there are "tap" and "packet" (veth and packet sockets, for where /dev/net/tun cannot be opened).
            "auto": the first of these that can emulate `link`. What `Host.set_link` is to do later must be in it.
        seed: of loss and jitter.
        divide: in pacing mode, each socket has the bandwidth divided by the number of peers.
        congestion: how TCP adapts its rate on all hosts: "cubic", "bbr" or what else the kernel has. None: "cubic",
            whatever the machine is set to, so that runs on different machines can be compared. Not in pacing mode.

    Raises:
        ValueError: for wrong arguments.
        LabError: if this machine cannot do it; says what is missing.
    """

    def __init__(
        self,
        hosts: int,
        link: Link | None = None,
        *,
        pairs: Pairs | None = None,
        mode: str = "auto",
        wire: str = "auto",
        seed: int = 0,
        divide: bool = False,
        congestion: str | None = None,
    ) -> None:
        self.link = link or Link()
        _check(hosts, self.link, mode, wire, congestion)
        self.pairs, self.shared = both_ways(pairs or {}, hosts), shared_paths(pairs or {}, hosts)
        if self.pairs:
            wire = _wire_for_pairs(mode, wire)
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[Any]] = []
        self._launches = 0
        self._apart: set[tuple[int, int]] = set()  # hosts that `partition` keeps from each other
        self._started_at = time.monotonic()
        self._closed = False
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # counters in memory, not on a disk
        self.folder = Path(tempfile.mkdtemp(prefix="bagua-lab-", dir=shared))
        try:
            self.backend = self._backend(hosts, mode, wire, seed, divide, congestion)
            self.hosts = self._make_hosts(hosts)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @property
    def mode(self) -> str:
        """ "namespaces" or "pacing"."""
        return self.backend.mode

    @property
    def wire(self) -> str:
        """ "veth", "tbf", "tap", "packet", or "loopback" in pacing mode."""
        return self.backend.wire

    @property
    def congestion(self) -> str:
        """How TCP adapts its rate on the hosts; empty in pacing mode: as on the machine."""
        return self.backend.congestion

    def _backend(
        self, num: int, mode: str, wire: str, seed: int, divide: bool, congestion: str | None
    ) -> Namespaces | Pacing:
        if mode == "pacing":
            return Pacing(self.folder, num, self.link, divide)
        try:
            return Namespaces(self.folder, num, self.link, wire, seed, congestion, self.pairs, self.shared)
        except LabError as error:
            if mode == "namespaces" or congestion is not None or self.pairs:
                raise
            _logger.warning("bagua lab: no namespaces: %s", error)
        self.folder.mkdir(exist_ok=True)  # the supervisor has cleaned up
        return Pacing(self.folder, num, self.link, divide)

    def _make_hosts(self, num: int) -> tuple[Host, ...]:
        made = []
        for index in range(num):
            speed_file = self.folder / f"speed{index}"
            speed_file.write_text("1.0")
            address = self.backend.addresses[index]
            made.append(Host(self, index, f"host{index}", address, self.backend.interface, speed_file))
        return tuple(made)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def launch(
        self,
        argv: Sequence[str],
        *,
        nproc_per_node: int | None = None,
        hosts: Sequence[int] | None = None,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> list[subprocess.Popen[Any]]:
        """Starts one command on every host, with the rendezvous set up.

        After `bagua run` or `torchrun` the flags for it are put in; any other command finds MASTER_ADDR,
        MASTER_PORT, NODE_RANK and GROUP_RANK in its environment.

        Args:
            argv: the command, e.g. ["bagua", "run", "train.py"].
            nproc_per_node: ranks on each host, for `bagua run` and `torchrun`.
            hosts: only on these, e.g. to bring one back that was killed; the job still is for all.
            port: of the rendezvous. Default: a new one for every launch, see `next_port`.
            env: added to the environment.
            options: of `subprocess.Popen`.

        Returns:
            the processes, in the order of the hosts.
        """
        port = self.next_port() if port is None else port
        started = []
        for index in range(len(self.hosts)) if hosts is None else hosts:
            host = self.hosts[index]
            addresses = [each.address for each in self.hosts]
            words = command_for(argv, len(self.hosts), index, addresses[0], port, nproc_per_node, addresses)
            extra = rendezvous_environment(len(self.hosts), index, self.hosts[0].address, port)
            started.append(host.popen(words, env={**extra, **(env or {})}, **options))
        return started

    def next_port(self) -> int:
        """A port of host 0 that no earlier launch had."""
        if self.mode == "pacing":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                return probe.getsockname()[1]
        with self._lock:
            self._launches += 1
            return _FIRST_PORT + (self._launches - 1) % 2000

    def set_pair(self, sender: int, receiver: int, link: Link) -> None:
        """Change the link from one host to another, in this direction only. `Link()` leaves the hosts' own links.

        Of a link that hosts share, change the path of each of them alike.

        Raises:
            ValueError: no such hosts, or the link has more than a bandwidth, a latency and a queue.
            LabError: the cluster was made without `pairs`.
        """
        both_ways({(sender, receiver): link}, len(self.hosts))
        backend = self.open_backend()
        if not self.pairs or isinstance(backend, Pacing):
            raise LabError("set_pair: make the cluster with pairs")
        backend.set_pair(sender, receiver, link)

    def partition(self, *parts: Sequence[int]) -> None:
        """Splits the network: hosts of different parts no longer reach each other, and are not told so.

        Each call replaces the split of the one before; `heal` ends it. Hosts that are in no part reach all others.

        Args:
            parts: numbers of hosts, each in one part at most.

        Raises:
            ValueError: a number is no host's, or is in two parts.
            LabError: in pacing mode, which has no frames to lose.

        Examples:
            >>> cluster.partition([0, 1], [2, 3])  # doctest: +SKIP
        """
        where = {index: number for number, part in enumerate(parts) for index in part}
        if len(where) != sum(len(part) for part in parts) or not where.keys() <= set(range(len(self.hosts))):
            raise ValueError(f"parts must hold hosts from 0 to {len(self.hosts) - 1}, each once, not {parts!r}")
        backend = self.open_backend()
        apart = {(a, b) for a, b in permutations(where, 2) if where[a] != where[b]}
        for sender, receiver in sorted(apart ^ self._apart):
            backend.set_blocked(sender, receiver, (sender, receiver) in apart)
        self._apart = apart

    def heal(self) -> None:
        """Ends the split of `partition`."""
        self.partition()

    def report(self) -> Report:
        """Bytes of every host and how well the relay kept up, since the start."""
        return self.open_backend().report(self.hosts, time.monotonic() - self._started_at)

    def close(self) -> None:
        """Ends every process on the hosts, and removes hosts and links. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.backend.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def open_backend(self) -> Namespaces | Pacing:
        """What makes the hosts.

        Raises:
            LabError: if the cluster has ended, by `close` or of itself.
        """
        if self._closed or not self.backend.alive:
            raise LabError("the cluster has ended")
        return self.backend

    def start(self, host: Host, argv: Sequence[str], cwd: str, **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on a host: `Host.popen` without its defaults."""
        backend = self.open_backend()
        process = subprocess.Popen(backend.enter(host.index, argv, cwd), **options)
        with self._lock:
            if isinstance(backend, Pacing):
                backend.started(host.index, process.pid)
            self._processes = [*(p for p in self._processes if p.returncode is None), process]
        return process


def _wire_for_pairs(mode: str, wire: str) -> str:
    if mode == "pacing":
        raise ValueError('pairs cannot be emulated with mode="pacing"')
    if wire in ("veth", "tbf"):
        raise ValueError(f'wire="{wire}" cannot emulate pairs: leave wire out, or use wire="relay"')
    return "relay" if wire == "auto" else wire


def _check(hosts: int, link: Link, mode: str, wire: str, congestion: str | None) -> None:
    if not isinstance(hosts, int) or not 1 <= hosts <= MAX_HOSTS:
        raise ValueError(f"hosts must be 1 to {MAX_HOSTS}, not {hosts!r}")
    if not isinstance(link, Link):
        raise TypeError(f"link must be a bagua.lab.Link, not {type(link).__name__}")
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    if wire not in WIRES:
        raise ValueError(f"wire must be one of {', '.join(WIRES)}, not {wire!r}")
    if wire == "veth" and not link.unlimited:
        raise ValueError('wire="veth" cannot limit a link: leave wire out')
    if wire == "tbf" and not (link.unlimited or link.only_bandwidth):
        raise ValueError(f'wire="tbf" emulates only a bandwidth, not {link}: leave wire out, or use wire="relay"')
    if congestion is not None and not _WORD.fullmatch(congestion):
        raise ValueError(f"congestion must name a TCP congestion control, not {congestion!r}")
    if congestion is not None and mode == "pacing":
        raise ValueError('congestion cannot be set with mode="pacing"')
