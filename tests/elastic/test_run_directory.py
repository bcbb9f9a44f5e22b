"""The directory of a launcher, also of one that was killed."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from bagua.distributed.run_directory import run_directory


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_private_and_removed(folder: Path) -> None:
    with run_directory() as directory:
        assert directory.parent == folder and stat.S_IMODE(directory.stat().st_mode) == 0o700
        (directory / "seat").touch()
    assert list(folder.iterdir()) == []


def test_that_of_a_killed_launcher_is_removed_by_the_next(folder: Path) -> None:
    """The lock ends with the process. Whoever still runs, or has only begun, keeps his."""
    left, begun = folder / "bagua-run-left", folder / "bagua-run-begun"
    for each in (left, begun):
        each.mkdir()
        (each / "seat").touch()
    (left / "lock").touch()
    with run_directory() as first, run_directory() as second:
        assert not left.exists() and begun.exists() and first.exists() and second.exists()
