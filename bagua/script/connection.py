"""The ssh connection to one node of a job."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bagua.script.hosts import Host

__all__ = ["Connection", "NodeSpec", "SshOptions"]

_BOOTSTRAP = "import sys, json; exec(json.loads(sys.stdin.readline()))"
_LINE_CHARS = 65536  # a longer line is shown in parts
_SSH_FAILED = 255
_WRITING_S = 1.0
_SSH_SAYS = ("ssh: ", "client_loop: ", "Connection to ", "Connection closed", "Timeout, server")
_REMEMBERED = 5  # lines of ssh's own words


@dataclass(frozen=True)
class SshOptions:
    """How to connect.

    Attributes:
        program: the ssh client.
        config: its configuration file; None: the user's.
        identity: file of a private key; None: what ssh finds.
        connect_timeout_s: for the connection to a host.
        alive_s: a host that has been silent for four times that long counts as lost.
    """

    program: str = "ssh"
    config: str | None = None
    identity: str | None = None
    connect_timeout_s: int = 10
    alive_s: int = 15

    def argv(self, host: Host, command: str) -> list[str]:
        """The words that run `command` in the login shell of `host`, never asking for anything."""
        words = [self.program, "-T", "-x", "-a"]
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": self.connect_timeout_s,
            "ServerAliveInterval": self.alive_s,
            "ServerAliveCountMax": 4,
        }
        words += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        for flag, value in (("-F", self.config), ("-i", self.identity), ("-p", host.port)):
            words += [] if value is None else [flag, str(value)]
        return [*words, "--", host.target, command]


@dataclass(frozen=True)
class NodeSpec:
    """What runs on a host.

    Attributes:
        argv: the command, word by word; no shell sees it.
        cwd: its working directory.
        env: added to the environment of a login there.
        python: the interpreter that watches over the command.
        grace_s: from SIGTERM to SIGKILL, when it has to end.
    """

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict)
    python: str = "python3"
    grace_s: float = 15.0


class Connection:
    """An ssh client with a node behind it. Closing its input, which its death does too, ends the node."""

    def __init__(
        self, host: Host, options: SshOptions, spec: NodeSpec, show: Callable[[Host, str, bool], None]
    ) -> None:
        """Start it.

        Args:
            host: where.
            options: of ssh.
            spec: what runs there.
            show: called with host, line and whether it was written to stderr, from two threads.
        """
        self.host = host
        self._show = show
        self._token = secrets.token_hex(16)
        self._up = threading.Event()
        self._words: list[str] = []
        self._python = spec.python
        self.began_s = time.monotonic()
        command = f"exec {shlex.quote(spec.python)} -u -c {shlex.quote(_BOOTSTRAP)}"
        # In a session of its own, or Ctrl-C would end ssh before the node has ended its ranks.
        self.process = subprocess.Popen(
            options.argv(host, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        pipes = ((self.process.stdout, False), (self.process.stderr, True))
        targets: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(self._read, pipe) for pipe in pipes]
        targets.append((self._write, (spec,)))
        self._threads = [threading.Thread(target=target, args=args, daemon=True) for target, args in targets]
        for thread in self._threads:
            thread.start()

    @property
    def is_up(self) -> bool:
        """Whether the node has started."""
        return self._up.is_set()

    def close(self) -> None:
        """Have the node end, without waiting for it."""
        writer = self._threads[-1]
        writer.join(_WRITING_S)
        if writer.is_alive():  # ssh does not even take what the host is to do
            self.process.kill()
            writer.join(_WRITING_S)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.close()

    def kill(self) -> None:
        """End the ssh client itself."""
        self.process.kill()
        self.process.wait()

    def join(self, timeout_s: float) -> None:
        """Wait until all it has written is shown, but not longer than that."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def failure(self) -> str | None:
        """What went wrong, in words, once the client has ended; None if nothing has."""
        code = self.process.returncode
        if code == 0:
            return None
        said = f": {'; '.join(self._words)}" if self._words else ""
        if code == _SSH_FAILED:
            return f"the connection was lost{said}" if self.is_up else f"ssh could not connect{said}"
        if not self.is_up:
            hint = f"; is {self._python} there? --python names another interpreter" if code in (126, 127) else ""
            return f"the ranks could not be started, exit code {code}{said}{hint}"
        if code < 0:
            return f"ssh was ended by signal {-code}"
        return f"exit code {code}"

    def _write(self, spec: NodeSpec) -> None:
        program = Path(__file__).with_name("node.py").read_text()
        what = {"token": self._token, "argv": list(spec.argv), "cwd": spec.cwd, "env": dict(spec.env)}
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # a host that is not there; its ssh tells
            self.process.stdin.write(f"{json.dumps(program)}\n{json.dumps({**what, 'grace_s': spec.grace_s})}\n")
            self.process.stdin.flush()

    def _read(self, pipe: IO[str], is_error: bool) -> None:
        with pipe:
            while line := pipe.readline(_LINE_CHARS):
                line = line.rstrip("\n")
                if not is_error and not self.is_up and line.endswith(self._token):
                    self._up.set()
                    line = line.removesuffix(self._token)  # what a login may print without an end of line
                    if not line:
                        continue
                if is_error and (not self.is_up or line.startswith(_SSH_SAYS)):
                    self._words = [*self._words, line.strip()][-_REMEMBERED:]
                self._show(self.host, line, is_error)
