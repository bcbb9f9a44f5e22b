"""The source distribution holds the whole source, and nothing that was built."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.process
@pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None or not (ROOT / ".git").exists() or shutil.which("git") is None,
    reason="needs setuptools and a checkout",
)
def test_sdist_is_complete(tmp_path: Path) -> None:
    source = tmp_path / "source"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    tracked = [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    (source / "bagua" / "codecs" / "_native.so").write_bytes(b"built")
    want = {name for name in tracked if not name.startswith(".")}  # what begins with a dot serves development only
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "sdist", "--dist-dir", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as tar:
        have = {member.name.split("/", 1)[1] for member in tar if member.isfile()}
    made = {name for name in have if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert want - have == set()
    assert have - made - want == set()
