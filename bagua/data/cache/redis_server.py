"""A Redis server started by the job: on a free port, restarted if it dies, ended with the job."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

from bagua.data.cache.redis_host import RedisHost
from bagua.data.cache.redis_store import RedisStore
from bagua.data.cache.store import StoreError

__all__ = ["RedisServer", "find_program"]

_log = logging.getLogger("bagua")
_START_S, _STOP_S = 10.0, 5.0
_PORTS_TRIED = 5
_RESTARTS = 10
# Ends the server as soon as the pipe on its standard input closes, however the process at its other end ended, and
# removes the directory. Descriptor 3 is that pipe: the shell gives background commands an empty standard input.
_KEEPER = """
exec 3<&0 </dev/null
directory=$1; shift
"$@" 3<&- &
server=$!
{ read -r line <&3; kill "$server"; } 2>/dev/null &
watch=$!
wait "$server"; code=$?
kill "$watch" 2>/dev/null
rm -rf -- "$directory"
exit "$code"
"""


class RedisServer:
    """An in-memory server without persistence, with a generated password.

    The password is in a file of mode 0600 while the server starts, never on a command line. If the server dies it is
    started again, empty, on the same port. A killed job takes it along: its keeper notices.

    Args:
        address: what to listen on, an address of this machine; never all of them.
        capacity_bytes: where eviction begins (least frequently used).
        password: None: a new one.

    Raises:
        FileNotFoundError: no redis-server or valkey-server is installed.
        RuntimeError: it does not start; says what it wrote.
    """

    def __init__(self, address: str, capacity_bytes: int, password: str | None = None) -> None:
        self._program = find_program()
        self._address, self._capacity_bytes = address, capacity_bytes
        self._password = password or secrets.token_hex(32)
        self._stopping = threading.Event()
        self._pid = os.getpid()
        for attempt in range(_PORTS_TRIED):
            self._port = _free_port(address)
            try:
                self._process = self._start()
                break
            except RuntimeError as error:  # somebody else may have taken the port
                if attempt + 1 == _PORTS_TRIED or "in use" not in str(error):
                    raise
        threading.Thread(target=self._revive, name="bagua-cache-redis", daemon=True).start()

    @property
    def host(self) -> RedisHost:
        """Where it is, with the password."""
        return RedisHost(self._address, self._port, password=self._password)

    def stop(self) -> None:
        """End it. Does nothing in a process that did not start it."""
        if self._pid != os.getpid() or self._stopping.is_set():
            return
        self._stopping.set()
        _end(self._process)

    def _start(self) -> subprocess.Popen[bytes]:
        directory = Path(tempfile.mkdtemp(prefix="bagua-redis-"))
        config = directory / "redis.conf"
        config.touch(mode=0o600)
        config.write_text(self._configuration(directory))
        log = tempfile.TemporaryFile()  # noqa: SIM115  (closed below)
        process = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER, "bagua-keeper", str(directory), self._program, str(config)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the job, which ends the server after its last write
        )
        deadline = time.monotonic() + _START_S
        store = RedisStore(self.host)
        try:
            while True:
                try:
                    store.ping()
                    config.unlink(missing_ok=True)
                    return process
                except StoreError as error:
                    if process.poll() is not None or time.monotonic() > deadline:
                        _end(process)
                        raise RuntimeError(f"{self._program} did not start: {_tail(log) or error}") from error
                    time.sleep(0.02)
        finally:
            store.close()
            log.close()

    def _configuration(self, directory: Path) -> str:
        return "\n".join(
            [
                f"bind {self._address}",
                f"port {self._port}",
                "protected-mode yes",
                f"requirepass {self._password}",
                'save ""',
                "appendonly no",
                f"maxmemory {self._capacity_bytes}",
                "maxmemory-policy allkeys-lfu",
                "lfu-decay-time 60",
                "lazyfree-lazy-eviction yes",
                f'dir "{directory}"',
                "daemonize no",
                "",
            ]
        )

    def _revive(self) -> None:
        for restart in range(_RESTARTS):
            self._process.wait()
            _end(self._process)
            if self._stopping.wait(min(0.05 * 2**restart, 5.0)):
                return
            _log.info("the cache's redis server on port %d ended; starting it again", self._port)
            with contextlib.suppress(RuntimeError, OSError):
                self._process = self._start()
            if self._stopping.is_set():
                _end(self._process)
                return


def find_program() -> str:
    """Return the path of the server.

    Raises:
        FileNotFoundError: there is none.
    """
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path:
            return path
    raise FileNotFoundError(
        'backend "redis" without hosts starts a server on each node, and neither redis-server nor valkey-server is '
        "installed here; install one (Debian: apt install redis-server), or name servers in hosts"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe, which ends the server; kill the keeper should it hang."""
    with contextlib.suppress(OSError):
        assert process.stdin is not None
        process.stdin.close()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_STOP_S)


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return " / ".join(log.read().decode(errors="replace").splitlines()[-3:])
