"""One host of an emulated cluster: starts processes, and injects faults."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bagua.lab.link import Link

__all__ = ["Backend", "Host", "Owner"]


class Backend(Protocol):
    """What carries out a host's orders: network namespaces, or a pacing relay."""

    def environment(self) -> dict[str, str]:
        """Variables that the hosts' processes need."""
        ...

    def set_link(self, index: int, link: Link) -> None:
        """Change the link of host `index`."""
        ...

    def set_cut(self, index: int, cut: bool) -> None:
        """Drop all frames of host `index`, or stop doing so."""
        ...

    def ask(self, index: int, line: str) -> None:
        """Send host `index` a command: pause, resume, kill, slow."""
        ...


class Owner(Protocol):
    """Protocol: what a host needs from its cluster."""

    @property
    def hosts(self) -> Sequence[Host]:
        """All hosts, in order."""
        ...

    @property
    def backend(self) -> Backend:
        """What carries out orders, also after the cluster has ended."""
        ...

    def open_backend(self) -> Backend:
        """Return the backend.

        Raises:
            LabError: the cluster has ended.
        """
        ...

    def start(self, host: Host, argv: Sequence[str], cwd: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a command on `host`."""
        ...


class Host:
    """Made by `Cluster`.

    Attributes:
        index: number of the host, from 0.
        name: its host name, which all hosts of the cluster resolve.
        address: its IPv4 address.
        interface: name of its network device.
        speed_file: holds `slow`'s factor as text, for emulated compute to read (`BAGUA_LAB_SPEED_FILE`).
    """

    def __init__(self, cluster: Owner, index: int, name: str, address: str, interface: str, speed_file: Path) -> None:
        self._cluster = cluster
        self.index = index
        self.name = name
        self.address = address
        self.interface = interface
        self.speed_file = speed_file

    def environment(self) -> dict[str, str]:
        """What the host's processes find in their environment besides the caller's own."""
        hosts = self._cluster.hosts
        return {
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": self.interface,
            "TP_SOCKET_IFNAME": self.interface,
            "BAGUA_LAB_HOST": str(self.index),
            "BAGUA_LAB_HOSTS": ",".join(host.address for host in hosts),
            "BAGUA_LAB_SPEED_FILE": str(self.speed_file),
            **self._cluster.backend.environment(),
        }

    def popen(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts a command on this host.

        Args:
            argv: the command.
            env: added to this process's environment and to `environment()`.
            cwd: default: the caller's.
            options: of `subprocess.Popen`.

        Returns:
            a process that ends as the command does, and passes signals on to it. All processes of the host are
            killed when the cluster ends.

        Raises:
            LabError: if the cluster has ended.
        """
        words = [os.fspath(word) for word in argv]
        if not words:
            raise ValueError("argv must name a command")
        full = {**os.environ, **self.environment(), **(env or {})}
        return self._cluster.start(self, words, os.path.abspath(cwd or os.getcwd()), env=full, **options)

    def run(self, argv: Sequence[str], *, timeout: float | None = None, **options: Any) -> subprocess.CompletedProcess:
        """`popen`, then waits: like `subprocess.run(..., capture_output=True, text=True)`.

        Raises:
            subprocess.TimeoutExpired: after `timeout` seconds; the command is killed.
        """
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = self.popen(argv, **{**pipes, **options})
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def set_link(self, link: Link) -> None:
        """Changes bandwidth, latency and the rest while processes run.

        Raises:
            LabError: if the cluster's wire cannot emulate it.
        """
        self._cluster.open_backend().set_link(self.index, link)

    def cut(self) -> None:
        """Cuts the link: frames from and to this host are dropped silently.

        Raises:
            LabError: if the cluster's wire is "veth".
        """
        self._cluster.open_backend().set_cut(self.index, True)

    def restore(self) -> None:
        """Restores the link after `cut`."""
        self._cluster.open_backend().set_cut(self.index, False)

    def pause(self) -> None:
        """Stops all processes of the host (SIGSTOP); its kernel still answers on the network."""
        self._cluster.open_backend().ask(self.index, "pause")

    def resume(self) -> None:
        """Lets them continue."""
        self._cluster.open_backend().ask(self.index, "resume")

    def kill(self) -> None:
        """Kills all processes of the host (SIGKILL). New ones may be started."""
        self._cluster.open_backend().ask(self.index, "kill")

    def kill_rank(self, local_rank: int) -> None:
        """Kills the processes that have this `LOCAL_RANK` in their environment (SIGKILL); the launcher stays.

        Raises:
            LabError: there is none.
        """
        self._cluster.open_backend().ask(self.index, f"kill_rank {int(local_rank)}")

    def slow(self, speed: float) -> None:
        """Limits the host's processes to this fraction of the time, and writes it to `speed_file`.

        A process that sleeps is not slowed by being stopped; emulated compute reads the file.

        Args:
            speed: 0.5: half as fast. 1.0 ends it. From 0.01 to 1.
        """
        if not 0.01 <= speed <= 1:
            raise ValueError(f"speed must be from 0.01 to 1, not {speed!r}")
        fresh = self.speed_file.with_suffix(".new")
        fresh.write_text(str(float(speed)))
        os.replace(fresh, self.speed_file)
        self._cluster.open_backend().ask(self.index, f"slow {float(speed)}")
