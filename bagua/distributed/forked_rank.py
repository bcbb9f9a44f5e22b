"""A script in a process that was forked from another one: it runs as if Python had been started with it.

Differs: from a fresh interpreter, in that modules which were imported before the fork have read the environment of that
time, that the stack has frames of the launcher below those of the script, and that options of Python itself (`-W`)
are the launcher's.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import errno
import io
import os
import runpy
import signal
import sys
import threading
import traceback
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NoReturn

__all__ = ["Script", "run_script", "set_process_name", "unbuffer_output"]

_PR_SET_NAME = 15
_SET_THREADS = ("openblas_set_num_threads", "openblas_set_num_threads64_", "scipy_openblas_set_num_threads64_")


@dataclass(frozen=True)
class Script:
    """What follows Python's own options on a command line.

    Attributes:
        name: path of a file, or with `is_module` the name of a module.
        is_module: it was started with `-m`.
        args: its own.
    """

    name: str
    is_module: bool
    args: tuple[str, ...]

    @classmethod
    def of(cls, command: Sequence[str]) -> Script:
        """That of a command with no other options than `-u` and `-m`."""
        words = [*command[1:]]
        while words and words[0] == "-u":
            words.pop(0)
        is_module = words[0] == "-m"
        name, *args = words[1:] if is_module else words
        return cls(name, is_module, tuple(args))

    def lead_path(self) -> None:
        """Put its folder at the head of `sys.path`, in the place of that of the running script."""
        if not getattr(sys.flags, "safe_path", False):
            path = os.path.realpath(self.name)
            holds_main = os.path.isdir(path) or (os.path.isfile(path) and zipfile.is_zipfile(path))
            sys.path[0] = os.getcwd() if self.is_module else path if holds_main else os.path.dirname(path)


def set_process_name(name: str) -> None:
    """For ps, top and `bagua lab`: of a forked process /proc shows the command line and environment of its launcher.

    Args:
        name: 15 bytes at most.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0)


def run_script(command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Run it to its end, and end the process as Python would: with threads joined and exit functions called.

    Args:
        command: see `Script.of`.
        env: the whole environment.
    """
    os.environ.clear()
    os.environ.update(env)
    set_process_name(f"bagua-rank-{env.get('LOCAL_RANK', '0')}")
    _own_state()
    script = Script.of(command)
    sys.orig_argv = [*command]
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    code = 0
    try:
        _execute(script, main)
    except SystemExit as end:
        code = _code_of(end)
    except BaseException as error:
        trace = error.__traceback__
        for _ in range(2):  # the frames of this module
            trace = trace and trace.tb_next
        _report(error.with_traceback(trace))
        if isinstance(error, KeyboardInterrupt):
            _end_by_sigint()
        code = 1
    ctypes.pythonapi.Py_Exit(ctypes.c_int(code))
    raise AssertionError("the interpreter has not ended")


def _execute(script: Script, main: ModuleType) -> None:
    sys.argv = ["-m" if script.is_module else script.name, *script.args]
    if script.is_module:
        runpy._run_module_as_main(script.name)  # pyright: ignore[reportAttributeAccessIssue]  # what `python -m` calls
        return
    path = os.path.join(os.getcwd(), script.name)
    if not os.path.isfile(script.name):  # a folder or an archive with a __main__.py, or nothing
        if not os.path.exists(script.name):
            why = f"[Errno {errno.ENOENT}] {os.strerror(errno.ENOENT)}"
            print(f"{sys.executable}: can't open file {path!r}: {why}", file=sys.stderr)
            raise SystemExit(2)
        runpy._run_module_as_main("__main__", False)  # pyright: ignore[reportAttributeAccessIssue]
        return
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    exec(code, main.__dict__)


def _own_state() -> None:
    """Give this process what a fresh one would draw or read itself."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python's own generator is seeded anew by each fork
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads):  # libraries have read the variable before the fork
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(int(threads))
        _limit_openblas(int(threads))


def _limit_openblas(threads: int) -> None:
    """Those that are loaded, such as NumPy's own."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split()[-1] for line in lines if "openblas" in os.path.basename(line)}:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
        for name in _SET_THREADS:
            if (set_threads := getattr(library, name, None)) is not None:
                set_threads(ctypes.c_int(threads))


def unbuffer_output() -> None:
    """As `python -u` has it."""
    for number, name in enumerate(("stdout", "stderr"), 1):
        earlier = getattr(sys, name)
        with suppress(OSError):  # it is closed
            raw = io.FileIO(number, "wb", closefd=False)
            vars(raw)["name"] = f"<{name}>"
            coding = getattr(earlier, "encoding", None), getattr(earlier, "errors", None)
            text = io.TextIOWrapper(raw, *coding, newline="\n", write_through=True)  # pyright: ignore[reportArgumentType]
            setattr(sys, name, text)
            setattr(sys, f"__{name}__", text)


def _report(error: BaseException) -> None:
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as failure:
        print("Error in sys.excepthook:", file=sys.stderr)
        failure.__context__ = None
        trace = failure.__traceback__ and failure.__traceback__.tb_next
        traceback.print_exception(type(failure), failure.with_traceback(trace), trace)
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(type(error), error, error.__traceback__)


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _end_by_sigint() -> NoReturn:
    """As Python does it, so that a parent sees why."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(130)
