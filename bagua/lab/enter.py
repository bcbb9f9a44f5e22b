"""Runs a command inside a host of an emulated cluster: `enter.py PID NAMESPACES CWD COMMAND...`.

Started as a file, without the package, so that it costs little. This process stays outside and stands for the
command: signals sent to it are passed on, and it ends as the command ended. If it is killed, so is the command.

`enter.py --here PARENT:FOLDER CWD COMMAND...` enters nothing; the first to end of PARENT, this process (by SIGTERM)
and the command takes all that the command has started with it, and FOLDER too if it was PARENT.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_FROM_TERMINAL = 128  # SI_KERNEL: the terminal sends Ctrl-C to the command as well
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_WAITED = {*_PASSED_ON, signal.SIGCHLD}
_POLL_S = 0.2  # how often it is looked after the parent, where the kernel does not tell
_libc = ctypes.CDLL(None, use_errno=True)


def main(argv: list[str]) -> None:
    """Enter, run, wait. Does not return."""
    here = argv[0] == "--here"
    number, _, folder = argv[1].partition(":")
    parent = int(number) if here else 0
    if not here:
        try:
            handle = os.pidfd_open(int(argv[0]))
        except ProcessLookupError:
            sys.exit("bagua lab: the host is gone")
        if _libc.setns(handle, int(argv[1])) != 0:
            sys.exit(f"bagua lab: cannot enter the host: {os.strerror(ctypes.get_errno())}")
        os.close(handle)
    else:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.chdir(argv[2])
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    child = os.fork()
    if child == 0:
        _become(argv[3:])
    code = _wait(child, parent)
    if here:
        _end_descendants()
        if os.getppid() != parent:
            _remove(folder)
    _end_as(code)


def _become(command: list[str]) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"bagua lab: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def _wait(child: int, parent: int) -> int:
    """The command's exit code, negative for a signal."""
    while True:
        info = signal.sigtimedwait(_WAITED, _POLL_S) if parent else signal.sigwaitinfo(_WAITED)
        if parent and (os.getppid() != parent or (info and info.si_signo == signal.SIGTERM)):
            os.kill(child, signal.SIGTERM if os.getppid() == parent else signal.SIGKILL)
        elif info and info.si_signo != signal.SIGCHLD and info.si_code != _FROM_TERMINAL:
            os.kill(child, info.si_signo)
        while True:
            try:
                done, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 1
            if done == child:
                return os.waitstatus_to_exitcode(status)
            if done == 0:
                break


def _end_descendants() -> None:
    """Kills what is left: a subreaper inherits the orphans, so the tree is empty in the end."""
    me = os.getpid()
    while True:
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                with open(f"/proc/{entry}/stat") as file:
                    if int(file.read().rpartition(")")[2].split()[1]) == me:
                        os.kill(int(entry), signal.SIGKILL)
            except (OSError, IndexError):
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _remove(folder: str) -> None:
    """The cluster's files, which its parent did not live to remove."""
    try:
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
    except OSError:
        return  # another host's wrapper does it


def _end_as(code: int) -> None:
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os.kill(os.getpid(), -code)


if __name__ == "__main__":
    main(sys.argv[1:])
