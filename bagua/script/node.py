"""What runs on each host of a `baguarun` job: it starts the launcher, and ends it when the connection is gone.

Its text is sent to the host's Python over the connection, so it needs nothing but the standard library and knows
nothing of the rest of the package. On its standard input there are two lines of JSON, this program (read by who runs
it) and what to start; after that the input stays open as long as the job is wanted. No value of either is ever part
of a shell's command.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time

_PR_SET_CHILD_SUBREAPER = 36
_CLEANING_S = 5.0


def main() -> int:
    """Run what the next line of the input says: {"token", "argv", "cwd", "env", "grace_s"}.

    Returns:
        the command's exit code, 128 + n for signal n; 2 if it could not be started.
    """
    spec = json.loads(sys.stdin.readline())
    # Descendants of a launcher that dies come to this process, which ends them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    print(spec["token"], flush=True)
    try:
        process = subprocess.Popen(
            spec["argv"],
            cwd=spec["cwd"],
            env={**os.environ, **spec["env"]},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        print(f"cannot start {spec['argv'][0]} in {spec['cwd']}: {error}", file=sys.stderr, flush=True)
        return 2
    unwanted = threading.Event()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: unwanted.set())
    threading.Thread(target=_wait_for_end, args=(unwanted,), daemon=True).start()
    code = _wait(process, unwanted, spec["grace_s"])
    _end_orphans()
    return 128 - code if code < 0 else code


def _wait_for_end(unwanted: threading.Event) -> None:
    """The input ends when the other side closes it, and when it dies or its connection does."""
    with contextlib.suppress(OSError, ValueError):
        while sys.stdin.readline():
            pass
    unwanted.set()


def _wait(process: subprocess.Popen[bytes], unwanted: threading.Event, grace_s: float) -> int:
    """Until the launcher has ended: by itself, or by SIGTERM, or by SIGKILL after `grace_s` more."""
    while process.poll() is None and not unwanted.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def _end_orphans() -> None:
    """Kill what the launcher has left behind; it would also keep the connection open.

    Bounded, for what sits in the kernel cannot be killed.
    """
    deadline = time.monotonic() + _CLEANING_S
    while time.monotonic() < deadline:
        for pid in _children():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
        except ChildProcessError:
            return


def _children() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main())
