"""The parts of `make gpu` run dry: without a GPU, tiny. That shows that they run, and what they leave behind."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.faults import check
from benchmarks.gpu.link import multi_process_service
from benchmarks.gpu.link_rank import ENTRANTS
from benchmarks.gpu.page import page, summary
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.record import Record, Skip
from benchmarks.gpu.suite import command, select
from benchmarks.gpu.trace import overlap_us, spans_by_stream
from tests.codecs.conftest import skip_if_interpreter_fails

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are imported
_HERE = [name for name in PARTS if name not in ("tests", "shared", "link", "faults")]  # they start processes


def dry(name: str, folder: Path) -> Record:
    """What a part finds without a GPU."""
    record = Record(name, True, folder / f"{name}.json")
    PARTS[name].run(record)
    return record


@pytest.mark.parametrize("name", _HERE)
def test_a_dry_part(name: str, tmp_path: Path) -> None:
    if name == "kernels" and importlib.util.find_spec("triton") is not None:
        skip_if_interpreter_fails()
    record = dry(name, tmp_path)
    record.save()
    found = json.loads(record.path.read_text()) if record.path is not None else {}
    assert found["status"] == "passed", [check for check in found["checks"] if check["status"] == "failed"]
    assert set(found) == {"part", "dry", "status", "reason", "seconds", "facts", "checks", "rows"}
    assert found["part"] == name and found["dry"] is True
    assert all({"name", "status", "detail", "seconds"} <= set(check) for check in found["checks"])
    assert all(check["detail"] for check in found["checks"] if check["status"] != "passed")
    assert f"## {name}: passed" in page([found], "today", "make gpu DRY=1")


@pytest.mark.process
@pytest.mark.parametrize("status", [0, 1])
def test_the_service_that_shares_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """A stand-in notes how it was called: the service is ended if it has begun."""
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(f'#!/bin/sh\n[ "$1" ] || read words\necho "$1$words" >> {tmp_path}/calls\nexit {status}\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    with multi_process_service() as env:
        assert bool(env) == (status == 0)
        assert all(Path(folder).is_dir() for folder in env.values())
    assert (tmp_path / "calls").read_text().split() == (["-d", "quit"] if status == 0 else ["-d"])
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))  # it runs already
    with multi_process_service() as env:
        assert not env


@pytest.mark.slow
@pytest.mark.lab
def test_step_times_on_an_emulated_network(tmp_path: Path) -> None:
    record = dry("link", tmp_path)
    (check,) = record.checks
    assert check["status"] == "passed" or "no emulated hosts" in check["detail"], check
    columns = {"condition", "network", "entrant", "step_ms", "least_ms", "most_ms", "steps", "speed_up"}
    assert all(set(row) == columns and row["step_ms"] > 0 for row in record.rows)
    assert check["status"] == "skipped" or len(record.rows) == len(ENTRANTS)


def test_what_ranks_say_that_lost_one() -> None:
    stayed = {"right": 0.96, "changes": [[0, 0, 0.3], [1, 0, 0.47], [0, 1, 0.08]]}
    returned = {"right": 0.95, "changes": [[0, 0, 0.5]]}
    assert check([stayed, stayed, returned]) == ([0.3, 0.47, 0.08] * 2, 0.95)
    for changes, right, message in (
        ([[0, 1, 0.1]], 0.9, "nobody was lost"),
        ([[1, 0, 0.1]], 0.9, "nobody joined"),
        ([[1, 1, 0.1]], 0.12, "12.0% of the test images"),
    ):
        with pytest.raises(AssertionError, match=message):
            check([{"right": right, "changes": changes}, returned])


@pytest.mark.slow
@pytest.mark.lab
def test_a_rank_that_is_lost_and_comes_back(tmp_path: Path) -> None:
    record = dry("faults", tmp_path)
    (found,) = record.checks
    assert found["status"] == "passed" or "no emulated hosts" in found["detail"], found


def test_tests_with_several_ranks_need_a_gpu(tmp_path: Path) -> None:
    record = dry("shared", tmp_path)
    assert record.status == "skipped" and "no GPU" in record.reason


def test_what_is_measured_has_rows(tmp_path: Path) -> None:
    record = dry("rates", tmp_path)
    columns = {"codec", "operation", "megabytes", "us", "traffic_gb_per_s", "memcpy_gb_per_s", "share"}
    assert record.rows and all(set(row) == columns and row["share"] > 0 for row in record.rows)


@pytest.mark.process
def test_the_program_runs_a_part_and_goes_on_after_one_that_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PARTS, "rates", dataclasses.replace(PARTS["rates"], limit_s=0))
    words = ["--dry", "--no-build", "--out", str(tmp_path)]
    assert program.main([*words, "--part", "rates", "--part", "environment"]) == 1
    late, whole = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("rates", "environment"))
    assert late["status"] == "failed" and "ended at its limit of 0 s; left no result" in late["reason"]
    assert whole["status"] == "passed" and whole["facts"]["torch"]
    printed = capsys.readouterr().out
    assert "rates        failed" in printed and "environment  passed" in printed
    assert "A dry run without a GPU" in (tmp_path / "README.md").read_text()


def test_a_check_that_fails_fails_the_part(tmp_path: Path) -> None:
    record = Record("kernels", False, tmp_path / "kernels.json")
    with record.check("good"):
        pass
    with record.check("elsewhere"):
        raise Skip("no GPU")
    assert record.status == "passed"
    with record.check("bad"):
        raise AssertionError("bits differ")
    found = json.loads((tmp_path / "kernels.json").read_text())
    assert found["status"] == "failed" and "bad: AssertionError: bits differ" in found["reason"]
    assert "kernels      failed" in summary([found])
    assert "| bad | failed | AssertionError: bits differ |" in page([found], "today", "make gpu")


def test_tests_that_import_what_is_missing_are_left_out_by_name(tmp_path: Path) -> None:
    root = tmp_path / "tests"
    root.mkdir()
    for name, text in {
        "test_a.py": "import torch\ndef test(device: torch.device): ...\n",
        "test_b.py": "import no_such_package.inner\ndef test(device: torch.device): ...\n",
        "test_c.py": "def test(): ...\n",
    }.items():
        (root / name).write_text(text)
    files, left_out = select(root)
    assert [path.name for path in files] == ["test_a.py"]
    assert left_out == {"tests/test_b.py": ["no_such_package"]}
    words = command(files, tmp_path / "junit.xml", "gpu and not slow")
    assert "addopts=" in words and words[-1].endswith("test_a.py") and "gpu and not slow" in words


def test_the_files_with_tests_for_a_device_are_found() -> None:
    files, _ = select(Path(__file__).parents[1])
    names = {path.name for path in files}
    assert {"test_gpu.py", "test_triton.py", "test_codec_contract.py", "test_on_device.py"} <= names


def test_overlap_of_streams() -> None:
    def event(stream: int, begin: float, end: float, cat: str = "kernel") -> dict[str, Any]:
        return {"cat": cat, "name": "k", "ts": begin, "dur": end - begin, "args": {"stream": stream}}

    events = [event(7, 0, 10), event(7, 12, 20), event(20, 8, 13), event(20, 19, 30), event(7, 0, 99, "cpu_op")]
    streams = spans_by_stream([*events, {"cat": "kernel", "name": "without a duration"}])
    spans = {stream: [span for span, _ in found] for stream, found in streams.items()}
    assert overlap_us(spans[20], spans[7]) == 2 + 1 + 1
    assert overlap_us(spans[7], spans[7]) == 18
