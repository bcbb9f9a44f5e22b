"""The whole program on a real ssh server, and its arguments."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bagua.script import baguarun
from tests.ports import free_port
from tests.scripts.ssh_server import SshServer
from tests.scripts.test_fan_out import pids, wait_until_gone

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import bagua
bagua.init_process_group()
total = torch.tensor([float(os.environ["VALUE"])])
dist.all_reduce(total)
sys.stdout.write(f"rank {dist.get_rank()} node {os.environ['GROUP_RANK']} sum {total.item():g} {sys.argv[1:]}\\n")
"""
WAIT = """
import os, sys, time
file = sys.argv[1] + os.environ["RANK"]
open(file + ".part", "w").write(str(os.getpid()))
os.rename(file + ".part", file)
time.sleep(300)
"""


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BAGUA_NODE_DOMAIN_NAMES", "BAGUA_SSH_PORT"):
        monkeypatch.delenv(name, raising=False)


def job(server: SshServer, script: Path, *words: str) -> list[str]:
    script.parent.mkdir(exist_ok=True)
    flags = ["--host_list", server.hosts(), "--ssh_port", str(server.port), "-F", server.config]
    flags += ["--nproc_per_node", "1", "--master_port", str(free_port()), "--workdir", str(script.parent)]
    return [*flags, "-x", f"PYTHONPATH={ROOT}", "-x", "OMP_NUM_THREADS=1", *words]


def test_a_job_on_two_hosts(
    server: SshServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "the scripts" / "train it.py"
    monkeypatch.setenv("VALUE", "21")
    flags = job(server, script, "-x", "VALUE")
    script.write_text(SCRIPT)
    assert baguarun.main([*flags, script.name, "--lr", "$(x) 'y'", "-x"]) == 0
    out = capsys.readouterr().out.splitlines()
    said = "sum 42 " + str(["--lr", "$(x) 'y'", "-x"])
    assert sorted(out) == [f"[127.0.0.1] rank 0 node 0 {said}", f"[localhost] rank 1 node 1 {said}"]


@pytest.mark.slow  # signals of a launcher: tests/launch
def test_ctrl_c_ends_every_rank(server: SshServer, tmp_path: Path) -> None:
    script, ready = tmp_path / "wait.py", tmp_path / "pid"
    script.write_text(WAIT)
    words = [*job(server, script), str(script), str(ready)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "bagua.script.baguarun", *words]
    process = subprocess.Popen(command, env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        numbers = pids(Path(f"{ready}0"), Path(f"{ready}1"), timeout_s=90)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert "interrupted; all hosts were told to stop" in err
    wait_until_gone(numbers, 5)


def test_a_host_that_cannot_be_reached(server: SshServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other one is ended."""
    closed = free_port()
    words = ["--host_list", f"127.0.0.1:{server.port},localhost:{closed}", "-F", server.config]
    words += ["-x", f"PYTHONPATH={ROOT}", "--nproc_per_node", "1", "--workdir", str(tmp_path)]
    words += ["--grace", "1", "--no_python", "sleep", "300"]  # its launcher waits for the other in compiled code
    assert baguarun.main(words) == 1
    err = capsys.readouterr().err
    assert re.search(rf"baguarun: host localhost:{closed} \(node 1\): ssh could not connect: .*refused", err)
    assert f"ending the other hosts: 127.0.0.1:{server.port}" in err


def test_without_ssh(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert baguarun.main(["--host_list", "a", "--nproc_per_node", "1", "x.py"]) == 1
    assert "ssh is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--host_list or BAGUA_NODE_DOMAIN_NAMES must name the hosts"),
        (["--host_list", "a;b"], "host 'a;b': expected a name"),
        (["--host_list", "localhost,10.0.0.2"], "other hosts cannot reach localhost"),
        (["--host_list", "a", "-x", "NOT_SET_ANYWHERE"], "-x NOT_SET_ANYWHERE: it is not set here"),
        (["--host_list", "a", "-x", "A B=1"], "'A B' is not a variable name"),
        (["--host_list", "a", "--ssh_port", "0"], "must be a number from 1 to 65535"),
        (["--host_list", "a", "--nproc_per_node", "two"], "must be a number of ranks"),
    ],
)
def test_refusals(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        baguarun.main(["--nproc_per_node", "1", *words, "x.py"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_original_s_environment_and_both_spellings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_NODE_DOMAIN_NAMES", "a,b:3")
    monkeypatch.setenv("BAGUA_SSH_PORT", "22")
    seen: list[object] = []

    class Seen:
        def __init__(self, *args: object) -> None:
            seen.extend(args)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(baguarun, "FanOut", Seen)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert baguarun.main(["--nproc-per-node=2", "--master-port=5", "--no-python", "prog", "--nproc_per_node", "9"]) == 0
    hosts, specs, options = seen
    assert [(host.name, host.port) for host in hosts] == [("a", 22), ("b", 3)]  # type: ignore[attr-defined]
    words = specs[1].argv  # type: ignore[index]
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--master-addr") + 1] == "a"
    assert words[-4:] == ["--no-python", "prog", "--nproc_per_node", "9"]
    argv = options.argv(hosts[0], "command")  # type: ignore[attr-defined,index]
    assert argv[0] == "/bin/ssh" and argv[-3:] == ["--", "a", "command"]
    assert "BatchMode=yes" in argv and argv[argv.index("-p") + 1] == "22"
