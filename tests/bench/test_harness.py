"""The whole harness, on two processes of this machine, with settings that make it short."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from bagua.bench import baselines, hosts
from bagua.bench.hosts import LocalHosts
from bagua.bench.main import main
from bagua.bench.measure import Job
from bagua.bench.runner import Outcome, run_cases
from bagua.bench.tradeoff import parse_conditions
from bagua.bench.wire import run_primitives
from tests.fork_server import ForkServer
from tests.forked_process import ForkedProcess

pytestmark = pytest.mark.process


@pytest.fixture(scope="module", autouse=True)
def _forked_ranks(fork_server: ForkServer) -> Iterator[None]:
    """Ranks that import torch each cost seconds of processor time."""

    def start(argv: Sequence[str], env: dict[str, str], stdout: IO[str], **_: Any) -> ForkedProcess:
        log = Path(f"/proc/{os.getpid()}/fd/{stdout.fileno()}")
        return ForkedProcess(fork_server, argv, env, Path.cwd(), (log, log))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "subprocess", SimpleNamespace(Popen=start))
        yield


SHORT = ["--local", "--hosts", "2", "--model", "layers25m/10", "--compute-ms", "30", "--steps", "2", "--budget-s", "1"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results file of a few contenders."""
    folder = tmp_path_factory.mktemp("bench")
    file = folder / "out.json"
    names = ["--algorithms", "ddp,qadam_1bit,async"]
    profile = ["--profile", "qadam_1bit", "--profile-dir", str(folder / "profile")]
    assert main(["tradeoff", *SHORT, *names, *profile, "--json", str(file)]) == 0
    return file


def test_tradeoff(measured: Path) -> None:
    report = json.loads(measured.read_text())
    assert report["kind"] == "tradeoff"
    assert report["settings"]["conditions"][0]["bits_per_s"] is None
    assert report["settings"]["entrants"] == ["ddp", "qadam_1bit", "async"]  # the keys of earlier files
    assert "contender" not in report["rows"][0] and "contenders" not in report["settings"]
    rows: dict[str, dict[str, Any]] = {row["entrant"]: row for row in report["rows"]}
    assert list(rows) == ["off", "ddp", "qadam_1bit", "async"]
    for row in rows.values():
        assert not row["error"]
        assert row["step_ms"] >= 30 and len(row["rank_ms"]) == 2
        assert row["compute_ms"] >= 30 and row["bound_ms"] >= 30
    assert rows["ddp"]["ratio_to_ddp"] == pytest.approx(1)
    # The timed steps are those in 1 bit: 2 N / 8 bytes would be 0.6 MB, an exact step 10 MB.
    assert rows["qadam_1bit"]["bytes_from"] == "library"
    assert 0.3e6 < rows["qadam_1bit"]["bytes_per_host"] < 0.4e6
    assert rows["ddp"]["bytes_from"] == "formula"


def test_timeline(measured: Path) -> None:
    events = json.loads((measured.parent / "profile" / "qadam_1bit.trace.json").read_text())["traceEvents"]
    runs = [event for event in events if str(event.get("name", "")).startswith("bagua::run")]
    launches = [event for event in events if str(event.get("name", "")).startswith("bagua::launch")]
    assert runs and launches
    assert {event["tid"] for event in runs}.isdisjoint({event["tid"] for event in launches})


def test_report(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(measured), "--markdown", str(tmp_path / "table.md")]) == 0
    text = (tmp_path / "table.md").read_text()
    assert "| qadam_1bit |" in text and "2,509,056 fp32 elements" in text
    capsys.readouterr()


BROKEN = """
import os
if os.environ.get("BAGUA_BENCH_ADDRESS"):
    import time, torch.distributed as dist
    from bagua.bench import baselines, hosts
    def broken(model):
        if dist.get_rank() == 1:
            raise RuntimeError("this one is broken")
        dist.barrier()
    def stuck(model):
        time.sleep(600)
    baselines.ddp_fp16, baselines.ddp_bf16 = broken, stuck
"""


def run_broken(
    names: tuple[str, ...], timeout_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Outcome]:
    """Run `names`, of which ddp_fp16 raises on rank 1 and leaves rank 0 waiting, and ddp_bf16 never ends."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told: list[Outcome] = []
    job = Job("layers25m/10", 10, 0.5, 2, 0.1, 0.1, True, 60, tuple(enumerate(names)), False)
    outcomes = run_cases(lambda: LocalHosts(2), 2, job, timeout_s, told.append)
    assert outcomes == told
    assert [outcome.name for outcome in outcomes] == list(names)
    return outcomes


def test_a_case_that_fails_is_a_row_and_the_rest_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, after = run_broken(("ddp_fp16", "off"), 60.0, tmp_path, monkeypatch)
    assert failed.error == "rank 1: RuntimeError: this one is broken"
    assert not after.error and len(after.ranks) == 2


@pytest.mark.slow
def test_a_case_that_hangs_is_a_row_and_the_rest_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, stuck, after = run_broken(("off", "ddp_bf16", "off"), 10.0, tmp_path, monkeypatch)
    assert stuck.error == "not finished within 10 s"
    assert not first.error and not after.error and len(after.ranks) == 2


def test_primitives(tmp_path: Path) -> None:
    file = tmp_path / "wire.json"
    assert main(["primitives", "--quick", "--local", "--hosts", "2", "--sizes", "4096,65536", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len({row["operation"] for row in rows}) == 10
    assert all(not row["error"] and row["measured_ms"] > 0 for row in rows)
    sent = {(row["operation"], row["size_bytes"]): row["bytes_per_host"] for row in rows}
    assert sent["torch all_reduce", 65536] == 65536  # 2 (R-1)/R
    assert sent["all_to_all_rows", 65536] == 32768
    assert sent["swap with one peer", 65536] == 65536


def test_primitives_keep_each_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagua.bench.wire.run_cases", lambda make, hosts, job, timeout_s, say: None)
    kept: list[str] = []
    conditions = parse_conditions("1gbit/0ms,100mbit/1ms")
    run_primitives(conditions, 2, True, told=lambda text: None, keep=lambda report: kept.append(report["kind"]))
    assert kept == ["primitives"] * 2


def test_what_is_not_installed_says_so() -> None:
    assert baselines.missing("torch") == ""
    assert baselines.missing("no_such_package.torch") == "no_such_package is not installed"
