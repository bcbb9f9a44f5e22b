"""Having NCCL load it, from Python and from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bagua.net
from bagua.cli.main import main as bagua_main
from bagua.net import plugin
from bagua.net.diagnosis import diagnose, table_for
from bagua.net.driver import run_here

ROOT = Path(__file__).parents[2]


def test_environment() -> None:
    path = bagua.net.plugin_path()
    assert path.name == "libnccl-net-bagua.so" and path.is_absolute()
    assert bagua.net.environment({}) == {"NCCL_NET_PLUGIN": str(path), "LD_LIBRARY_PATH": str(path.parent)}
    again = bagua.net.environment({"NCCL_NET_PLUGIN": str(path), "LD_LIBRARY_PATH": f"/a:{path.parent}"})
    assert again == {"NCCL_NET_PLUGIN": str(path), "LD_LIBRARY_PATH": f"/a:{path.parent}"}
    named = bagua.net.environment({"NCCL_NET_PLUGIN": "bagua", "LD_LIBRARY_PATH": "/a"})
    assert named == {"NCCL_NET_PLUGIN": "bagua", "LD_LIBRARY_PATH": f"{path.parent}:/a"}
    with pytest.raises(ValueError, match="NCCL_NET_PLUGIN=ofi is set already"):
        bagua.net.environment({"NCCL_NET_PLUGIN": "ofi"})


def test_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plugin, "_LIBRARY", tmp_path / "libnccl-net-bagua.so")
    with pytest.raises(RuntimeError, match="was not built.*install a C\\+\\+17 compiler"):
        bagua.net.enable()
    assert "not built" in diagnose((2, 28, 9), {}).reason


def test_enable_works_before_torch_is_imported() -> None:
    code = (
        "import sys, types; package = types.ModuleType('bagua'); package.__path__ = [sys.argv[1]]; "
        "sys.modules['bagua'] = package; import os, bagua.net; print(bagua.net.enable()); "
        "print(os.environ['NCCL_NET_PLUGIN']); print('torch' in sys.modules)"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("NCCL")}
    out = subprocess.check_output([sys.executable, "-c", code, str(ROOT / "bagua")], text=True, timeout=60, env=env)
    path = str(bagua.net.plugin_path())
    assert out.split() == [path, path, "False"]


def test_tables_of_nccl_versions() -> None:
    versions = [
        (2, 17, 1),
        (2, 18, 5),
        (2, 19, 3),
        (2, 21, 5),
        (2, 25, 1),
        (2, 27, 5),
        (2, 28, 9),
        (2, 29, 7),
        (2, 30, 7),
    ]
    assert [table_for(version) for version in versions] == [None, 6, 6, 8, 8, 10, 11, 11, 12]


@pytest.mark.parametrize(
    ("nccl", "env", "says"),
    [
        ((2, 28, 9), {}, "NCCL_NET_PLUGIN is not set"),
        ((2, 28, 9), {"NCCL_NET_PLUGIN": "none"}, "names another plugin"),
        ((2, 28, 9), {"NCCL_NET_PLUGIN": "/x/libnccl-net.so"}, "names another plugin"),
        ((2, 28, 9), {"NCCL_NET_PLUGIN": "bagua"}, "is not in LD_LIBRARY_PATH"),
        ((2, 28, 9), {"NCCL_NET_PLUGIN": "PATH", "NCCL_NET": "Socket"}, "NCCL_NET=Socket forces another"),
        ((2, 17, 1), {"NCCL_NET_PLUGIN": "PATH"}, "2.17.1 is too old"),
        ((2, 20, 5), {"NCCL_NET_PLUGIN": "PATH"}, "2.20.5 takes no path"),
        (None, {"NCCL_NET_PLUGIN": "PATH"}, "no NCCL here"),
    ],
)
def test_why_it_would_not_be_loaded(nccl: tuple[int, ...] | None, env: dict[str, str], says: str) -> None:
    path = str(bagua.net.plugin_path())
    verdict = diagnose(nccl, {name: value.replace("PATH", path) for name, value in env.items()})
    assert not verdict.loads and says in verdict.reason


def test_when_it_would_be_loaded() -> None:
    verdict = diagnose((2, 29, 7), {"NCCL_NET": "BAGUA", **bagua.net.environment({})})
    assert verdict.loads and "table v11" in verdict.reason
    folder = str(bagua.net.plugin_path().parent)
    assert diagnose((2, 18, 1), {"NCCL_NET_PLUGIN": "bagua", "LD_LIBRARY_PATH": folder}).loads


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    assert bagua_main(["doctor", "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert found["bagua_net"]["interfaces"] == ["lo"]
    assert not found["bagua_net"]["would_load"] and "is not set" in found["bagua_net"]["reason"]
    assert bagua_main(["doctor"]) in (0, 1)
    assert "NCCL would load Bagua-Net: no: NCCL_NET_PLUGIN is not set" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"NCCL_SOCKET_IFNAME": "lo"}, ["lo"]),
        ({"NCCL_SOCKET_IFNAME": "=lo"}, ["lo"]),
        ({"NCCL_SOCKET_IFNAME": "=l"}, None),
        ({"NCCL_SOCKET_IFNAME": "nothere,l"}, ["lo"]),
        ({"NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_FAMILY": "AF_INET"}, ["lo"]),
        ({"NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_FAMILY": "AF_INET6"}, None),
        ({"NCCL_SOCKET_IFNAME": "", "NCCL_COMM_ID": "127.0.0.1:1234"}, ["lo"]),
    ],
)
def test_interfaces_by_nccls_rules(env: dict[str, str], names: list[str] | None) -> None:
    ended = run_here(mode="facts", env=env)
    if names is None:
        assert ended.status == 3 and ended.results[-1] == {"error": "init", "result": 2}
        assert "no network interface to use" in ended.errors
    else:
        assert [device["name"] for device in ended.results[-1]["devices"]] == names


def test_all_but_some_interfaces() -> None:
    ended = run_here(mode="facts", env={"NCCL_SOCKET_IFNAME": "^lo"})
    assert ended.status == 3 or "lo" not in [device["name"] for device in ended.results[-1]["devices"]]


def test_the_launcher_sets_it_up(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    # One write: ranks share the stream.
    shown = "' '.join(['plugin', os.environ['NCCL_NET_PLUGIN'], os.environ['LD_LIBRARY_PATH']]) + chr(10)"
    script.write_text(f"import os, sys\nsys.stdout.write({shown})\n")
    words = ["-m", "bagua.cli.main", "run", "--enable-bagua-net", "--nproc-per-node", "2", str(script)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("NCCL")}
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**env, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    path = bagua.net.plugin_path()
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("plugin")]
    assert len(lines) == 2 and all(words[1] == str(path) and str(path.parent) in words[2] for words in lines)
    import torch

    assert ("NCCL is not used" in done.stderr) == (not torch.cuda.is_available())


def test_the_launcher_refuses_another_plugin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_NET_PLUGIN", "ofi")
    with pytest.raises(SystemExit) as ended:
        bagua_main(["run", "--enable-bagua-net", "x.py"])
    assert ended.value.code == 2
    assert "--enable-bagua-net: NCCL_NET_PLUGIN=ofi is set already" in capsys.readouterr().err
