"""The build of the shared libraries: never fatal, and loadable if it succeeds."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        not (ROOT / "setup.py").exists() or importlib.util.find_spec("setuptools") is None,
        reason="needs a source checkout and setuptools",
    ),
]


def build(folder: Path, **env: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Runs ``setup.py build_ext`` into ``folder``; returns the process and where the library should be."""
    command = [sys.executable, "-W", "ignore", "setup.py", "build_ext"]
    command += ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)
    return done, folder / "lib/bagua/codecs/_native.so"


def test_no_compiler_is_a_warning(tmp_path: Path):
    done, library = build(tmp_path, CXX="/nonexistent/c++")
    assert done.returncode == 0, done.stderr
    assert not library.exists()
    assert done.stderr.count("WARNING: bagua.codecs._native was not built") == 1
    assert "Install g++" in done.stderr


@pytest.mark.slow
def test_the_build_gives_a_loadable_library(tmp_path: Path):
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    done, library = build(tmp_path, CXX="g++")
    assert done.returncode == 0, done.stderr
    assert ctypes.CDLL(str(library)).bagua_codecs_abi() >= 1
    before = library.stat().st_mtime_ns
    build(tmp_path, CXX="g++")
    assert library.stat().st_mtime_ns == before, "built again though nothing had changed"


@pytest.mark.slow
def test_the_build_can_be_switched_off(tmp_path: Path):
    done, library = build(tmp_path, BAGUA_NO_NATIVE="1")
    assert done.returncode == 0, done.stderr
    assert not library.exists()
