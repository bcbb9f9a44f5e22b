"""The cluster's side of the supervisor: hosts as network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from bagua.lab import kernel
from bagua.lab.addresses import free_network
from bagua.lab.control import Control
from bagua.lab.errors import LabError
from bagua.lab.host import Host
from bagua.lab.link import Link
from bagua.lab.report import HostReport, Report

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
_COUNTERS = ("sent_bytes", "received_bytes", "queue_drops", "loss_drops", "cut_drops", "port_drops")


class Namespaces:
    """Emulates all of a link, as root or in an unprivileged user namespace."""

    mode = "namespaces"

    def __init__(self, folder: Path, num_hosts: int, link: Link, wire: str, seed: int, congestion: str | None) -> None:
        network = free_network()
        self.folder = folder
        self.wire = "veth" if wire == "auto" and link.unlimited else wire
        self.congestion = ""
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
        if self.wire != "veth":
            self._control = Control(folder / "control", num_hosts, create=True)
            for index in range(num_hosts):
                self._control.set_link(index, link)
        try:
            self._start(seed, link, congestion)
        except BaseException:
            self.close()
            raise

    def _start(self, seed: int, link: Link, congestion: str | None) -> None:
        config = {
            "parent": os.getpid(),
            "folder": str(self.folder),
            "user_namespace": self.user_namespace,
            "wire": self.wire,
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
        self.wire, self.congestion = answer["wire"], answer["congestion"]
        self._holders = answer["holders"]
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
        """Changes the relay's settings. Loss is of packets, so there must be no frames of 64 KB then."""
        control = self._relayed("set_link")
        self.ask(index, f"offload {self.interface} {int(link.loss == 0)}")
        control.set_link(index, link)

    def set_cut(self, index: int, cut: bool) -> None:
        """Has the relay drop a host's frames."""
        self._relayed("cut").set_cut(index, cut)

    def ask(self, index: int, line: str) -> None:
        """Has a host's holder do something.

        Raises:
            LabError: if it cannot, or is gone.
        """
        with self._lock:
            if not self.alive:
                raise LabError("the cluster has ended")
            assert self._supervisor is not None and self._supervisor.stdin is not None
            try:
                self._supervisor.stdin.write(f"{index} {line}\n")
                self._supervisor.stdin.flush()
            except OSError as error:
                raise LabError("the cluster has ended") from error
            answer = self._read_line(_ANSWER_TIMEOUT_S).strip()
        if answer != "ok":
            raise LabError(f"host{index}: {line.split()[0]}: {answer or 'no answer'}")

    def report(self, hosts: Sequence[Host], wall_s: float) -> Report:
        """Counters of the relay, or of the devices if there is none."""
        control = self._control
        if control is None:
            return Report(tuple(HostReport(host.name, *self._device_bytes(host.index)) for host in hosts), wall_s)
        frames = control.header("frames")
        return Report(
            hosts=tuple(
                HostReport(host.name, *(control.counter(host.index, name) for name in _COUNTERS)) for host in hosts
            ),
            wall_s=wall_s,
            relay_cpu_s=control.header("cpu_ns") / 1e9,
            frames=frames,
            late_frames=control.header("late"),
            late_mean_ms=control.header("late_sum_ns") / 1e6 / max(frames, 1),
            late_max_ms=control.header("late_max_ns") / 1e6,
            starved=control.header("starved"),
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
            raise LabError(f'{what} needs the relay: make the cluster with a limited link, or with wire="relay"')
        return self._control

    def _device_bytes(self, index: int) -> tuple[int, int]:
        for line in Path(f"/proc/{self._holders[index]}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self.interface:
                fields = numbers.split()
                return int(fields[8]), int(fields[0])
        return 0, 0

    def _read_line(self, timeout_s: float) -> str:
        assert self._supervisor is not None and self._supervisor.stdout is not None
        watchdog = threading.Timer(timeout_s, self._supervisor.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            return self._supervisor.stdout.readline()
        finally:
            watchdog.cancel()
