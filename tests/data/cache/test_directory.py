"""Where a cache's file lies, and when it goes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bagua.data.cache import lmdb_directory, lmdb_store
from bagua.data.cache.lmdb_directory import job_directory, leave_job_directories
from bagua.data.cache.lmdb_store import LmdbStore
from tests.lines import read_line


@pytest.fixture(autouse=True)
def _tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lmdb")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (*lmdb_directory._JOB, "RANK"):
        monkeypatch.delenv(name, raising=False)


def other_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_directory, "_boot", lambda: "another boot")


def test_a_file_closed_in_order_survives_a_restart_of_the_machine(
    cache_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LmdbStore(cache_path)
    store.set(b"a", b"1")
    store.close()
    other_boot(monkeypatch)
    again = LmdbStore(cache_path)
    assert bytes(again.get(b"a") or b"") == b"1"
    again.set(b"b", b"2")
    again.close()


def test_a_file_that_may_be_torn_is_discarded_after_a_restart_of_the_machine(
    cache_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LmdbStore(cache_path)
    store.set(b"a", b"1")
    store.close()
    again = LmdbStore(cache_path)
    again.set(b"b", b"2")
    again.suspend()  # and the power fails
    other_boot(monkeypatch)
    lmdb_store._open_paths.clear()
    fresh = LmdbStore(cache_path)
    assert fresh.get(b"a") is None and fresh.get(b"b") is None
    fresh.set(b"a", b"3")
    fresh.close()


def test_other_files_are_never_touched(cache_path: Path) -> None:
    cache_path.mkdir()
    (cache_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="path: .*thesis.tex"):
        LmdbStore(cache_path)
    (cache_path / "thesis.tex").rename(cache_path / "data.mdb")
    with pytest.raises(ValueError, match="path: .*data.mdb"):
        LmdbStore(cache_path)
    assert (cache_path / "data.mdb").read_text() == "years of work"


def test_a_directory_of_a_process_goes_with_it(tmp_path: Path) -> None:
    path = job_directory()
    assert path == job_directory()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    store = LmdbStore(path)
    store.set(b"a", b"1")
    store.close()
    leave_job_directories()
    assert list(tmp_path.iterdir()) == []


JOIN = """
import sys, tempfile
from importlib.util import module_from_spec, spec_from_file_location
tempfile.tempdir = sys.argv[1]
spec = spec_from_file_location("lmdb_directory", sys.argv[2])  # without the package, which would import torch
module = module_from_spec(spec)
spec.loader.exec_module(module)
print(module.job_directory(), flush=True)
sys.stdin.readline()
module.leave_job_directories()
"""


def start_rank(tmp_path: Path, rank: int, port: int = 1234) -> tuple[subprocess.Popen[str], str]:
    env = {**os.environ, "RANK": str(rank), "MASTER_ADDR": "h", "MASTER_PORT": str(port)}
    process = subprocess.Popen(
        [sys.executable, "-c", JOIN, str(tmp_path), lmdb_directory.__file__],
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    return process, read_line(process.stdout, "directory").strip()


@pytest.mark.process
def test_ranks_of_a_job_share_a_directory_until_the_last_leaves_and_crashed_jobs_leave_none(tmp_path: Path) -> None:
    (first, path), (second, same), (other, elsewhere) = (start_rank(tmp_path, 0), start_rank(tmp_path, 1),
                                                         start_rank(tmp_path, 0, 99))  # fmt: skip
    assert path == same and Path(path).parent.is_dir()
    assert elsewhere != path
    other.kill()
    other.communicate(timeout=60)
    assert Path(elsewhere).parent.exists()
    first.communicate("\n", timeout=60)
    assert Path(path).parent.exists()
    job_directory()  # another job of this user finds what the crashed one left
    assert not Path(elsewhere).parent.exists()
    assert Path(path).parent.exists()
    second.communicate("\n", timeout=60)
    assert not Path(path).parent.exists()


def test_leftovers_under_the_same_name_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "7")):
        monkeypatch.setenv(name, value)
    path = job_directory()
    path.mkdir()
    (path / "data.mdb").write_text("old")
    os.close(lmdb_directory._joined.pop(path.parent))  # as a killed process leaves it
    assert job_directory() == path
    assert not path.exists()


def test_somebody_elses_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "7")):
        monkeypatch.setenv(name, value)
    path = job_directory().parent
    leave_job_directories()
    (tmp_path / "trap").mkdir()
    path.symlink_to(tmp_path / "trap")
    with pytest.raises(PermissionError, match="belongs to another user"):
        job_directory()


def test_a_path_that_is_a_file_or_below_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    for path in (file, file / "cache"):
        with pytest.raises(ValueError, match="path: .* expected a directory"):
            LmdbStore(path)
    assert file.read_text() == "kept"
