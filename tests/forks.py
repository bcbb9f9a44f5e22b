"""Children that are forked from a test: from a process with one thread, and never waited for without an end.

A child of a process with threads may wait for ever for a lock that another thread held at the moment of the fork.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.rank_pool import written_to


def check_single_threaded() -> None:
    """Raise an AssertionError if this process has a thread beside the calling one, of Python or not."""
    python = [each.name for each in threading.enumerate() if each is not threading.current_thread()]
    assert not python, f"a fork would inherit the locks of {python}"
    if os.path.exists("/proc/self/task"):
        names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
        assert len(names) == 1, f"a fork would inherit the locks of {names}"


class Fork:
    """A child process that runs `work()` and ends with the exit code 0, or 1 if it raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._said = tempfile.NamedTemporaryFile(prefix="bagua-fork-")  # noqa: SIM115  (closed in `wait`)
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                faulthandler.register(signal.SIGUSR1, file=self._said, all_threads=True)
                work()
                code = 0
            except BaseException:
                self._said.write(traceback.format_exc().encode())
                self._said.flush()
            finally:
                os._exit(code)

    def kill(self) -> None:
        """End it at once."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = 60) -> int:
        """Return its exit code, or minus the number of the signal that ended it.

        Raises:
            AssertionError: it raised, or had to be killed after `timeout_s`; with its traceback.
        """
        with self._said:
            if not self._ends_within(timeout_s):
                os.kill(self.pid, signal.SIGUSR1)
                said = written_to(Path(self._said.name))
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"a forked process did not end in {timeout_s} s:\n{said}")
            if self._code == 1:
                said = Path(self._said.name).read_text(errors="replace")
                raise AssertionError(f"a forked process failed:\n{said}")
            return self._code

    def _ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
