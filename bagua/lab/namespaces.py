"""The cluster's side of the supervisor: hosts as network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from bagua.lab import kernel
from bagua.lab.addresses import free_network
from bagua.lab.control import Control
from bagua.lab.errors import LabError
from bagua.lab.host import Host
from bagua.lab.link import Link
from bagua.lab.pairs import Path as Between
from bagua.lab.report import HostReport, PairReport, Report

__all__ = ["Namespaces"]

_START_TIMEOUT_S = 30.0
_ANSWER_TIMEOUT_S = 10.0
_PACKAGE = str(Path(__file__).resolve().parent.parent)
_ENTER = str(Path(__file__).with_name("enter.py"))
# The package's own __init__ would import torch.
_BOOT = (
    "import json, sys, types; package = types.ModuleType('bagua'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['bagua'] = package; from bagua.lab.supervisor import main; main(json.loads(sys.argv[2]))"
)
_MAC = bytes((0x02, 0xBA, 0x67, 0x75))  # relay.cpp finds the port in the two bytes that follow
_WITH_RELAY = 'make the cluster with wire="relay"'
_COUNTERS = ("sent_bytes", "received_bytes", "queue_drops", "loss_drops", "cut_drops", "port_drops")


class Namespaces:
    """Emulates all of a link, as root or in an unprivileged user namespace."""

    mode = "namespaces"

    def __init__(
        self,
        folder: Path,
        num_hosts: int,
        link: Link,
        wire: str,
        seed: int,
        congestion: str | None,
        pairs: Mapping[Between, Link] | None = None,
        shared: Mapping[Between, Between] | None = None,
    ) -> None:
        network = free_network()
        self.folder = folder
        self.wire = "veth" if wire == "auto" and link.unlimited else wire
        self.congestion = ""
        self._uplinks = False
        self.interface = "lab0"
        self.addresses = [f"{network}.{index + 1}" for index in range(num_hosts)]
        self.user_namespace = os.geteuid() != 0
        self._lock = threading.Lock()
        self._holders: list[int] = []
        self._control: Control | None = None
        self._supervisor: subprocess.Popen[str] | None = None
        # The second one is what getnameinfo asks for where a server listens on IPv6 and IPv4, as torch's store does.
        names = [f"{ip} host{index}\n::ffff:{ip} host{index}.mapped" for index, ip in enumerate(self.addresses)]
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost", *names]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        if self.wire not in ("veth", "tbf"):
            self._control = Control(folder / "control", num_hosts, create=True)
            for index in range(num_hosts):
                self._control.set_link(index, link)
        self._pairs = dict(pairs or {})
        for pair, its in self._pairs.items():
            self._relayed("a link of a pair").set_pair(*pair, its)
        for pair, first in (shared or {}).items():
            self._relayed("a link of a pair").share_pair(*pair, first)
        try:
            self._start(seed, link, congestion)
        except BaseException:
            self.close()
            raise

    def _start(self, seed: int, link: Link, congestion: str | None) -> None:
        settings = link.settings()
        config = {
            "parent": os.getpid(),
            "folder": str(self.folder),
            "user_namespace": self.user_namespace,
            "wire": self.wire,
            "only_bandwidth": link.only_bandwidth,
            "limits": (settings[0], settings[5]),
            "pairs": bool(self._pairs),
            "seed": seed,
            "congestion": congestion,
            "hosts": [
                {
                    "name": f"host{index}",
                    "interface": self.interface,
                    "address": address,
                    "netmask": "255.255.255.0",
                    "mac": (_MAC + index.to_bytes(2, "big")).hex(),
                }
                for index, address in enumerate(self.addresses)
            ],
        }
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, _PACKAGE, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd="/",
        )
        answer = json.loads(self._read_line(_START_TIMEOUT_S) or '{"error": "the supervisor did not start"}')
        if "error" in answer:
            raise LabError(answer["error"])
        self.wire, self.congestion, self._uplinks = answer["wire"], answer["congestion"], answer["uplinks"]
        self._holders = answer["holders"]
        if self.wire == "tbf" and self._control is not None:
            self._control.close()
            self._control = None
        if link.loss:
            for index in range(len(self._holders)):
                self.set_link(index, link)

    @property
    def alive(self) -> bool:
        """False once the supervisor has ended."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def environment(self) -> dict[str, str]:
        """Nothing more than every mode has."""
        return {}

    def enter(self, index: int, argv: Sequence[str], cwd: str) -> list[str]:
        """The command that runs `argv` on a host."""
        kinds = kernel.CLONE_NEWNET | kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS
        if self.user_namespace:
            kinds |= kernel.CLONE_NEWUSER
        return [sys.executable, "-I", "-S", _ENTER, str(self._holders[index]), str(kinds), cwd, *argv]

    def set_link(self, index: int, link: Link) -> None:
        """Changes the relay's settings. Loss is of packets, so there must be no frames of 64 KB then.

        Raises:
            LabError: if there is none, and the wire cannot do it.
        """
        if self.wire == "tbf":
            if not (link.only_bandwidth or link.unlimited):
                raise LabError(f'set_link: wire "tbf" emulates only a bandwidth, not {link}: {_WITH_RELAY}')
            bandwidth, *_, queue_bytes = link.settings()
            self.ask(index, f"limit {self.interface} {bandwidth}")
            self._done(f"switch limit {index} {bandwidth} {queue_bytes}")
            return
        control = self._relayed("set_link")
        self.ask(index, f"offload {self.interface} {int(link.loss == 0)}")
        if self._uplinks:
            self.ask(index, f"uplink {self.interface} {link.settings()[0]}")
        control.set_link(index, link)

    def set_pair(self, sender: int, receiver: int, link: Link) -> None:
        """Changes the relay's settings of a path."""
        self._relayed("set_pair").set_pair(sender, receiver, link)

    def set_cut(self, index: int, cut: bool) -> None:
        """Has the switch or the relay drop a host's frames."""
        if self.wire == "tbf":
            self._done(f"switch {'cut' if cut else 'restore'} {index}")
            return
        self._relayed("cut").set_cut(index, cut)

    def set_blocked(self, sender: int, receiver: int, blocked: bool) -> None:
        """Loses what one host sends to another, whatever the wire."""
        self.ask(sender, f"block {self.interface} {self.addresses[receiver]} {int(blocked)}")

    def ask(self, index: int, line: str) -> None:
        """Has a host's holder do something.

        Raises:
            LabError: if it cannot, or is gone.
        """
        self._done(f"{index} {line}")

    def _done(self, line: str) -> None:
        answer = self._exchange(line)
        if answer != "ok":
            host, command, *rest = line.split()
            name = f"switch: port of host{rest[0]}" if host == "switch" else f"host{host}"
            raise LabError(f"{name}: {command}: {answer or 'no answer'}")

    def _exchange(self, line: str) -> str:
        with self._lock:
            if not self.alive:
                raise LabError("the cluster has ended")
            assert self._supervisor is not None and self._supervisor.stdin is not None
            try:
                self._supervisor.stdin.write(f"{line}\n")
                self._supervisor.stdin.flush()
            except OSError as error:
                raise LabError("the cluster has ended") from error
            return self._read_line(_ANSWER_TIMEOUT_S).strip()

    def report(self, hosts: Sequence[Host], wall_s: float) -> Report:
        """Counters of the relay, or of the devices if there is none."""
        control = self._control
        if control is None:
            counts = [self._device_counts(host.index) for host in hosts]
            drops = [self._switch_drops(host.index) for host in hosts]
            return Report(
                hosts=tuple(
                    HostReport(host.name, count[0], count[1], queue_drops=dropped[0], cut_drops=dropped[1])
                    for host, count, dropped in zip(hosts, counts, drops, strict=True)
                ),
                wall_s=wall_s,
                frames=sum(count[2] for count in counts),
                wire=self.wire,
                late_frames=None,
                late_mean_ms=None,
                late_max_ms=None,
            )
        frames = control.header("frames")
        return Report(
            hosts=tuple(
                HostReport(host.name, *(control.counter(host.index, name) for name in _COUNTERS)) for host in hosts
            ),
            wall_s=wall_s,
            relay_cpu_s=control.header("cpu_ns") / 1e9,
            frames=frames,
            wire=self.wire,
            late_frames=control.header("late"),
            late_mean_ms=control.header("late_sum_ns") / 1e6 / max(frames, 1),
            late_max_ms=control.header("late_max_ns") / 1e6,
            starved=control.header("starved"),
            pairs=tuple(
                PairReport(*pair, control.pair(*pair, "bytes"), control.pair(*pair, "drops"))
                for pair in sorted(self._pairs)
            ),
        )

    def close(self) -> None:
        """Ends the supervisor, and with it all hosts."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            assert supervisor.stdin is not None and supervisor.stdout is not None
            supervisor.stdin.close()
            try:
                supervisor.wait(15)
            except subprocess.TimeoutExpired:
                supervisor.kill()  # relay and hosts see it and end
                supervisor.wait()
            supervisor.stdout.close()
        if self._control is not None:
            self._control.close()
            self._control = None

    def _relayed(self, what: str) -> Control:
        if self._control is None:
            raise LabError(f"{what} needs the relay: {_WITH_RELAY}")
        return self._control

    def _switch_drops(self, index: int) -> tuple[int, int]:
        """Frames lost to the full queue to a host, and to its cuts."""
        if self.wire != "tbf":
            return 0, 0
        answer = self._exchange(f"switch drops {index}")
        try:
            queue, cut = (int(word) for word in answer.split())
        except ValueError:
            raise LabError(f"no statistics of the switch: {answer}") from None
        return queue, cut

    def _device_counts(self, index: int) -> tuple[int, int, int]:
        """Bytes sent, bytes received, frames sent."""
        for line in Path(f"/proc/{self._holders[index]}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self.interface:
                fields = numbers.split()
                return int(fields[8]), int(fields[0]), int(fields[9])
        return 0, 0, 0

    def _read_line(self, timeout_s: float) -> str:
        assert self._supervisor is not None and self._supervisor.stdout is not None
        watchdog = threading.Timer(timeout_s, self._supervisor.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            return self._supervisor.stdout.readline()
        finally:
            watchdog.cancel()
