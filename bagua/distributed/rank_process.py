"""A rank that a launcher starts itself, without torchelastic: it ends with its launcher, and tells why it failed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from bagua.distributed.fork_server import ForkedProcess

__all__ = ["RankProcess", "Start", "spawn"]

Start = Callable[[Mapping[str, str]], "subprocess.Popen[bytes] | ForkedProcess"]
"""Starts a rank in a session of its own, as a child of this process; takes its whole environment."""

_REAP_S = 30.0
# Run between fork and the script. A death signal that is set here survives exec, so no rank outlives a killed launcher.
_TIE = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv[1]):
    os._exit(137)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"{sys.argv[2]}: {error.strerror}", file=sys.stderr)
    os._exit(127)
"""


def spawn(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own; it ends when the thread that calls this does."""
    tied = [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]
    return subprocess.Popen(tied, env=env, start_new_session=True)


class RankProcess:
    """One rank in a session of its own. Start it in the main thread: it ends when the thread that started it does.

    Args:
        start: starts it.
        env: its whole environment; `TORCHELASTIC_ERROR_FILE` is added.
        directory: for the file in which the rank leaves its traceback; new for each start.
        local_rank: for the summary of a failure.
    """

    def __init__(self, start: Start, env: Mapping[str, str], directory: Path, local_rank: int = 0) -> None:
        directory.mkdir(parents=True)
        self._local_rank = local_rank
        self._error_file = directory / "error.json"
        self._process = start({**env, "TORCHELASTIC_ERROR_FILE": str(self._error_file)})
        self._stopped_since: tuple[float, str] | None = None
        self._looked = 0.0

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs. What it has started itself ends with it."""
        if self._process.returncode is None:
            with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored here
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return None
            self.send(signal.SIGKILL)  # before it is reaped: the number of the session is its own until then
        return self._process.wait()

    def send(self, number: int) -> None:
        """Send a signal to the rank and to what it has started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill it, and wait for its end, unless the kernel holds it back."""
        self.send(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)

    def stopped_s(self, now: float) -> float:
        """For how many seconds it has been stopped (SIGSTOP) without running in between.

        Call it often: time in which nobody looked does not count, because then the launcher was stopped, too.
        """
        if now - self._looked > 1.0:
            self._stopped_since = None
        self._looked = now
        runs = _runs_while_stopped(self.pid)
        if runs is None:
            self._stopped_since = None
        elif self._stopped_since is None or self._stopped_since[1] != runs:
            self._stopped_since = now, runs
        return 0.0 if self._stopped_since is None else now - self._stopped_since[0]

    def failure(self) -> ProcessFailure:
        """Why it has failed, for the summary."""
        assert self._process.returncode
        return ProcessFailure(self._local_rank, self.pid, self._process.returncode, str(self._error_file))


def _runs_while_stopped(pid: int) -> str | None:
    """How often a stopped process was on a CPU so far; None if it is not stopped.

    A process that is slowed down by being stopped again and again is found stopped at each look, but it runs.
    """
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            return None
        return Path(f"/proc/{pid}/schedstat").read_text().split()[-1]
    except (OSError, IndexError):
        return None
