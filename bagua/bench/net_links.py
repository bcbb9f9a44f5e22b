"""Links for `bagua bench net`: two network namespaces joined by a veth pair, shaped by the kernel's own queues.

The namespaces have no names. Each lives as long as a `cat` that waits for this process, so that nothing is left
behind, whatever ends it. Needs root. Only the first host's way out is shaped: bytes go from it to the second.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

__all__ = ["NAMESPACES_MISSING", "FlowCaps", "Namespaces", "Queue", "missing"]

NAMESPACES_MISSING = "network namespaces need root and the tools ip, tc, unshare and nsenter"
_MTU = 9000
_CLASSES = 256
_TIMEOUT_S = 30


@dataclass(frozen=True)
class Queue:
    """One bottleneck that all connections share, first in first out.

    Attributes:
        rate: as tc writes it, e.g. "1gbit".
        burst: bytes that may leave at once, e.g. "64kb".
        wait: the longest a packet waits before later ones are dropped, e.g. "500us".
    """

    rate: str
    burst: str
    wait: str

    def commands(self, device: str) -> list[str]:
        """Lines for `tc -batch`."""
        return [f"qdisc add dev {device} root tbf rate {self.rate} burst {self.burst} latency {self.wait}"]


@dataclass(frozen=True)
class FlowCaps:
    """A limit for all connections together and one for each connection.

    Attributes:
        total: of the link, as tc writes it.
        flows: of single connections: the source port chooses, low bits first, as a router's hash would.
    """

    total: str
    flows: tuple[str, ...]

    def commands(self, device: str) -> list[str]:
        """Lines for `tc -batch`: 256 classes that borrow from the link's rate, chosen by the low byte of the port."""
        rule = f"filter add dev {device} protocol ip parent 1: prio 1 u32"
        lines = [
            f"qdisc add dev {device} root handle 1: htb default 1ff",
            f"class add dev {device} parent 1: classid 1:1 htb rate {self.total} burst 1mb cburst 1mb quantum 60000",
            f"class add dev {device} parent 1:1 classid 1:1ff htb rate 10mbit ceil {self.total} quantum 60000",
            f"filter add dev {device} parent 1: prio 1 handle 2: protocol ip u32 divisor {_CLASSES}",
            # The source port follows the 20 bytes of an IPv4 header.
            f"{rule} ht 800:: match ip protocol 6 0xff hashkey mask 0x00ff0000 at 20 link 2:",
        ]
        for index in range(_CLASSES):
            # The kernel gives consecutive connections ports that are even or odd throughout.
            rate = self.flows[index // 2 % len(self.flows)]
            leaf = f"classid 1:{index + 16:x} htb rate 1mbit ceil {rate} burst 128kb cburst 128kb quantum 60000"
            lines.append(f"class add dev {device} parent 1:1 {leaf}")
            lines.append(f"{rule} ht 2:{index:x}: match ip src 0.0.0.0/0 flowid 1:{index + 16:x}")
        return lines


def missing() -> str:
    """Why there can be no namespaces here; empty if there can."""
    tools = all(shutil.which(tool) for tool in ("ip", "tc", "unshare", "nsenter"))
    return "" if os.geteuid() == 0 and tools else NAMESPACES_MISSING


class Namespaces:
    """Two hosts, `prefixes[i]` runs a command on the i-th. A context manager.

    Raises:
        RuntimeError: with what the tools said, if they fail.
    """

    addresses = ("10.77.0.1", "10.77.0.2")
    environment = {"NCCL_SOCKET_IFNAME": "net0"}  # noqa: RUF012

    def __init__(self, shape: Queue | FlowCaps | None = None) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(2):
                self._holders.append(self._hold())
            self.prefixes = tuple(("nsenter", "-t", str(holder.pid), "-n", "--") for holder in self._holders)
            first, second = (str(holder.pid) for holder in self._holders)
            _run("ip", "link", "add", "net0", "netns", first, "type", "veth", "peer", "name", "net0", "netns", second)
            for index, prefix in enumerate(self.prefixes):
                _run(*prefix, "ip", "address", "add", f"{self.addresses[index]}/24", "dev", "net0")
                _run(*prefix, "ip", "-6", "address", "add", f"fd77::{index + 1}/64", "dev", "net0", "nodad")
                _run(*prefix, "ip", "link", "set", "net0", "mtu", str(_MTU), "up")
                _run(*prefix, "ip", "link", "set", "lo", "up")
            self._wait_until_up()
            if shape is not None:
                _run(*self.prefixes[0], "tc", "-batch", "-", given="\n".join(shape.commands("net0")) + "\n")
        except BaseException:
            self.close()
            raise

    def _hold(self) -> subprocess.Popen[bytes]:
        holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        own = os.readlink("/proc/self/ns/net")
        until = time.monotonic() + _TIMEOUT_S
        while holder.poll() is None and time.monotonic() < until:
            if os.readlink(f"/proc/{holder.pid}/ns/net") != own:
                return holder
            time.sleep(0.002)
        raise RuntimeError(NAMESPACES_MISSING)

    def _wait_until_up(self) -> None:
        # The kernel tells of a carrier a little later.
        until = time.monotonic() + _TIMEOUT_S
        for prefix in self.prefixes:
            while "state UP" not in _run(*prefix, "ip", "link", "show", "net0"):
                if time.monotonic() > until:
                    raise RuntimeError("a veth device did not come up")
                time.sleep(0.01)

    def close(self) -> None:
        """Ends the namespaces."""
        for holder in self._holders:
            assert holder.stdin is not None
            holder.stdin.close()
            holder.wait(_TIMEOUT_S)
        self._holders = []

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _run(*command: str, given: str = "") -> str:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(_words(command))}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _words(command: Sequence[str]) -> Sequence[str]:
    return command[: command.index("--")] if len(command) > 20 else command
