"""`python -m MODULE ...` without a new interpreter: a process that the fork server forks, with torch imported.

For programs whose own start and end are not what a test is about: threads of the interpreter are not joined, and what
was registered for its exit does not run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing as mp
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

from tests.fork_server import ForkServer

__all__ = ["ForkedProcess", "run_forked"]


class ForkedProcess:
    """What tests use of a `subprocess.Popen`.

    Args:
        server: forks it.
        argv: an interpreter, options of it of which `-W error` counts, `-m`, a module and its arguments.
        env: all of its environment. Of PYTHONPATH what is new counts, and a `sitecustomize.py` there.
        cwd: folder to run in.
        output: files for its standard output and its errors, which are made or appended to.

    Attributes:
        pid: of the process, which leads a session; no other process has the number before the server ends.
        returncode: None while it runs; minus SIGKILL for whatever ended it without an exit code.
    """

    def __init__(
        self, server: ForkServer, argv: Sequence[str], env: Mapping[str, str], cwd: Path, output: tuple[Path, Path]
    ) -> None:
        self.returncode: int | None = None
        self._pipe = server.fork(_run, list(argv), dict(env), str(cwd), tuple(map(str, output)))
        assert self._pipe.poll(60), f"the process of {argv} did not start within 60 s"
        self.pid: int = self._pipe.recv()

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        return self._ended_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: it has none yet.
        """
        code = self._ended_within(120 if timeout is None else timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 120)
        return code

    def kill(self) -> None:
        """End it, and what it has started in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _ended_within(self, seconds: float) -> int | None:
        if self.returncode is None and self._pipe.poll(seconds):
            try:
                self.returncode = self._pipe.recv()
                with contextlib.suppress(EOFError):
                    self._pipe.recv()  # until it has ended
            except (EOFError, ConnectionResetError):
                self.returncode = -signal.SIGKILL
            self._pipe.close()
        return self.returncode


def run_forked(
    server: ForkServer, argv: Sequence[str], env: Mapping[str, str], cwd: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with output captured; see `ForkedProcess`.

    Raises:
        AssertionError: it took longer and was killed; with its errors.
    """
    with tempfile.TemporaryDirectory(prefix="bagua-forked-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process, end = ForkedProcess(server, argv, env, cwd, (out, err)), time.monotonic() + timeout_s
        try:
            code = process.wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{argv} did not end within {timeout_s} s: {err.read_text()}") from None
        finally:
            process.kill()
        return subprocess.CompletedProcess(list(argv), code, out.read_text(), err.read_text())


def _run(pipe: Connection, argv: list[str], env: dict[str, str], cwd: str, output: tuple[str, str]) -> None:
    os.setsid()
    pipe.send(os.getpid())
    for number, path in enumerate(output, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    code = 1
    try:
        code = _run_module(argv, env, cwd)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        for child in mp.active_children():
            child.terminate()
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send(code)


def _run_module(argv: list[str], env: dict[str, str], cwd: str) -> int:
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    tempfile.tempdir = None  # the server may have looked at TMPDIR already
    torch.set_num_threads(1)
    new = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:0] = new
    for path in new:
        if (site := Path(path, "sitecustomize.py")).exists():
            runpy.run_path(str(site))
    at = argv.index("-m")
    if "-W" in argv[:at]:
        warnings.simplefilter(argv[argv.index("-W") + 1])  # pyright: ignore[reportArgumentType]
    sys.argv = [argv[0], *argv[at + 2 :]]
    _run_as_main(argv[at + 1])
    return 0


def _run_as_main(name: str) -> None:
    """By both names that processes of `multiprocessing` know the main module by. A package runs its `__main__`."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    assert spec is not None and isinstance(spec.loader, SourceFileLoader), f"{name} is no file of Python"
    code = spec.loader.get_code(name)
    assert code is not None
    module = ModuleType("__main__")
    module.__spec__, module.__loader__, module.__package__, module.__file__ = (
        spec,
        spec.loader,
        spec.parent,
        spec.origin,
    )
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(code, module.__dict__)
