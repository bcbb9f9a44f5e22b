"""The first process of an emulated host: keeps its namespaces, and controls its processes.

It is process 1 of the host's pid namespace, so the kernel kills every process of the host when it ends; and it ends
when the supervisor does, whatever ended that, because its end of their socket then reads end-of-file.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence

from bagua.lab import kernel, token_bucket
from bagua.lab.rank_processes import kill_rank

__all__ = ["start_holder"]

_MS_REC, _MS_PRIVATE, _MS_BIND = 0x4000, 1 << 18, 0x1000
_EVERYONE = -1  # kill(-1) inside a pid namespace: all of its processes but this one
PERIOD_S = 0.02  # of the duty cycle with which a host is slowed


def start_holder(name: str, hosts_file: str, control: socket.socket, closed: Sequence[socket.socket]) -> int:
    """Makes a host's namespaces and the process that holds them.

    Args:
        name: becomes the host name.
        hosts_file: takes the place of /etc/hosts inside.
        control: the holder's end of the socket to the supervisor.
        closed: the supervisor's ends, of which the holder must keep none.

    Returns:
        process id of the holder; a child of the supervisor if that is a subreaper.

    Raises:
        OSError: if the kernel allows no such namespaces.
    """
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(reader)
        try:
            flags = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS
            kernel.unshare(flags)
            pid = os.fork()
            if pid == 0:
                os.close(writer)
                for other in closed:
                    other.close()
                _hold(name, hosts_file, control)
            os.write(writer, b"%d" % pid)
        except OSError as error:
            os.write(writer, b"-%d" % (error.errno or 1))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        pid = int(answer.read() or "-1")
    os.waitpid(middle, 0)
    if pid < 0:
        raise OSError(-pid, f"unshare: {os.strerror(-pid)}")
    return pid


def _hold(name: str, hosts_file: str, control: socket.socket) -> None:
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans are reaped by the kernel
        socket.sethostname(name)
        kernel.mount("none", "/", None, _MS_REC | _MS_PRIVATE)
        for source, target, kind, flags in (
            ("proc", "/proc", "proc", 0),
            (hosts_file, "/etc/hosts", None, _MS_BIND),
        ):
            try:
                kernel.mount(source, target, kind, flags)
            except OSError as error:  # in a container a fresh /proc may be refused: the outer one serves too
                print(f"bagua lab: {name}: {target} is shared with the machine: {error}", file=sys.stderr)
        kernel.up("lo")
        Holder(control).run()
        status = 0
    except Exception as error:
        print(f"bagua lab: {name}: {error}", file=sys.stderr)
    finally:
        os._exit(status)


class Holder:
    """Answers one line to each line of the supervisor: "ok", or the error."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.speed = 1.0
        self.paused = False
        self.stopped = False

    def run(self) -> None:
        """Until the supervisor is gone."""
        pending = b""
        while True:
            self._turn()
            if not select.select([self.control], [], [], self._wait())[0]:
                continue
            got = self.control.recv(4096)
            if not got:
                return
            *lines, pending = (pending + got).split(b"\n")
            for line in lines:
                self.control.sendall(self._answer(line.decode().split()).encode() + b"\n")

    def _answer(self, words: list[str]) -> str:
        try:
            getattr(self, "do_" + words[0])(*words[1:])
        except (OSError, ValueError) as error:
            return str(error)
        return "ok"

    def do_configure(self, device: str, mac: str, address: str, netmask: str) -> None:
        """Gives the device its address."""
        kernel.configure(device, bytes.fromhex(mac), address, netmask)

    def do_offload(self, device: str, enabled: str) -> None:
        """Frames of up to 64 KB, or packets."""
        kernel.offload(device, enabled == "1")

    def do_limit(self, device: str, bits_per_s: str) -> None:
        """What the host may send. What waits, waits in the host: its sockets bound it."""
        token_bucket.limit(device, int(bits_per_s), token_bucket.ENDLESS_BYTES)

    def do_uplink(self, device: str, bits_per_s: str) -> None:
        """What the host may send to a relay."""
        token_bucket.limit_beside_relay(device, int(bits_per_s))

    def do_direct(self, device: str) -> None:
        """The switch routes: the host need not know the others' hardware addresses."""
        kernel.point_to_point(device)

    def do_block(self, device: str, address: str, blocked: str) -> None:
        """Loses what the host sends to that address, or not any more."""
        kernel.block_neighbour(address, device, blocked == "1")

    def do_congestion(self, name: str) -> None:
        """How the host's TCP connections adapt their rate."""
        kernel.set_congestion_control(name)

    def do_pause(self) -> None:
        """Stops all processes of the host."""
        self.paused = True
        self._stop(True)

    def do_resume(self) -> None:
        """Lets them continue."""
        self.paused = False
        self._stop(False)

    def do_slow(self, speed: str) -> None:
        """From now on they run for that fraction of the time."""
        self.speed = float(speed)
        if not self.paused:
            self._stop(False)

    def do_kill(self) -> None:
        """Kills all processes of the host."""
        _signal(signal.SIGKILL)

    def do_kill_rank(self, local_rank: str) -> None:
        """Kills the processes of one rank."""
        kill_rank(int(local_rank))

    def _wait(self) -> float | None:
        if self.paused or self.speed >= 1:
            return None
        phase = time.monotonic() % PERIOD_S
        edge = PERIOD_S * self.speed
        return (edge if phase < edge else PERIOD_S) - phase

    def _turn(self) -> None:
        if not self.paused and self.speed < 1:
            self._stop(time.monotonic() % PERIOD_S >= PERIOD_S * self.speed)

    def _stop(self, stop: bool) -> None:
        if stop or self.stopped:
            _signal(signal.SIGSTOP if stop else signal.SIGCONT)
        self.stopped = stop


def _signal(number: int) -> None:
    try:
        os.kill(_EVERYONE, number)
    except ProcessLookupError:
        return  # the host runs nothing
