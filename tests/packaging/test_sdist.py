"""The source distribution: the whole source, nothing that was built, and the same bytes each time."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EPOCH = 1_700_000_000
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        importlib.util.find_spec("setuptools") is None or not (ROOT / ".git").exists() or shutil.which("git") is None,
        reason="needs setuptools and a checkout",
    ),
]


def copy_tracked(source: Path) -> list[str]:
    """A copy of the checkout's files, beside one that was built; returns their names."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    tracked = [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    (source / "bagua" / "codecs" / "_native.so").write_bytes(b"built")
    return tracked


def make_sdist(source: Path, dist: Path, **env: str) -> Path:
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "sdist", "--dist-dir", str(dist)]
    environment = {**os.environ, **env}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stderr
    (archive,) = dist.iterdir()
    return archive


def test_sdist_is_complete(tmp_path: Path) -> None:
    tracked = copy_tracked(tmp_path / "source")
    want = {name for name in tracked if not name.startswith(".")}  # what begins with a dot serves development only
    with tarfile.open(make_sdist(tmp_path / "source", tmp_path / "dist")) as tar:
        have = {member.name.split("/", 1)[1] for member in tar if member.isfile()}
    made = {name for name in have if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert want - have == set()
    assert have - made - want == set()


@pytest.mark.slow
def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    digests = []
    for number in (1, 2):
        source = tmp_path / str(number)
        copy_tracked(source)
        for path in source.rglob("*"):  # another checkout: other times, another umask
            os.utime(path, (EPOCH + number, EPOCH + number))
            if path.is_file():
                path.chmod((path.stat().st_mode & 0o700) | (0o044 if number == 1 else 0o020))
        archive = make_sdist(source, tmp_path / f"dist{number}", SOURCE_DATE_EPOCH=str(EPOCH))
        digests.append(hashlib.sha256(archive.read_bytes()).hexdigest())
        with tarfile.open(archive) as tar:
            members = tar.getmembers()
        assert {(member.mtime, member.uid, member.gid, member.uname) for member in members} == {(EPOCH, 0, 0, "")}
        assert {member.mode for member in members} <= {0o644, 0o755}
        assert all(member.isfile() for member in members)
    assert digests[0] == digests[1]
