"""One command on all hosts of a cluster: output, events, and the end."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from bagua.lab.cluster import Cluster
from bagua.lab.errors import LabError
from bagua.lab.events import Event, apply_event

__all__ = ["Job"]

_POLL_S = 0.05
_TIMED_OUT = 124
_SILENCE_S = 10.0  # without a line of output, before the job is said to run; then twice as long, and so on


class Job:
    """Starts the command everywhere and watches it.

    Args:
        cluster: where.
        argv: the command.
        nproc_per_node: for `bagua run` and `torchrun`.
        only: show this host's output, as it is; None: all hosts' with their names before each line.
        grace_s: time that the others have to end by themselves when a host has failed; then SIGTERM, and SIGKILL
            after as much again (5 s at most).
    """

    def __init__(
        self,
        cluster: Cluster,
        argv: Sequence[str],
        nproc_per_node: int | None = None,
        *,
        only: int | None = None,
        grace_s: float = 15.0,
    ) -> None:
        self._cluster = cluster
        self._argv = list(argv)
        self._nproc = nproc_per_node
        self._only = only
        self._grace_s = grace_s
        self._port = cluster.next_port()
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._links = {host.index: cluster.link for host in cluster.hosts}
        self._readers: list[threading.Thread] = []
        self._print_lock = threading.Lock()
        self._heard_s = 0.0  # when a host last printed a line
        self._silence_s = _SILENCE_S

    def run(self, events: Sequence[Event] = (), *, keep_going: bool = False, timeout_s: float | None = None) -> int:
        """Until all hosts have ended.

        Args:
            events: in the order of their time.
            keep_going: a host that fails does not end the others; its code counts unless an event starts it again. It
                is not started once the others have ended and one of them well: their job is over.
            timeout_s: ends the job.

        Returns:
            the worst exit code: that of the first host that failed by itself; 128 + n for signal n.
        """
        self.say(f"starting on each host: {shlex.join(self._argv)}")
        began = time.monotonic()
        for host in self._cluster.hosts:
            self._start(host.index)
        waiting = list(events)
        failed: int | None = None
        failed_at = 0.0
        away: list[int] = []
        while True:
            now = time.monotonic()
            while waiting and waiting[0].at_s <= now - began:
                self._apply(waiting.pop(0))
            self._say_it_runs(len(self._running()), began)
            codes = {index: process.poll() for index, process in self._processes.items()}
            if all(code is not None for code in codes.values()):
                away = _to_start(waiting, codes)
                if not away:
                    break
                if 0 in codes.values():  # it would wait for a job that is over
                    self.say(f"{', '.join(f'host{index}' for index in away)}: not started again, the job has ended")
                    break
            bad = [_shell_code(code) for code in codes.values() if code]
            if bad and failed is None and not keep_going:
                failed, failed_at = bad[0], now
            if timeout_s is not None and now - began > timeout_s:
                self.say(f"the job has not ended within {timeout_s:g} s")
                self._end()
                return _TIMED_OUT
            if failed is not None and now - failed_at > self._grace_s:
                self.say(f"a host failed {self._grace_s:g} s ago; stopping the others")
                self._end()
                break
            time.sleep(_POLL_S)
        self._finish()
        counted = (process.returncode for index, process in self._processes.items() if index not in away)
        return failed or max(map(_shell_code, counted), default=0)

    def _start(self, index: int) -> None:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL}
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
        (process,) = self._cluster.launch(
            self._argv, nproc_per_node=self._nproc, hosts=[index], port=self._port, **options
        )
        self._processes[index] = process
        for pipe, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert pipe is not None
            reader = threading.Thread(target=self._show, args=(index, pipe, out), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _show(self, index: int, pipe: IO[str], out: IO[str]) -> None:
        prefix = "" if self._only is not None else f"[{self._cluster.hosts[index].name}] "
        with pipe:
            for line in pipe:
                if self._only in (None, index):
                    self._heard_s = time.monotonic()
                    with self._print_lock, suppress(BrokenPipeError):  # nobody reads on, as after `| head`: hosts do
                        out.write(prefix + line if line.endswith("\n") else f"{prefix}{line}\n")
                        out.flush()

    def _apply(self, event: Event) -> None:
        self.say(f"{event.action} host{event.host} {event.value}".rstrip())
        try:
            if event.action == "start":
                if self._processes[event.host].poll() is None:
                    raise LabError(f"host{event.host} still runs its command; kill it first")
                self._start(event.host)
            else:
                host = self._cluster.hosts[event.host]
                self._links[event.host] = apply_event(event, host, self._links[event.host])
        except LabError as error:
            self.say(str(error))

    def _end(self) -> None:
        for process in self._running():
            process.terminate()
        deadline = time.monotonic() + min(self._grace_s, 5.0)
        while self._running() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for host in self._cluster.hosts:
            host.kill()
        for process in self._running():
            process.kill()
            process.wait()
        self._finish()

    def _running(self) -> list[subprocess.Popen[str]]:
        return [process for process in self._processes.values() if process.poll() is None]

    def _finish(self) -> None:
        """A rank that outlives its launcher keeps the pipe open: what it still says is not waited for."""
        deadline = time.monotonic() + 2
        for reader in self._readers:
            reader.join(max(deadline - time.monotonic(), 0))

    def say(self, text: str) -> None:
        """Print a line of the lab's own, on stderr."""
        with self._print_lock:
            print(f"[lab] {text}", file=sys.stderr, flush=True)

    def _say_it_runs(self, running: int, began_s: float) -> None:
        """A job that is silent for long may be slow or stuck: the bytes on the wires tell which."""
        now = time.monotonic()
        if now - max(self._heard_s, began_s) < self._silence_s:
            return
        self._silence_s *= 2
        try:
            sent = sum(host.sent_bytes for host in self._cluster.report().hosts)
        except LabError:  # the cluster is about to end, which shows by itself
            return
        self.say(f"{now - began_s:.0f} s: {running} hosts run, {sent / 1e6:.1f} MB sent; no output for a while")


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _to_start(waiting: Sequence[Event], codes: dict[int, int | None]) -> list[int]:
    """Hosts that have failed or were killed, and that an event will start again."""
    return sorted({event.host for event in waiting if event.action == "start" and codes[event.host]})
