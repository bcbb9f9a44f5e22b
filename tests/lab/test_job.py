"""`bagua lab run`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bagua.lab.main import main
from tests.lab.leftovers import within
from tests.lab.test_teardown import PACKAGE, spaces_below
from tests.lines import read_line

pytestmark = pytest.mark.usefixtures("namespaces")


def test_output_codes_and_report(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    code = main(
        [
            *("run", "--hosts", "3", "--bandwidth", "1gbit", "--latency", "1ms", "--report", str(report)),
            *("--", "sh", "-c", 'echo "rank $NODE_RANK of $NNODES"; printf last; exit $((NODE_RANK * 2))'),
        ]
    )
    out, _ = capfd.readouterr()
    assert code in (2, 4), "the first that failed"
    assert sorted(out.splitlines()) == sorted(
        line for i in range(3) for line in (f"[host{i}] rank {i} of 3", f"[host{i}] last")
    )
    assert len(json.loads(report.read_text())["hosts"]) == 3


def test_hosts_run_on_when_nobody_reads_their_output(tmp_path: Path) -> None:
    script = f"for i in 1 2 3 4 5 6; do echo line; sleep 0.1; done; echo whole > {tmp_path}/ended"
    words = [sys.executable, "-m", "bagua", "lab", "run", "--hosts", "1", "--", "sh", "-ec", script]
    with subprocess.Popen(words, cwd=PACKAGE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        assert job.stdout is not None and job.stderr is not None
        assert job.stdout.readline() == b"[host0] line\n"
        job.stdout.close()
        assert b"Traceback" not in job.stderr.read()
    assert (tmp_path / "ended").read_text() == "whole\n"


def test_one_hosts_failure_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    script = 'trap "echo asked; exit 0" TERM; [ $NODE_RANK = 1 ] && exit 3; while :; do sleep 0.1; done'
    assert main(["run", "--hosts", "2", "--grace", "0.5", "--only", "0", "--", "sh", "-c", script]) == 3
    out, err = capfd.readouterr()
    assert out == "asked\n"
    assert "stopping the others" in err


def test_events_and_timeout(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = (
        f"echo run >> {tmp_path}/$NODE_RANK; [ $NODE_RANK = 0 ] && exec sleep 3; [ -e {tmp_path}/back ] && exit 0; "
    )
    script += f"touch {tmp_path}/back; sleep 100"
    events = ["--at", "1500ms:kill:1", "--at", "2s:start:1", "--at", "100ms:slow:1=0.5", "--at", "0s:cut:0"]
    assert main(["run", "--hosts", "2", "--keep-going", *events, "--", "sh", "-c", script]) == 0
    assert (tmp_path / "1").read_text() == "run\nrun\n" and (tmp_path / "0").read_text() == "run\n"
    assert "[lab] kill host1" in capfd.readouterr().err
    assert main(["run", "--hosts", "1", "--timeout", "0.3", "--grace", "0.2", "--", "sleep", "100"]) == 124


def test_a_host_is_not_started_for_a_job_that_has_ended(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It would wait there for the others."""
    script = f"echo run >> {tmp_path}/$NODE_RANK; [ $NODE_RANK = 0 ] && exec sleep 1; exec sleep 100"
    words = ["--keep-going", "--at", "500ms:kill:1", "--at", "30s:start:1", "--timeout", "25", "--", "sh", "-c", script]
    assert main(["run", "--hosts", "2", *words]) == 0
    assert (tmp_path / "1").read_text() == "run\n"
    assert "[lab] host1: not started again, the job has ended" in capfd.readouterr().err


def test_a_job_of_which_no_host_has_ended_well_waits_for_those_that_come_back(tmp_path: Path) -> None:
    script = f"echo run >> {tmp_path}/$NODE_RANK; [ $(wc -l < {tmp_path}/$NODE_RANK) = 2 ] || exec sleep 100"
    events = ["--at", "300ms:kill:0", "--at", "1s:start:0"]
    assert main(["run", "--hosts", "1", "--keep-going", *events, "--timeout", "25", "--", "sh", "-c", script]) == 0
    assert (tmp_path / "0").read_text() == "run\nrun\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "2"], "no COMMAND"),
        (["--bandwidth", "fast", "--", "true"], "bandwidth must be a rate"),
        (["--latency", "5", "--", "true"], "latency must be a duration"),
        (["--loss", "2", "--", "true"], "loss must be a probability"),
        (["--hosts", "0", "--", "true"], "hosts must be 1 to 64"),
        (["--only", "2", "--", "true"], "--only must be a host"),
        (["--at", "5s:explode:0", "--", "true"], "the action must be one of"),
        (["--at", "5s:kill-rank:0", "--", "true"], "kill-rank needs =VALUE"),
        (["--at", "5s:kill-rank:0=x", "--", "true"], "kill-rank needs a local rank"),
        (["--nproc-per-node", "2", "--", "true"], "nproc_per_node needs"),
    ],
)
def test_wrong_arguments(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("ignored", [False, True], ids=["", "ignored"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(number: int, code: int, ignored: bool) -> None:
    """Also where the shell has started it with the signals ignored, as it does with `command &` in a script."""
    boot = (
        f"import sys, types; package = types.ModuleType('bagua'); package.__path__ = [{PACKAGE!r}]; "
        "sys.modules['bagua'] = package; from bagua.lab.main import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["run", "--hosts", "2", "--", "sh", "-c", "echo up; sleep 1000"]
    command = [sys.executable, "-I", "-S", "-c", boot, *words]
    process = subprocess.Popen(ignoring(command) if ignored else command, stdout=subprocess.PIPE, text=True)
    try:
        assert read_line(process.stdout, "host that is up").endswith("up\n")
        spaces = spaces_below(process.pid)
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate(timeout=60)
    assert process.returncode == code
    assert within(60, lambda: not any(_in(pid, spaces) for pid in os.listdir("/proc") if pid.isdigit()))


def ignoring(command: list[str]) -> list[str]:
    """The command, started with the signals ignored that end it."""
    return ["sh", "-c", 'trap "" INT HUP TERM; exec "$@"', "sh", *command]


def test_says_what_is_emulated_before_anything_runs(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--hosts", "2", "--bandwidth", "1gbit", "--latency", "2ms", "--loss", "0.01", "--seed", "3"]
    assert main([*words, "--", "sh", "-c", "echo up >&2"]) == 0
    said, starting, *rest = capfd.readouterr().err.splitlines()
    assert said.startswith("[lab] 2 hosts; link of each: bandwidth 1gbit, latency 2ms, loss 0.01; wire ")
    assert starting == "[lab] starting on each host: sh -c 'echo up >&2'"
    assert sorted(rest) == ["[host0] up", "[host1] up"]


def test_says_that_a_silent_job_runs(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagua.lab.job._SILENCE_S", 0.1)
    assert main(["run", "--hosts", "2", "--", "sh", "-c", "sleep 1"]) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "2 hosts run" in line]
    assert lines and all("MB sent; no output for a while" in line for line in lines)
    assert len(lines) <= 4, "less and less often"


def _in(pid: str, spaces: set[str]) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/net") in spaces
    except OSError:
        return False
