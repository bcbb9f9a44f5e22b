"""`bagua doctor --cluster` with real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagua.cli.main import main
from tests.launch.launching import RUN, Launcher, launch
from tests.ports import free_port


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        ([], {}, "--cluster: RANK is not set; start it on each host with: bagua run --nnodes N "),
        (["--model", "vgg17"], {}, "model: 'vgg17' is unknown"),
        (["--compute-ms", "-1"], {}, "--compute-ms: expected milliseconds >= 0"),
        (["--timeout", "0"], {}, "--timeout: expected seconds > 0"),
        (["--json", "/nowhere/report.json"], {}, "--json: /nowhere/report.json: no such directory"),
        ([], {"RANK": "x"}, "RANK: expected an integer, got 'x'"),
        ([], {"RANK": "2"}, "RANK: expected 0 to 1 (WORLD_SIZE 2), got 2"),
    ],
    ids=["no launcher", "model", "compute", "timeout", "json", "rank", "rank too large"],
)
def test_errors(
    words: list[str],
    env: dict[str, str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if env:
        for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", **env}.items():
            monkeypatch.setenv(name, value)
    assert main(["doctor", "--cluster", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bagua doctor: ") and said in line


@pytest.mark.process
def test_two_ranks(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    ended = launch(tmp_path, *RUN, "--nproc-per-node", "2", "-m", "bagua.doctor", "--json", str(report))
    found = json.loads(report.read_text())
    assert ended.code == int(any(each["wrong"] for each in found["findings"])), (ended.out, ended.err)
    (host,) = found["hosts"]
    assert host["ranks"] == [0, 1] and host["cores"] >= 1 and host["versions"]["torch"]
    assert {(each["source"], each["target"]) for each in found["links"]["within"]} == {(0, 1), (1, 0)}
    assert [each["optimizer"] for each in found["auto"]["predicted"]] == ["sgd", "adam"]
    assert ended.out.count("1 host(s), 2 rank(s)") == 1 and "predicted, not measured: 25m" in ended.out


@pytest.mark.process
@pytest.mark.slow
def test_two_hosts_of_which_one_does_not_come(tmp_path: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ("-m", "bagua.cli.main", "doctor", "--cluster", "--timeout", "1")
    ended = Launcher(tmp_path, words, env).wait()
    assert ended.code == 1
    assert "WRONG  host 1: no answer within 1 s from rank 1" in ended.out


@pytest.mark.process
@pytest.mark.slow
def test_a_host_that_nobody_serves(tmp_path: Path) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended = Launcher(tmp_path, ("-m", "bagua.cli.main", "doctor", "--cluster", "--timeout", "1"), env).wait()
    assert ended.code == 1 and "bagua doctor: rank 1 of 2: " in ended.err and env["MASTER_PORT"] in ended.err


@pytest.mark.process
@pytest.mark.slow
def test_a_host_without_the_interface_is_named(tmp_path: Path) -> None:
    port = str(free_port())
    started = []
    for rank, interface in enumerate(["lo", "missing0"]):
        folder = tmp_path / str(rank)
        folder.mkdir()
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_RANK": str(rank)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": interface}
        words = ("-m", "bagua.cli.main", "doctor", "--cluster", "--timeout", "4")
        started.append(Launcher(folder, words, env))
    first, second = (each.wait() for each in started)
    assert first.code == second.code == 1, (first, second)
    (line,) = [line for line in first.out.splitlines() if line.startswith("WRONG") and "missing0" in line]
    assert "#1: links could not be measured" in line and "GLOO_SOCKET_IFNAME" in line


@pytest.mark.process
@pytest.mark.slow
def test_two_hosts(tmp_path: Path) -> None:
    port = str(free_port())
    started = []
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank),
        }
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        words = ("-m", "bagua.cli.main", "doctor", "--cluster", "--json", str(folder / "report.json"))
        started.append(Launcher(folder, words, env))
    first, second = (each.wait() for each in started)
    found = json.loads((tmp_path / "0" / "report.json").read_text())
    assert first.code == second.code == int(any(each["wrong"] for each in found["findings"])), (first, second)
    assert second.out == "" and not (tmp_path / "1" / "report.json").exists()
    assert len(found["hosts"]) == len(found["clocks"]) == 2
    assert all(abs(each["seconds"]) <= each["error_s"] + 0.01 for each in found["clocks"]), "they share a clock"
    assert {(each["source"], each["target"]) for each in found["links"]["between"]} == {(0, 1), (1, 0)}
    assert "#0 -> " in first.out and " one way" in first.out
