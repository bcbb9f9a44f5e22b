"""`bagua run --preload`: ranks are forked from a process that has imported their modules already.

Importing torch and the script's own modules takes seconds of CPU time. Here it is done once on a host, before the job
begins. A rank that is started again is forked, and at work at once.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from bagua.distributed.forked_rank import Script, run_script, set_process_name, unbuffer_output

__all__ = ["ForkServer", "ForkedProcess"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CUDA_ERROR_NOT_INITIALIZED = 3
_START_S = 30.0  # for a fork
# What a training imports later on, by the module that does.
_LATER = {
    "torch": ("torch.distributed", "torch._dynamo"),  # the second one when the first optimizer is made: seconds
    "bagua": ("bagua.engine", "bagua.algorithms", "bagua.membership.remote_seat", "bagua.elastic.state"),
}
_LOOK_S = 0.01
_OF_NVML = re.compile(r"cuda[0-9a-f]{8,11}$")  # a longer number is cut by the kernel: names have 15 characters
_NAMED_S = 1.0  # for a thread of a library to run first, when it names itself
_OF_RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"}


class _LostError(RuntimeError):
    """The process that ranks are forked from has ended, or does not answer."""


class ForkedProcess:
    """A child that was forked, with the part of `subprocess.Popen` that launchers need.

    Args:
        pid: of a child of this process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and reap it; return its exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored here: nobody knows
                self.returncode = 0
                break
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            else:
                time.sleep(_LOOK_S)
        return self.returncode


class ForkServer:
    """A process that was forked from this one and forks ranks. It ends with this one, and the ranks do.

    Make it while this process has one thread, and has opened no file that ranks should not have. The ranks are children
    of this process, so that it learns how they ended.

    Args:
        say: writes a line to the log.

    Raises:
        ValueError: this process has used CUDA.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        if _uses_cuda():  # in a child the driver would not say so
            raise ValueError("the launcher has used CUDA already, and a process that has used CUDA cannot be forked")
        self._say, self._lost = say, False
        self._socket, theirs = socket.socketpair()
        self._replies = self._socket.makefile("r", encoding="utf-8")
        launcher = os.getpid()
        self._pid = _fork()
        if not self._pid:
            with _ending():
                self._replies.close()
                self._socket.close()
                _serve(theirs, launcher)
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._pid

    def preload(self, modules: Sequence[str], command: Sequence[str], env: Mapping[str, str]) -> None:
        """Import modules there, and wait for it.

        Args:
            modules: their names.
            command: of the ranks: its script decides where modules are looked for.
            env: the environment that the modules see.

        Raises:
            ValueError: one cannot be imported, or cannot be forked afterwards; says which and why.
        """
        try:
            reply = self._ask({"modules": [*modules], "command": [*command], "env": {**env}}, None)
        except _LostError as error:
            raise ValueError(f"while importing {', '.join(modules)}: {error}") from None
        if reply["error"]:
            raise ValueError(reply["error"])

    def start(
        self, command: Sequence[str], env: Mapping[str, str], stdout: str | None = None, stderr: str | None = None
    ) -> ForkedProcess | None:
        """Fork a rank, in a session of its own. It ends when this process does.

        Args:
            command: Python with a script or a module, see `bagua.distributed.forked_rank.Script`.
            env: its whole environment.
            stdout: path of a file that it writes to in the place of this process's output.
            stderr: the same for errors.

        Returns:
            the rank; None if the server is lost, which is said once: no rank was started, and none will be.
        """
        if self._lost:
            return None
        request = {"command": [*command], "env": {**env}, "paths": [stdout, stderr]}
        # The rank's parent ends at once. Then the next subreaper above it becomes its parent.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            return ForkedProcess(self._ask(request, _START_S)["pid"])
        except _LostError as error:
            self._lost = True
            self._say(f"--preload: {error}; from now on ranks start without it")
            return None
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def close(self) -> None:
        """End it. Ranks go on."""
        self._replies.close()
        self._socket.close()
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _ask(self, request: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            line = self._replies.readline()
        except TimeoutError:
            os.kill(self._pid, signal.SIGKILL)  # or it could still start a rank
            raise _LostError(f"the process that forks ranks has not answered within {timeout} s") from None
        except OSError:  # the connection is closed
            line = ""
        if not line:
            raise _LostError("the process that forks ranks has ended")
        return json.loads(line)


def _serve(requests: socket.socket, launcher: int) -> NoReturn:
    """Of the server: until its launcher closes the connection."""
    _end_with(launcher)
    os.setsid()  # Ctrl-C is for the launcher
    set_process_name("bagua-preload")
    unbuffer_output()
    # As Python has it; modules may install others.
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    of_children = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored nothing could be waited for
    changes: dict[str, str | None] = {}
    file = requests.makefile("rw", encoding="utf-8")
    requests.close()  # ranks close the file, and nothing else holds the connection open then
    for line in file:
        request = json.loads(line)
        if "modules" in request:
            reply = {"error": _import(**request, changes=changes)}
        else:
            reply = {"pid": _fork_rank(file, launcher, of_children, changes, **request)}
        file.write(json.dumps(reply) + "\n")
        file.flush()
    os._exit(0)


def _import(
    modules: Sequence[str], command: Sequence[str], env: Mapping[str, str], changes: dict[str, str | None]
) -> str:
    """Return what is wrong, or "".

    Args:
        changes: of the environment by the modules; is filled in. None: it is removed.
    """
    before = {name: value for name, value in env.items() if name not in _OF_RANK}
    os.environ.clear()
    os.environ.update(before)
    # Then torch.cuda.is_available(), which modules may call, does not initialise the driver.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    Script.of(command).lead_path()
    gc.disable()
    read: set[str] = set()
    for name in modules:
        try:
            with _watching(read):
                for each in (name, *_LATER.get(name, ())):
                    importlib.import_module(each)
        except BaseException as error:
            return f"{name} cannot be imported: {type(error).__name__}: {error}"
        if problem := _problem(read):
            return f"{name} {problem}"
    gc.freeze()  # pages of objects that no collection touches stay shared, and a rank ends a second earlier
    gc.enable()
    changes.update({name: value for name, value in os.environ.items() if before.get(name) != value})
    changes.update({name: None for name in before if name not in os.environ})
    return ""


def _problem(read: set[str]) -> str:
    """Why this process cannot be forked any more, or what ranks would lack; "" if there is nothing."""
    if others := [each.name for each in threading.enumerate() if each is not threading.main_thread()]:
        return f"starts a thread when it is imported ({', '.join(others)}); a forked rank would lack it"
    if _uses_cuda():
        return "uses CUDA when it is imported, and a process that has used CUDA cannot be forked"
    if any(path.read_text().split() for path in Path("/proc/self/task").glob("*/children")):
        return "starts a process when it is imported, which would not be a forked rank's own"
    if read:
        return f"reads {', '.join(sorted(read))} when it is imported, which ranks have only later"
    if not (trial := _fork()):  # ends the threads of libraries that start them again after a fork, such as OpenBLAS
        os._exit(0)
    os.waitpid(trial, 0)
    deadline = time.monotonic() + _NAMED_S
    while (others := _other_threads()) and time.monotonic() < deadline:
        time.sleep(0.01)
    if others:
        names = ", ".join(others)
        return f"computes in parallel when it is imported; a forked rank would wait for threads that it lacks ({names})"
    return ""


@contextmanager
def _watching(read: set[str]) -> Iterator[None]:
    """Note which variables of a rank are read from `os.environ` until the block ends."""
    kind = type(os.environ)

    class Watched(kind):
        def __getitem__(self, name: str) -> str:
            if name in _OF_RANK:
                read.add(name)
            return super().__getitem__(name)

    os.environ.__class__ = Watched
    try:
        yield
    finally:
        os.environ.__class__ = kind


def _uses_cuda() -> bool:
    """Whether this process has initialised the CUDA driver; asking it for its devices is enough."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:  # not loaded
        return False
    return driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != _CUDA_ERROR_NOT_INITIALIZED


def _other_threads() -> list[str]:
    """Names of the other threads of this process, but for those of NVIDIA's management library.

    Torch asks that library for devices. Its threads stay when it is told to end. A forked rank can ask again and use
    CUDA without them.
    """
    found = list[str]()
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended meanwhile
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
            if int(task) != os.getpid() and not _OF_NVML.match(name):
                found.append(name)
    return found


def _fork_rank(
    requests: TextIO,
    launcher: int,
    of_children: Any,
    changes: Mapping[str, str | None],
    command: Sequence[str],
    env: Mapping[str, str],
    paths: Sequence[str | None],
) -> int:
    """Return the process id of a rank whose parent is the launcher. It has a session of its own by then."""
    reader, writer = os.pipe()
    if parent := _fork():
        os.close(writer)
        os.waitpid(parent, 0)
        with open(reader) as file:
            return int(file.read())
    with _ending():
        parent = os.getpid()
        if _fork():
            os._exit(0)
        os.close(reader)
        requests.close()
        os.setsid()
        while os.getppid() == parent:
            time.sleep(_LOOK_S / 10)
        _end_with(launcher)
        for number, path in enumerate(paths, 1):
            if path is not None:
                file = os.open(path, os.O_WRONLY)
                os.dup2(file, number)
                os.close(file)
        signal.signal(signal.SIGCHLD, of_children)
        os.write(writer, str(os.getpid()).encode())
        os.close(writer)
        run_script(command, {name: value for name, value in {**env, **changes}.items() if value is not None})
    raise AssertionError("the process has not ended")


@contextmanager
def _ending() -> Iterator[None]:
    """The block does not return; if it fails, the process ends and says why."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _fork() -> int:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with warnings.catch_warnings():
        # Python counts threads of native libraries, too. Those of OpenBLAS are started again where they are needed.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _end_with(launcher: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(137)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
