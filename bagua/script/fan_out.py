"""Runs a job on all nodes: monitors them until they end, and ends them together."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

from bagua.script.connection import Connection, NodeSpec, SshOptions
from bagua.script.hosts import Host

__all__ = ["FanOut"]

_POLL_S = 0.05
_LAST_WORDS_S = 2.0
_ENDING_S = 10.0  # beyond the nodes' own grace


class FanOut:
    """Runs one node spec on each host and shows what they print, each line after `[host]`.

    Args:
        hosts: where, by node rank.
        specs: what, by node rank.
        options: of ssh.
        start_timeout_s: a host must have started its node within that time.
        grace_s: how long the others may continue when one has failed, to say what they have to say.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        specs: Sequence[NodeSpec],
        options: SshOptions,
        *,
        start_timeout_s: float = 60.0,
        grace_s: float = 5.0,
    ) -> None:
        self._nodes = list(zip(hosts, specs, strict=True))
        self._options = options
        self._start_timeout_s, self._grace_s = start_timeout_s, grace_s
        self._connections: list[Connection] = []
        self._print_lock = threading.Lock()

    def run(self) -> int:
        """Until all nodes have ended. Whatever exception comes, they are ended first.

        Returns:
            0, or the exit code of the node that failed first; 1 where ssh or the start failed.
        """
        try:
            for host, spec in self._nodes:
                self._connections.append(Connection(host, self._options, spec, self._show))
            return self._watch()
        finally:
            self._end()

    def _watch(self) -> int:
        running = list(self._connections)
        code, failed_at = 0, 0.0
        while running:
            now = time.monotonic()
            for connection in list(running):
                late = not connection.is_up and now - connection.began_s > self._start_timeout_s
                if late:
                    connection.kill()
                if connection.process.poll() is None:
                    continue
                connection.join(_LAST_WORDS_S)
                what = f"no answer within {self._start_timeout_s:g} s" if late else connection.failure()
                running.remove(connection)
                if what is not None and code == 0:
                    returned = connection.process.returncode
                    code, failed_at = (returned if connection.is_up and 0 < returned < 255 else 1), now
                    self._say(f"host {connection.host.label} (node {self._rank(connection)}): {what}")
                elif what is not None:
                    self._say(f"host {connection.host.label}: {what}")
            if code and running and now - failed_at > self._grace_s:
                names = ", ".join(connection.host.label for connection in running)
                self._say(f"ending the other hosts: {names}")
                return code
            time.sleep(_POLL_S)
        return code

    def _rank(self, connection: Connection) -> int:
        return self._connections.index(connection)

    def _end(self) -> None:
        """End what still runs: in order, and after a while, or at another Ctrl-C, by force."""
        running = [connection for connection in self._connections if connection.process.poll() is None]
        deadline = time.monotonic() + max(spec.grace_s for _, spec in self._nodes) + _ENDING_S
        try:
            for connection in self._connections:
                connection.close()
            while any(connection.process.poll() is None for connection in running) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        finally:
            for connection in running:
                if connection.process.poll() is None:
                    connection.kill()
                    self._say(f"host {connection.host.label}: it no longer answers; its ranks may still run")
            for connection in running:
                connection.join(_LAST_WORDS_S)

    def _show(self, host: Host, line: str, is_error: bool) -> None:
        with self._print_lock:
            print(f"[{host.label}] {line}", file=sys.stderr if is_error else sys.stdout, flush=True)

    def _say(self, text: str) -> None:
        with self._print_lock:
            print(f"baguarun: {text}", file=sys.stderr, flush=True)
