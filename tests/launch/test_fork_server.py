"""`bagua run --preload`: a rank that is forked runs as one that Python was started for."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fork_server import ForkServer
from tests.launch.launching import ROOT, RUN, launch, launch_forked, script
from tests.lines import read_line
from tests.pids import runs

pytestmark = pytest.mark.process

# Asks a server for ranks as a launcher does: each line is the command of one, and is answered by how it ended.
DRIVER = """
import json, os, sys
from bagua.distributed.fork_server import ForkServer
server = ForkServer(lambda text: print(text, flush=True))
modules, command = json.loads(sys.stdin.readline())
try:
    server.preload(modules, command, {**os.environ, "SEEN": "by modules"})
except ValueError as error:
    sys.exit(f"refused: {error}")
print(server.pid, flush=True)
for line in sys.stdin:
    request = json.loads(line)
    rank = server.start(request["command"], {**os.environ, "LOCAL_RANK": "5", **request.get("env", {})})
    if rank is None:
        print("not started", flush=True)
        continue
    if request.get("wait", True):
        print(rank.wait(), flush=True)
        assert os.getpgid(0) != rank.pid
    else:
        print(rank.pid, flush=True)
server.close()
"""

SHOWS = """
import atexit, multiprocessing, os, pickle, signal, subprocess, sys, threading, time
import beside
class Here: pass
def double(x: int): return 2 * x
def main():
    spec = __spec__ and __spec__.name
    print(__name__, __file__, spec, sys.argv, sys.path[0], sys.orig_argv[2:], beside.VALUE)
    print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), os.getsid(0) == os.getpid(), os.getcwd())
    print(sys.modules["__main__"].Here is Here, type(pickle.loads(pickle.dumps(Here()))) is Here)
    print(os.environ["LOCAL_RANK"], os.getenv("LOCAL_RANK"), subprocess.check_output(["printenv", "LOCAL_RANK"]))
    print(double.__annotations__, type(__loader__).__name__, sys.stdout.name, sys.path.count(sys.path[0]))
    print(sys.stdout.line_buffering, sys.stdout.write_through, sys.stdout.encoding, sys.stderr.write_through)
    print(threading.active_count(), threading.current_thread() is threading.main_thread())
    atexit.register(print, "exit function")
    how = sys.argv[1]
    late = threading.Thread(target=lambda: (time.sleep(0.1), print("thread ends")))
    late.start()
    if how == "raise":
        try:
            {}["first"]
        except KeyError as error:
            raise ValueError("second") from error
    elif how == "hook":
        sys.excepthook = lambda *error: sys.stderr.write(f"{error[0]} in the hook\\n")
        1 / 0
    elif how == "bad hook":
        sys.excepthook = lambda *error: [][0]
        1 / 0
    elif how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "spawn":
        late.join()
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(double, [1, 2]))
    elif how != "end":
        sys.exit(eval(how))
if __name__ == "__main__":
    main()
"""


class Driver:
    """A launcher in its own process; `ask` starts a rank."""

    def __init__(
        self,
        folder: Path,
        modules: list[str],
        command: list[str],
        code: str = DRIVER,
        env: Mapping[str, str] | None = None,
    ) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._send([modules, command])

    def _send(self, what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def line(self) -> str:
        return read_line(self.process.stdout, "answer of the launcher").strip()

    def tell(self, *command: str, **more: Any) -> None:
        self._send({"command": [sys.executable, "-u", *command], **more})

    def ask(self, *command: str, **more: Any) -> str:
        self.tell(*command, **more)
        return self.line()

    def end(self) -> tuple[str, str]:
        """All that is left to read."""
        try:
            return self.process.communicate(timeout=60)
        finally:
            self.process.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    script(tmp_path, "VALUE = 7", "beside.py")
    script(tmp_path, SHOWS, "shows.py")
    (tmp_path / "folder").mkdir()
    script(tmp_path / "folder", "VALUE = 8", "beside.py")
    script(tmp_path / "folder", SHOWS, "__main__.py")
    return tmp_path


PARALLEL = "computes in parallel when it is imported; a forked rank would wait for threads that it lacks"
ENDS = ["end", "3", "'words'", "None", "-1", "raise", "hook", "bad hook", "interrupt", "kill", "spawn"]


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        (["shows.py"], ENDS[:2] + ENDS[5:6] + ENDS[9:10]),
        pytest.param(["shows.py"], ENDS[2:5] + ENDS[6:9] + ENDS[10:], marks=pytest.mark.slow),
        (["-m", "shows"], ENDS[:1]),
        pytest.param(["-m", "shows"], ENDS[1:], marks=pytest.mark.slow),
        (["folder"], ENDS[:1]),
        (["./absent.py"], ENDS[:1]),
        (["-m", "absent"], ENDS[:1]),
    ],
)
def test_it_runs_as_with_python(folder: Path, words: list[str], ends: list[str]) -> None:
    """What it sees, writes and ends with is the same, its traceback too."""
    for how in ends:
        plain = subprocess.run(
            [sys.executable, "-u", *words, how],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "LOCAL_RANK": "5"},
            capture_output=True,
            text=True,
            timeout=60,
            start_new_session=True,
            check=False,
        )
        driver = Driver(folder, ["json"], [sys.executable, "-u", *words])
        int(driver.line())
        driver.tell(*words, how)
        out, err = driver.end()
        *lines, code = out.splitlines()
        assert (how, lines, int(code), err) == (how, plain.stdout.splitlines(), plain.returncode, plain.stderr)


def test_generators_and_threads_are_those_of_the_rank(tmp_path: Path) -> None:
    """NumPy's generator is seeded when it is imported, and OpenMP and OpenBLAS read their variable then."""
    code = r"""
import ctypes, numpy, random, re, torch
paths = set(re.findall(r"/\S*openblas\S*", open("/proc/self/maps").read()))
names = ("openblas_get_num_threads", "openblas_get_num_threads64_", "scipy_openblas_get_num_threads64_")
of_numpy = {getattr(ctypes.CDLL(path), name)() for path in paths for name in names if hasattr(ctypes.CDLL(path), name)}
print(numpy.random.rand(), random.random(), torch.get_num_threads(), *of_numpy)
"""
    name = script(tmp_path, code)
    driver = Driver(tmp_path, ["numpy", "torch"], [sys.executable, name])
    int(driver.line())
    for threads in ("1", "3"):
        driver.tell(name, env={"OMP_NUM_THREADS": threads})
    out, err = driver.end()
    (one, _, other, _) = out.splitlines()
    assert {*one.split()[2:]} == {"1"} and other.split()[2] == "3" and err == ""
    assert not {*one.split()[:2]} & {*other.split()[:2]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "needed cannot be imported: ModuleNotFoundError: No module named 'needed'"),
        ("1 / 0", "needed cannot be imported: ZeroDivisionError: division by zero"),
        ("exit(4)", "needed cannot be imported: SystemExit: 4"),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True, name='mine').start()",
            "needed starts a thread when it is imported (mine); a forked rank would lack it",
        ),
        (
            "import subprocess, sys\nheld = subprocess.Popen(['sleep', '5'], stdout=-3, stderr=-3)",
            "needed starts a process when it is imported, which would not be a forked rank's own",
        ),
        (
            "import os\nrank = int(os.getenv('RANK', -1)), 'LOCAL_RANK' in os.environ",
            "needed reads LOCAL_RANK, RANK when it is imported, which ranks have only later",
        ),
        (
            "import torch\ntorch.set_num_threads(2)\ntable = torch.randn(2000, 2000).exp()",
            f"needed {PARALLEL} (NAME)",
        ),
        ("import os\nos.kill(os.getpid(), 9)", "while importing needed: the process that forks ranks has ended"),
    ],
)
def test_modules_that_cannot_be_preloaded(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        script(tmp_path, text, "needed.py")
    driver = Driver(tmp_path, ["needed"], [sys.executable, "x.py"])
    out, err = driver.end()
    assert re.sub(r"lacks \([^)]*\)", "lacks (NAME)", err) == f"refused: {said}\n"
    assert out == "" and driver.process.returncode == 1


def test_what_modules_do_counts(tmp_path: Path) -> None:
    """To the environment, the path and the streams, as if the rank had imported them."""
    (tmp_path / "vendored").mkdir()
    script(tmp_path / "vendored", "VALUE = 3", "inside.py")
    text = "import os, sys\nos.environ['SET'] = '1'\ndel os.environ['REMOVED']\nsys.path.insert(0, 'vendored')\n"
    text += "class Tee:\n    write = sys.stdout.write\n    flush = sys.stdout.flush\nsys.stdout = Tee()"
    script(tmp_path, text, "needed.py")
    code = "import os, inside\nprint(os.environ['SET'], os.getenv('REMOVED'), inside.VALUE, os.environ['CHANGED'])"
    name = script(tmp_path, code)
    driver = Driver(tmp_path, ["needed"], [sys.executable, name], env={"REMOVED": "1", "CHANGED": "before"})
    int(driver.line())
    driver.tell(name, env={"CHANGED": "after"})
    assert driver.end() == ("1 None 3 after\n0\n", "")


def test_where_ends_of_children_are_ignored(tmp_path: Path) -> None:
    """Nobody learns how the rank ended then, but it runs once."""
    name = script(tmp_path, "import signal\nprint(int(signal.getsignal(signal.SIGCHLD)))")
    ignoring = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    driver = Driver(tmp_path, ["json"], [sys.executable, name], ignoring + DRIVER)
    int(driver.line())
    driver.tell(name)
    assert driver.end() == ("1\n0\n", "")


@pytest.mark.parametrize(("state", "refused"), [(0, True), (3, False), (201, True)])
def test_a_module_that_initialises_cuda(tmp_path: Path, state: int, refused: bool) -> None:
    """A stand-in for the driver, which answers as one that is initialised, one that is not, and one without context."""
    (tmp_path / "driver.cpp").write_text(f'extern "C" int cuCtxGetCurrent(void **) {{ return {state}; }}')
    built = ["c++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "stand-in.so", "driver.cpp"]
    subprocess.run(built, cwd=tmp_path, check=True, timeout=60)
    script(tmp_path, "import ctypes\nctypes.CDLL('./stand-in.so')", "needed.py")
    driver = Driver(tmp_path, ["needed"], [sys.executable, "x.py"])
    out, err = driver.end()
    said = "needed uses CUDA when it is imported, and a process that has used CUDA cannot be forked"
    assert err == (f"refused: {said}\n" if refused else "") and out.strip().isdigit() == (not refused)


@pytest.mark.parametrize(
    ("name", "refused"),
    [("cuda00001800007", False), ("cuda00001c00008", False), ("cuda-EvtHandlr", True), ("worker", True)],
)
def test_threads_of_libraries(tmp_path: Path, name: str, refused: bool) -> None:
    """NVIDIA's management library leaves one when torch has counted devices; a rank can ask again without it."""
    code = """
#include <pthread.h>
#include <string.h>
#include <unistd.h>
static void *wait(void *name) {
    usleep(200000);  // as where others use the cores: a new thread has the name of the one that made it
    pthread_setname_np(pthread_self(), (const char *)name);
    pause();
    return nullptr;
}
extern "C" void start(const char *name) {
    static char kept[16];
    strcpy(kept, name);
    pthread_t thread;
    pthread_create(&thread, nullptr, wait, kept);
}
"""
    (tmp_path / "threads.cpp").write_text(code)
    built = ["c++", "-shared", "-fPIC", "-pthread", "-o", "threads.so", "threads.cpp"]
    subprocess.run(built, cwd=tmp_path, check=True, timeout=60)
    script(tmp_path, f"import ctypes\nctypes.CDLL('./threads.so').start(b'{name}')", "needed.py")
    out, err = Driver(tmp_path, ["needed"], [sys.executable, "x.py"]).end()
    said = f"needed {PARALLEL} ({name})"
    assert err == (f"refused: {said}\n" if refused else "") and out.strip().isdigit() == (not refused)


def test_ranks_train_on_every_device(tmp_path: Path, device: torch.device) -> None:
    """The process that forks them leaves CUDA alone, so each rank can initialise it."""
    text = r"""
import torch, bagua
before = torch.cuda.is_initialized()
device = torch.device(DEVICE)
bagua.init_process_group("gloo")
model = torch.nn.Linear(64, 64).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
bagua.distribute(model, optimizer, "bytegrad")
for _ in range(3):
    model(torch.ones(4, 64, device=device)).square().mean().backward()
    optimizer.step()
print(f"{before} {model.weight.device.type} {bagua.stats(model).steps}\n", end="")
bagua.destroy_process_group()
"""
    name = script(tmp_path, text.replace("DEVICE", repr(device.type)))
    ended = launch(tmp_path, *RUN, "--nproc-per-node", "2", "--preload", "torch,bagua", name)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == [f"False {device.type} 3"] * 2
    assert "--preload" not in ended.err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("torch.cuda.is_available()", False),
        ("torch.cuda.device_count()", False),
        ("torch.cuda.init()", True),
        ("torch.ones(1, device='cuda')", True),
    ],
)
def test_a_module_that_asks_for_cuda(tmp_path: Path, text: str, refused: bool) -> None:
    script(tmp_path, f"import torch\n{text}", "needed.py")
    out, err = Driver(tmp_path, ["needed"], [sys.executable, "x.py"]).end()
    said = "needed uses CUDA when it is imported, and a process that has used CUDA cannot be forked"
    assert err == (f"refused: {said}\n" if refused else "") and out.strip().isdigit() == (not refused)


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    name = script(tmp_path, "import time\ntime.sleep(600)")
    driver = Driver(tmp_path, ["json"], [sys.executable, name])
    server, rank = int(driver.line()), int(driver.ask(name, wait=False))
    assert runs(server) and runs(rank)
    assert Path(f"/proc/{server}/comm").read_text() == "bagua-preload\n"  # as ps shows it
    _await(lambda: Path(f"/proc/{rank}/comm").read_text() == "bagua-rank-5\n")
    assert f"PPid:\t{driver.process.pid}\n" in Path(f"/proc/{rank}/status").read_text()
    driver.process.kill()
    _await(lambda: not runs(server) and not runs(rank))
    driver.end()


def test_a_lost_server_is_told(tmp_path: Path) -> None:
    """The ranks that it has forked go on."""
    name = script(tmp_path, "import time\ntime.sleep(600)")
    driver = Driver(tmp_path, ["json"], [sys.executable, name])
    server, rank = int(driver.line()), int(driver.ask(name, wait=False))
    os.kill(server, signal.SIGKILL)
    assert driver.ask(name) == "--preload: the process that forks ranks has ended; from now on ranks start without it"
    assert [driver.line(), driver.ask(name)] == ["not started"] * 2  # and it is said once
    assert runs(rank)
    os.kill(rank, signal.SIGKILL)
    driver.end()


KILL_SERVER = """
import os, signal
from pathlib import Path
def kill_server():
    launcher = Path(f"/proc/{os.getppid()}")
    for each in (launcher / "task" / launcher.name / "children").read_text().split():
        if Path(f"/proc/{each}/comm").read_text() == "bagua-preload\\n":
            os.kill(int(each), signal.SIGKILL)
"""

TRAINS = (
    KILL_SERVER
    + r"""
import sys, time
loaded = [name for name in ("torch", "torch._dynamo", "bagua.engine") if name in sys.modules]
import torch
import bagua
open(os.path.join(os.environ["PIDS"], str(os.getpid())), "w").close()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
bagua.distribute(model, optimizer, "bytegrad", fault_tolerant=True)
sys.stdout.write(" ".join(["loaded", *loaded]) + "\n")
end = os.path.join(os.path.dirname(__file__), "end")
while (now := bagua.stats(model)).steps < (int(open(end).read()) if os.path.exists(end) else 1000):
    if now.rank == 1 and now.steps == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if "KILLS_SERVER" in os.environ:
            kill_server()
        os.kill(os.getpid(), 9)
    if now.rank == 0 and now.steps > 3 and now.size == 3 and not os.path.exists(end):
        open(end + ".new", "w").write(str(now.steps + 5))
        os.rename(end + ".new", end)
    time.sleep(0.02)
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.stdout.write("came to the end\n")
"""
)


@pytest.mark.parametrize("kills_server", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_killed_rank_is_started_again(tmp_path: Path, kills_server: bool) -> None:
    """It is forked; once the server is lost, it is started as without it. The ranks that live go on."""
    words = [*RUN, "--fault-tolerant", "--nproc-per-node", "3", "--max-restarts", "1", "--preload", "torch,bagua"]
    ended = launch(tmp_path, *words, script(tmp_path, TRAINS), env={"KILLS_SERVER": "1"} if kills_server else {})
    assert ended.code == 0, ended.err
    assert ended.out.count("loaded torch torch._dynamo bagua.engine\n") == 4 - kills_server, ended.out
    assert ended.out.count("came to the end\n") == 3
    assert "rank 1 of this host has been killed by SIGKILL; it is started again" in ended.err
    said = "--preload: the process that forks ranks has ended; from now on ranks start without it"
    assert (said in ended.err) == kills_server


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preload", "torch,no/module"], "must be names of modules with commas between them, not 'torch,no/module'"),
        (["--preload", "absent"], "--preload: absent cannot be imported: ModuleNotFoundError"),
        (["--preload", "json", "--run-path"], "--preload: not with --run-path, whose ranks are torch's own processes"),
        (["--preload", "json", "--no-python"], "--preload: ranks are forked from this Python; not with --no-python"),
    ],
)
def test_what_is_refused(fork_server: ForkServer, tmp_path: Path, words: list[str], said: str) -> None:
    ended = launch_forked(fork_server, tmp_path, *RUN, "--fault-tolerant", *words, script(tmp_path, ""))
    assert ended.code == 2 and said in ended.err


ELASTIC = r"""
import os, sys
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
sys.stdout.write(f"loaded {'torch' in sys.modules} {attempt}\n")
sys.stderr.write("an error\n")
if os.environ["RANK"] == "1" and attempt == "0":
    os.kill(os.getpid(), 9)
import torch
import bagua
bagua.init_process_group()
total = torch.ones(1)
torch.distributed.all_reduce(total)
sys.stdout.write(f"sum {total.item()}\n")
"""


@pytest.mark.parametrize("redirected", [pytest.param(False, marks=pytest.mark.slow), True])
def test_workers_of_torchelastic_are_forked(tmp_path: Path, redirected: bool) -> None:
    """They restart as ever, and their output goes where it belongs."""
    words = [*RUN, "--nproc-per-node", "2", "--max-restarts", "1", "--preload", "torch,bagua"]
    words += ["--redirects", "3", "--log-dir", str(tmp_path / "logs")] if redirected else []
    ended = launch(tmp_path, *words, script(tmp_path, ELASTIC))
    assert ended.code == 0, ended.err
    if redirected:
        assert ended.out == ""
        found = [sorted(tmp_path.glob(f"logs/**/attempt_1/{rank}/std*.log")) for rank in (0, 1)]
        texts = [[path.read_text() for path in each] for each in found]
        assert texts == [["an error\n", "loaded True 1\nsum 2.0\n"]] * 2
    else:
        assert ended.out.count("sum 2.0\n") == 2 and ended.out.count("loaded True") == 4


def test_workers_of_torchelastic_without_the_server(fork_server: ForkServer, tmp_path: Path) -> None:
    code = """
import sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    kill_server()
    sys.exit(5)
print("started again")
"""
    words = [*RUN, "--max-restarts", "1", "--preload", "json", script(tmp_path, KILL_SERVER + code)]
    ended = launch_forked(fork_server, tmp_path, *words)
    assert ended.code == 0 and ended.out == "started again\n"
    assert "--preload: the process that forks ranks has ended; from now on ranks start without it" in ended.err


def _await(found: Any) -> None:
    deadline = time.monotonic() + 30
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)
