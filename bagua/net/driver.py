"""Runs the plugin without NCCL: processes that load it as NCCL does and drive it as NCCL's proxy thread would."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bagua.net.plugin import plugin_path

__all__ = ["LIBRARY", "DriverError", "Ended", "Pair", "Process", "run_here", "run_pair"]

LIBRARY = Path(__file__).with_name("_driver.so")
_BOOT = (
    "import ctypes, sys; words = [word.encode() for word in sys.argv[2:]]; "
    "sys.exit(ctypes.CDLL(sys.argv[1]).bagua_net_drive(len(words), (ctypes.c_char_p * len(words))(*words)))"
)
_OWN = ("BAGUA_NET_", "NCCL_")  # what the caller's environment has of these is not for the driver


class DriverError(RuntimeError):
    """A driver ended without a result."""


@dataclass
class Ended:
    """What a driver printed.

    Attributes:
        results: lines of JSON, parsed.
        errors: stderr: warnings of the plugin, its statistics.
        status: exit status: 0; 3 after an error of the plugin, which is then the last result.
    """

    status: int
    results: list[dict[str, Any]] = field(default_factory=list)
    errors: str = ""


class Process:
    """A driver in a process of its own.

    Args:
        prefix: a command that runs the driver elsewhere, e.g. in a network namespace.
        program: a driver built as a program, in place of the library of the package.
        options: see `Options` in csrc/driver/side.h.
    """

    def __init__(
        self,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        program: Path | None = None,
        plugin: Path | None = None,
        **options: object,
    ) -> None:
        if program is None and not LIBRARY.exists():
            raise DriverError(f"the driver was not built ({LIBRARY.name} is missing)")
        start = [sys.executable, "-I", "-S", "-c", _BOOT, str(LIBRARY)] if program is None else [str(program)]
        words = [f"plugin={plugin or plugin_path()}", *(f"{name}={value}" for name, value in options.items())]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed by wait()
        self._process = subprocess.Popen(
            [*prefix, *start, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**kept, **(env or {})},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.pid = self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def read_handles(self, num: int, timeout_s: float = 30) -> list[str]:
        """The lines that another driver needs to connect to this one.

        Raises:
            DriverError: if they do not come; the driver is ended then.
        """
        lines: list[str] = []
        try:
            while len(lines) < num:
                lines.append(self._lines.get(timeout=timeout_s))
                if lines[-1].startswith("{"):
                    raise queue.Empty
        except queue.Empty:
            self.kill()
            raise DriverError(f"a driver gave no handle: {lines[-1:]} {self.wait(5).errors}") from None
        return lines

    def give_handles(self, lines: Sequence[str]) -> None:
        """Hands the lines of another driver over."""
        assert self._process.stdin is not None
        self._process.stdin.write("".join(lines))
        self._process.stdin.flush()

    def await_transfer(self, timeout_s: float = 60) -> None:
        """Wait until the first message has arrived, in mode "rate".

        Raises:
            DriverError: if none does in time, or the driver ends.
        """
        until = time.monotonic() + timeout_s
        while "moving\n" not in list(self._lines.queue):
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise DriverError(f"a driver moved nothing: {self.wait(5).errors}")
            time.sleep(0.01)

    def read_result(self, timeout_s: float) -> None:
        """Waits until it has printed a result, or ended."""
        until = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < until:
            if any(line.startswith("{") for line in list(self._lines.queue)):
                return
            time.sleep(0.01)

    def release(self) -> None:
        """Lets it end: one that is an end of a connection waits until the other has its result."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def kill(self) -> None:
        """Ends it at once, if it still runs."""
        self._process.kill()

    def wait(self, timeout_s: float) -> Ended:
        """Wait for its end.

        Raises:
            DriverError: if it does not end in time; it is killed then.
        """
        late = False
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            late = True
            self.kill()
            self._process.wait()
        self._reader.join(5)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._errors.seek(0)
        errors = self._errors.read()
        self._errors.close()
        if late:
            raise DriverError(f"a driver did not end within {timeout_s} s: {errors}")
        lines = [self._lines.get_nowait() for _ in range(self._lines.qsize())]
        results = [json.loads(line) for line in lines if line.startswith("{")]
        return Ended(self._process.returncode, results, errors)


def run_here(timeout_s: float = 60, **options: Any) -> Ended:
    """One driver that is both ends, over the loopback interface unless `env` says otherwise."""
    env = {"NCCL_SOCKET_IFNAME": "lo", **(options.pop("env", None) or {})}
    return Process(env=env, **options).wait(timeout_s)


@dataclass
class Pair:
    """What both ends said, and the machine meanwhile.

    Attributes:
        sender: of the sending process (of one of two, if both send).
        receiver: of the receiving one.
        others_cpu: share of all cores that other processes used.
    """

    sender: Ended
    receiver: Ended
    others_cpu: float


def run_pair(
    timeout_s: float,
    prefixes: Sequence[Sequence[str]] = ((), ()),
    envs: Sequence[Mapping[str, str]] = ({}, {}),
    both_ways: bool = False,
    **options: Any,
) -> Pair:
    """Two drivers: the first sends to the second, and with `both_ways` the second to the first as well.

    Raises:
        DriverError: if one of them does not end in time, or cannot start.
    """
    roles = ("both", "both") if both_ways else ("send", "recv")
    channels = int(options.get("channels", 1))
    before = _busy_s(), _children_s(), time.monotonic()
    processes: list[Process] = []
    try:
        for role, prefix, env in zip(roles, prefixes, envs, strict=True):
            processes.append(Process(env=env, prefix=prefix, role=role, **options))
        sender, receiver = processes
        sender.give_handles(receiver.read_handles(channels))
        if both_ways:
            receiver.give_handles(sender.read_handles(channels))
        for process in processes:
            process.read_result(timeout_s)
        for process in processes:
            process.release()
        ended = [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    wall_s = time.monotonic() - before[2]
    others = (_busy_s() - before[0]) - (_children_s() - before[1])
    return Pair(ended[0], ended[1], max(others, 0.0) / (wall_s * (os.cpu_count() or 1)))


def _children_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _busy_s() -> float:
    """Seconds of all cores in programs and in the kernel on their behalf; not in interrupts."""
    user, nice, system = (int(word) for word in Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")
