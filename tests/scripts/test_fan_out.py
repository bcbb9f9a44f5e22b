"""Nodes on a real ssh server: what reaches them, what comes back, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bagua.script.connection import NodeSpec, SshOptions
from bagua.script.fan_out import FanOut
from bagua.script.hosts import parse_hosts
from tests.scripts.ssh_server import SshServer

ROOT = Path(__file__).resolve().parents[2]
# Writes its pid and that of a child in a session of its own, which ignores SIGTERM, and waits.
STAY = """
import os, signal, subprocess, sys, time
program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
child = [sys.executable, "-S", "-c", program]
left = subprocess.Popen(child, start_new_session=True).pid
open(sys.argv[1] + ".part", "w").write(f"{os.getpid()} {left}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
print("stays", flush=True)
time.sleep(300)
"""


def spec(tmp: Path, program: str, *words: str, **options: Any) -> NodeSpec:
    argv = [sys.executable, "-S", "-c", program, *words]
    return NodeSpec(argv, str(tmp), **{"python": sys.executable, "grace_s": 5.0, **options})


def fan_out(server: SshServer, specs: Sequence[NodeSpec], config: str | None = None, **options: Any) -> FanOut:
    hosts = parse_hosts("127.0.0.1,localhost", server.port)[: len(specs)]
    return FanOut(hosts, specs, SshOptions(config=config or server.config), **options)


def pids(*files: Path, timeout_s: float = 30) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, "the nodes did not start"
        time.sleep(0.02)
    return [int(word) for file in files for word in file.read_text().split()]


def wait_until_gone(numbers: Sequence[int], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while left := [number for number in numbers if runs(number)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_words_and_variables_arrive_as_they_are(
    server: SshServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = ["two words", "$(touch /nowhere)", "'\"`;|&\n\\", "-x", "", "ü"]
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['ODD'], os.getcwd()]))"
    show += "; print('to stderr', file=sys.stderr)"
    place = tmp_path / "a b;'$(x)"
    place.mkdir()
    specs = [spec(place, show, *odd, str(number), env={"ODD": "\n".join(odd)}) for number in range(2)]
    assert fan_out(server, specs).run() == 0
    out, err = capsys.readouterr()
    got = {line[: line.index("]") + 1]: json.loads(line[line.index("]") + 2 :]) for line in out.splitlines()}
    assert got == {
        "[127.0.0.1]": [[*odd, "0"], "\n".join(odd), str(place)],
        "[localhost]": [[*odd, "1"], "\n".join(odd), str(place)],
    }
    assert sorted(err.splitlines()) == ["[127.0.0.1] to stderr", "[localhost] to stderr"]


def test_a_failing_host_ends_the_others(server: SshServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pids"
    fail = f"import os, sys, time\nwhile not os.path.exists({str(file)!r}): time.sleep(0.02)\nsys.exit(7)"
    assert fan_out(server, [spec(tmp_path, STAY, str(file)), spec(tmp_path, fail)], grace_s=0.2).run() == 7
    err = capsys.readouterr().err
    assert "baguarun: host localhost (node 1): exit code 7" in err
    assert "baguarun: ending the other hosts: 127.0.0.1" in err
    wait_until_gone(pids(file))


def test_a_node_without_an_end_is_killed(server: SshServer, tmp_path: Path) -> None:
    """It ignores SIGTERM."""
    file = tmp_path / "pids"
    stay = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAY
    fail = f"import os, sys, time\nwhile not os.path.exists({str(file)!r}): time.sleep(0.02)\nsys.exit(1)"
    started = time.monotonic()
    specs = [spec(tmp_path, stay, str(file), grace_s=0.5), spec(tmp_path, fail)]
    assert fan_out(server, specs, grace_s=0.2).run() == 1
    assert time.monotonic() - started < 100
    wait_until_gone(pids(file))


def test_what_the_command_leaves_behind_is_ended(server: SshServer, tmp_path: Path) -> None:
    """And the connection does not wait for it, although it holds the output open."""
    file = tmp_path / "pids"
    assert fan_out(server, [spec(tmp_path, STAY.replace("time.sleep(300)\n", "pass\n"), str(file))]).run() == 0
    wait_until_gone(pids(file), 5)


def test_nothing_is_left_when_the_job_is_killed(server: SshServer, tmp_path: Path) -> None:
    files = [tmp_path / "pids0", tmp_path / "pids1"]
    program = f"""
import sys
from tests.scripts.test_fan_out import STAY, fan_out, spec
from tests.scripts.ssh_server import SshServer
from pathlib import Path
tmp = Path({str(tmp_path)!r})
server = SshServer(Path({str(server.folder)!r}), {server.port}, None)
fan_out(server, [spec(tmp, STAY, str(tmp / f"pids{{n}}")) for n in range(2)]).run()
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", program], env=env, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        numbers = pids(*files, timeout_s=60)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until_gone(numbers)


def failed(server: SshServer, tmp: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    options = {"config": changes.pop("config", None), "start_timeout_s": changes.pop("start_timeout_s", 30.0)}
    node = spec(tmp, changes.pop("program", "print('never')"), **changes)
    assert fan_out(server, [node], **options).run() not in (0, 255)
    return capsys.readouterr().err


def test_a_wrong_key(server: SshServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = failed(server, tmp_path, capsys, config=server.stranger)
    assert re.search(r"baguarun: host 127.0.0.1 \(node 0\): ssh could not connect: .*Permission denied", err)


def test_an_unknown_server(server: SshServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = failed(server, tmp_path, capsys, config=server.wary)
    assert re.search(r"host 127.0.0.1 \(node 0\): ssh could not connect: .*Host key verification failed", err)


def test_an_interpreter_that_is_not_there(
    server: SshServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = failed(server, tmp_path, capsys, python="/no/such/python")
    assert "host 127.0.0.1 (node 0): the ranks could not be started, exit code 127" in err
    assert "is /no/such/python there? --python names another interpreter" in err


def test_a_directory_that_is_not_there(server: SshServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = failed(server, tmp_path / "missing", capsys)
    assert re.search(r"\[127.0.0.1\] cannot start .* in .*/missing: .*No such file", err)
    assert "host 127.0.0.1 (node 0): exit code 2" in err


def test_a_host_that_never_answers(server: SshServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nsleep 5\n")
    slow.chmod(0o755)
    err = failed(server, tmp_path, capsys, python=str(slow), start_timeout_s=1.0)
    assert "host 127.0.0.1 (node 0): no answer within 1 s" in err


def test_a_lost_connection(server: SshServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server's own process of this connection is killed, once it has passed on that the node has begun."""
    up = "import os, time\ntime.sleep(2)\npid = os.getppid()\nnode = open(f'/proc/{pid}/stat').read()\n"
    up += "server = int(node.rpartition(')')[2].split()[1])\nos.kill(server, 9)\ntime.sleep(300)"
    err = failed(server, tmp_path, capsys, program=up)
    assert "host 127.0.0.1 (node 0): the connection was lost" in err
