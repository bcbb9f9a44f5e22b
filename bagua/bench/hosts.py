"""Where ranks run: hosts of an emulated cluster, or plain processes of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from bagua.bench.conditions import Condition

__all__ = ["Hosts", "LabHosts", "LocalHosts", "rank_environment", "worker_command"]


class LocalHosts:
    """Processes that talk over the loopback device: no limits, and no counters of their own."""

    switches = False
    congestion = ""  # how TCP adapts its rate; empty: as on this machine
    interface = ""
    address = "127.0.0.1"

    def __init__(self, num_hosts: int) -> None:
        self._num_hosts = num_hosts
        self._processes: list[subprocess.Popen[Any]] = []

    def start(self, argv: Sequence[str], env: Mapping[str, str], log: IO[str]) -> list[subprocess.Popen[Any]]:
        """Start one rank on each host."""
        for rank in range(self._num_hosts):
            full = {**os.environ, **env, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
            self._processes.append(
                subprocess.Popen(argv, env=full, stdout=log, stderr=log, start_new_session=True, text=True)
            )
        return self._processes

    def set_phase(self, phase: str) -> None:
        """Nothing can be changed."""

    def report(self) -> Any:
        """There is nothing to tell."""
        return None

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes = []

    def close(self) -> None:
        """End all ranks."""
        self.kill()


class LabHosts:
    """Hosts of a `bagua.lab.Cluster`, one rank each."""

    def __init__(self, num_hosts: int, condition: Condition) -> None:
        from bagua.lab import Cluster, Link

        bandwidth = None if condition.bits_per_s == float("inf") else condition.bits_per_s
        measured = Link(
            bandwidth=bandwidth, latency=condition.latency_s, jitter=condition.jitter_s, loss=condition.loss
        )
        # A system that measures its links when it takes a model must find those that it is measured on.
        self._links = {"setup": Link(latency=condition.latency_s), "distribute": measured, "measure": measured}
        self._slow = condition.slow
        self._num_hosts = num_hosts
        self._pairs = {(a, b): Link(bits, latency) for a, b, bits, latency in condition.pairs}
        self._cluster = Cluster(
            num_hosts,
            self._links["measure"],
            pairs=self._pairs,
            wire=condition.wire,
            congestion=condition.congestion,
        )
        self.congestion = self._cluster.congestion
        self.address = self._cluster.hosts[0].address
        self.interface = self._cluster.hosts[0].interface
        self.switches = not measured.unlimited or self._slow != 1

    def start(self, argv: Sequence[str], env: Mapping[str, str], log: IO[str]) -> list[subprocess.Popen[Any]]:
        """Start one rank on each host."""
        return [
            host.popen(argv, env={**env, "RANK": str(host.index)}, stdout=log, stderr=log)
            for host in self._cluster.hosts
        ]

    def set_phase(self, phase: str) -> None:
        """Change the links: unlimited but for their latency in "setup", as asked for in "distribute" and "measure".

        A host is slow only in "measure".
        """
        if not self._links["measure"].unlimited:
            for host in self._cluster.hosts:
                host.set_link(self._links[phase])
        if self._slow != 1:
            self._cluster.hosts[-1].slow(self._slow if phase == "measure" else 1.0)

    def report(self) -> Any:
        """What the cluster saw so far."""
        return self._cluster.report()

    def kill(self) -> None:
        """End all ranks at once."""
        for host in self._cluster.hosts:
            host.kill()

    def close(self) -> None:
        """Take the cluster down."""
        self._cluster.close()


def rank_environment(hosts: Hosts, num_hosts: int) -> dict[str, str]:
    """What all ranks find in their environment: where to meet and where this package is, one thread each."""
    package_parent = str(Path(__file__).resolve().parents[2])
    return {
        "WORLD_SIZE": str(num_hosts),
        "BAGUA_BENCH_ADDRESS": hosts.address,
        "BAGUA_BENCH_INTERFACE": hosts.interface,
        "PYTHONPATH": os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH", "")])),
        "OMP_NUM_THREADS": "1",
        # Without these every large tensor that is freed goes back to the system and is paged in anew.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    }


def worker_command(folder: Path) -> list[str]:
    """What each host runs."""
    return [sys.executable, "-m", "bagua.bench.worker", str(folder)]


Hosts = LocalHosts | LabHosts
