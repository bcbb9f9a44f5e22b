"""Whatever ends the process that made a cluster, or the cluster's own ones: nothing stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import bagua
from tests.lab.leftovers import assert_nothing_left, descendants, devices, supervisors, within
from tests.lines import read_line

PACKAGE = str(Path(bagua.__file__).parent)
# Without the package's __init__, which would import torch.
PARENT = f"""
import sys, time, types
package = types.ModuleType("bagua"); package.__path__ = [{PACKAGE!r}]; sys.modules["bagua"] = package
from bagua.lab import Cluster, Link
cluster = Cluster(2, Link("1gbit", sys.argv[2]), mode=sys.argv[1])
for host in cluster.hosts:
    host.popen(["sh", "-c", "trap '' TERM HUP INT; setsid sleep 1000 & sleep 1000; sleep 1000"])
time.sleep(0.3)
print(cluster.folder, cluster.wire, flush=True)
time.sleep(1000)
"""


def start_parent(
    mode: str = "namespaces", python: str = sys.executable, latency: str = "1ms", **options: object
) -> tuple:
    process = subprocess.Popen(
        [python, "-I", "-S", "-B", "-c", PARENT, mode, latency],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # pyright: ignore
    )
    assert process.stdout is not None and process.stderr is not None
    words = read_line(process.stdout, "cluster").split()
    if not words:
        error = process.stderr.read()
        process.communicate(timeout=60)
        pytest.fail(f"no cluster: {error}")
    return process, Path(words[0]), words[1]


def spaces_below(pid: int) -> set[str]:
    return {os.readlink(f"/proc/{one}/ns/net") for one in descendants(pid)} - {os.readlink("/proc/self/ns/net")}


def reap(process: subprocess.Popen) -> None:
    process.communicate(timeout=60)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_parent_is_killed(number: int) -> None:
    before = devices()
    process, folder, _ = start_parent()
    spaces = spaces_below(process.pid)
    assert len(spaces) == 3
    process.send_signal(number)
    reap(process)
    assert_nothing_left(spaces, folder)
    assert devices() == before


@pytest.mark.usefixtures("namespaces")
def test_supervisor_is_killed() -> None:
    process, folder, _ = start_parent()
    spaces = spaces_below(process.pid)
    (supervisor,) = supervisor_of(folder)
    os.kill(supervisor, signal.SIGKILL)
    try:
        shutil.rmtree(folder)  # nobody is left to do it but the parent, which still runs
        assert_nothing_left(spaces, folder)
    finally:
        process.kill()
        reap(process)


def supervisor_of(folder: Path) -> list[int]:
    """Holders and relay have the same command line; the supervisor is the one above them."""
    found = supervisors(folder)
    return [
        pid for pid in found if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) not in found
    ]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_pacing_mode_ends_with_its_parent(number: int) -> None:
    process, folder, wire = start_parent("pacing")
    assert wire == "loopback"
    assert within(60, lambda: len(descendants(process.pid)) > 6)
    below = descendants(process.pid)[1:]
    process.send_signal(number)
    reap(process)
    assert within(60, lambda: not any(_runs(pid) for pid in below))
    assert within(60, lambda: not folder.exists())


def _runs(pid: int) -> bool:
    try:
        return "sleep" in Path(f"/proc/{pid}/cmdline").read_text() and Path(f"/proc/{pid}/stat").read_text() != ""
    except OSError:
        return False


@pytest.mark.parametrize(("latency", "wires"), [("1ms", ("tap", "packet")), ("0ms", ("tbf", "tap", "packet"))])
def test_unprivileged_user_namespace(latency: str, wires: tuple[str, ...]) -> None:
    if os.geteuid() != 0:
        process, folder, wire = start_parent(latency=latency)
    else:
        python, why = _python_for_everyone()
        if python is None:
            pytest.skip(why)
        ids = {"user": 65534, "group": 65534, "extra_groups": []}
        process, folder, wire = start_parent(python=python, latency=latency, cwd="/", **ids)
    assert wire in wires
    spaces = spaces_below(process.pid)
    assert len(spaces) == 3
    process.kill()
    reap(process)
    assert_nothing_left(spaces, folder)


def _python_for_everyone() -> tuple[str | None, str]:
    """An interpreter, 3.10 or newer, that user 65534 can run with this package and that may make user namespaces."""
    check = (
        "import os, sys, ctypes; assert sys.version_info >= (3, 10); "
        f"os.listdir({PACKAGE!r}); sys.exit(ctypes.CDLL(None).unshare(0x10000000 | 0x40000000) and 3)"
    )
    for python in (sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin")):
        if python is None:
            continue
        try:
            done = subprocess.run(
                [python, "-I", "-S", "-c", check],
                user=65534,
                group=65534,
                extra_groups=[],
                capture_output=True,
                cwd="/",
            )
        except OSError:
            continue
        if done.returncode == 3:
            return None, "the kernel allows no unprivileged user namespaces"
        if done.returncode == 0:
            return python, ""
    return None, "no interpreter and package that an unprivileged user can read"
