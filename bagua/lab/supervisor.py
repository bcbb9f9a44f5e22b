"""The process that owns an emulated cluster: it makes the hosts, the switch and the relay, and ends them.

It is started without torch and without the rest of the package. It ends, and takes all with it, when its standard
input closes, when the process that started it is gone, or on SIGTERM. If it is killed itself, the relay and every
host see the end of their sockets and end too: the kernel removes the namespaces and devices with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from bagua.lab import kernel
from bagua.lab.control import ABI, PAIR_WORDS, Control
from bagua.lab.errors import LabError
from bagua.lab.holder import start_holder
from bagua.lab.switch import Switch, make_bridge, make_pair, port_name

__all__ = ["main"]

LIBRARY = Path(__file__).with_name("_relay.so")
_PR_SET_CHILD_SUBREAPER = 36
DEFAULT_CONGESTION = "cubic"  # what Linux is configured with unless somebody changes it


class Supervisor:
    """One cluster; `config` is what `Cluster` wrote."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.folder = Path(config["folder"])
        self.sockets: list[socket.socket] = []
        self.holders: list[int] = []
        self.relay: int | None = None
        self.switch: Switch | None = None
        self.life = os.pipe2(os.O_CLOEXEC)
        self.parent = os.pidfd_open(config["parent"])

    def start(self) -> dict[str, Any]:
        """Makes everything.

        Returns:
            what the cluster needs to know.

        Raises:
            LabError: if the machine cannot do it.
        """
        if os.getppid() != self.config["parent"]:
            raise LabError("the process that started the cluster is gone")
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            if self.config["user_namespace"]:
                _enter_user_namespace()
            kernel.unshare(kernel.CLONE_NEWNET)
            for host in self.config["hosts"]:
                mine, its = socket.socketpair()
                self.sockets.append(mine)
                self.holders.append(start_holder(host["name"], str(self.folder / "hosts"), its, self.sockets))
                its.close()
        except OSError as error:
            raise LabError(
                f"this machine does not allow namespaces ({error}): run as root, allow unprivileged user namespaces, "
                'or use mode="pacing"'
            ) from error
        wire = self._wire()
        for index, host in enumerate(self.config["hosts"]):
            answer = self.ask(index, f"configure {host['interface']} {host['mac']} {host['address']} {host['netmask']}")
            if answer != "ok":
                raise LabError(f"{host['name']}: {answer}")
        congestion = self._congestion()
        return {
            "holders": self.holders,
            "relay": self.relay,
            "wire": wire,
            "congestion": congestion,
            "uplinks": self.relay is not None and self._uplinks(),
        }

    def _uplinks(self) -> bool:
        """Rate-limit in the hosts' kernels instead of the relay; false where that is impossible.

        A frame that waits in the relay has left the host for its sockets: they would fill it as far as their windows
        go, megabytes on a slow link, where a network card lets each socket have a frame or two in progress.
        """
        bandwidth, _ = self.config["limits"]
        for index, host in enumerate(self.config["hosts"]):
            if self.ask(index, f"uplink {host['interface']} {bandwidth}") != "ok":
                return False
        return True

    def _congestion(self) -> str:
        """Has all hosts' TCP adapt in the same way: the one asked for, or the default if the kernel has it."""
        asked = self.config["congestion"]
        for index, host in enumerate(self.config["hosts"]):
            answer = self.ask(index, f"congestion {asked or DEFAULT_CONGESTION}")
            if answer != "ok" and asked:
                raise LabError(f"{host['name']}: {answer}")
            if answer != "ok":
                return kernel.congestion_control()
        return asked or DEFAULT_CONGESTION

    def _wire(self) -> str:
        """Joins the hosts: a bridge, or the relay with a TAP device or a veth pair for each."""
        wire = self.config["wire"]
        devices = [host["interface"] for host in self.config["hosts"]]
        if wire == "veth":
            make_bridge(devices, self.holders)
            return wire
        if wire == "tbf" or (wire == "auto" and self.config["only_bandwidth"]):
            try:
                self._start_switch()
                return "tbf"
            except (OSError, LabError) as error:
                if wire == "tbf":
                    raise LabError(f'the kernel cannot limit links here ({error}): leave out wire="tbf"') from error
                self._unplug()
        library = load_relay(pairs=self.config["pairs"])
        if wire != "packet":
            try:
                self._start_relay(library, self._taps(devices))
                return "tap"
            except OSError as error:
                if wire == "tap":
                    raise LabError(f"no TAP devices: {error}") from error
        for index, pid in enumerate(self.holders):
            make_pair(index, devices[index], pid)
        self._start_relay(library, [kernel.open_packet_port(port_name(index)) for index in range(len(devices))])
        return "packet"

    def _start_switch(self) -> None:
        bandwidth, queue_bytes = self.config["limits"]
        self.switch = Switch(self.config["hosts"], self.holders, [(bandwidth, queue_bytes)] * len(self.holders))
        for index, host in enumerate(self.config["hosts"]):
            for line in (f"direct {host['interface']}", f"limit {host['interface']} {bandwidth}"):
                answer = self.ask(index, line)
                if answer != "ok":
                    raise LabError(f"{host['name']}: {answer}")

    def _unplug(self) -> None:
        """Removes the devices that a failed attempt has left."""
        self.switch = None
        for index in range(len(self.holders)):
            kernel.remove(port_name(index))

    def _taps(self, devices: list[str]) -> list[int]:
        taps = []
        home = f"/proc/{os.getpid()}/ns/net"
        here = os.open(home, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for pid, device in zip(self.holders, devices, strict=True):
                kernel.setns(f"/proc/{pid}/ns/net", kernel.CLONE_NEWNET)
                taps.append(kernel.open_tap(device))
        except OSError:
            for tap in taps:
                os.close(tap)
            raise
        finally:
            kernel.setns(f"/proc/self/fd/{here}", kernel.CLONE_NEWNET)
            os.close(here)
        return taps

    def _start_relay(self, library: ctypes.CDLL, ports: list[int]) -> None:
        self.relay = os.fork()
        if self.relay:
            for port in ports:
                os.close(port)
            return
        status = 1
        try:
            os.close(self.life[1])
            for sock in self.sockets:
                sock.close()
            status = self._relay(library, ports)
        finally:
            os._exit(status)

    def _relay(self, library: ctypes.CDLL, ports: list[int]) -> int:
        _hurry()
        control = Control(self.folder / "control", len(ports))
        fds = (ctypes.c_int * len(ports))(*ports)
        return library.bagua_lab_relay(len(ports), fds, self.life[0], control.words, self.config["seed"])

    def ask(self, host: int, line: str) -> str:
        """Hands a line to a host's holder and returns its answer."""
        try:
            self.sockets[host].sendall(line.encode() + b"\n")
            answer = b""
            while not answer.endswith(b"\n"):
                got = self.sockets[host].recv(4096)
                if not got:
                    break
                answer += got
        except OSError as error:
            return f"the host is gone: {error}"
        return answer.decode().strip() or "the host is gone"

    def serve(self) -> None:
        """Answers `HOST COMMAND...` lines until it is time to end."""
        pending = b""
        while True:
            ready, _, _ = select.select([0, self.parent], [], [], 1.0)
            if self.relay is not None and os.waitpid(self.relay, os.WNOHANG)[0]:
                print("bagua lab: the relay has exited; stopping the cluster", file=sys.stderr)
                self.relay = None
                return
            if self.parent in ready:
                return
            if 0 not in ready:
                continue
            got = os.read(0, 65536)
            if not got:
                return
            *lines, pending = (pending + got).split(b"\n")
            for line in lines:
                host, command = line.decode().split(" ", 1)
                if host == "switch":
                    _say(self.switch.answer(command.split()) if self.switch else "no switch")
                else:
                    _say(self.ask(int(host), command))

    def stop(self) -> None:
        """Ends every process of the cluster; waits for them, and removes the folder."""
        os.close(self.life[1])
        for sock in self.sockets:
            sock.close()
        for pid in (*self.holders, *([self.relay] if self.relay else [])):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.005)
            except ChildProcessError:
                break
        shutil.rmtree(self.folder, ignore_errors=True)


def load_relay(pairs: bool = False) -> ctypes.CDLL:
    """Loads the compiled relay.

    Args:
        pairs: it must know links of pairs of hosts.

    Raises:
        LabError: if it was not built, or is of another version.
    """
    how = "install a C++17 compiler (g++ or clang++) and reinstall bagua, or run `python setup.py build_ext --inplace`"
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise LabError(f"the relay of the lab is not built ({error}): {how}") from error
    library.bagua_lab_abi.restype = ctypes.c_uint64
    known = not pairs or (hasattr(library, "bagua_lab_pair_words") and library.bagua_lab_pair_words() == PAIR_WORDS)
    if library.bagua_lab_abi() != ABI or not known:
        raise LabError(f"the lab's relay was built for another version of bagua: {how}")
    library.bagua_lab_relay.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64]
    return library


def _hurry() -> None:
    """Frames must leave on time although the ranks keep all cores busy. Without root there is no way to that."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    except OSError:
        with contextlib.suppress(OSError):
            os.nice(-15)


def _enter_user_namespace() -> None:
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError:  # the parent is gone; the next select sees it
        return


def main(config: dict[str, Any]) -> None:
    """Makes the cluster, says so in one line of JSON, serves, ends it."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    supervisor = Supervisor(config)
    try:
        try:
            _say(json.dumps(supervisor.start()))
        except LabError as error:
            _say(json.dumps({"error": str(error)}))
            return
        supervisor.serve()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        supervisor.stop()
