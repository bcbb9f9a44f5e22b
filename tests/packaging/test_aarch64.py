"""The compiled kernels, cross-compiled for aarch64 and run by qemu, write the bytes that they write here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bagua.codecs.native import LIBRARY
from tests.packaging.test_sdist import copy_tracked

DRIVER = Path(__file__).with_name("kernels.cpp")
CROSS, QEMU, SYSROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not LIBRARY.exists(), reason="the kernels were not built"),
    pytest.mark.skipif(
        not all(shutil.which(tool) for tool in (CROSS, QEMU, "g++", "git")),
        reason="needs the packages g++-aarch64-linux-gnu and qemu-user",
    ),
]


def output(*command: str | Path, **options: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=500, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return done.stdout


def digests(library: Path, compiler: str, folder: Path, *runner: str) -> list[str]:
    program = folder / f"kernels-{compiler}"
    output(compiler, "-std=c++17", "-O1", "-ffp-contract=off", DRIVER, "-o", program, "-ldl")
    return output(*runner, program, library).splitlines()


def test_kernels_for_aarch64_write_the_same_bytes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    copy_tracked(source)
    env = {**os.environ, "CXX": CROSS, "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    (source / "bagua" / "codecs" / "_native.so").unlink()
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    built = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, timeout=500)
    assert built.returncode == 0 and "was not built" not in built.stderr, built.stderr
    libraries = sorted((source / "bagua").rglob("*.so"))
    assert len(libraries) == 6
    for library in libraries:
        assert library.read_bytes()[18:20] == b"\xb7\x00", f"{library.name}: not for aarch64"  # e_machine of ELF
    here = digests(LIBRARY, "g++", tmp_path)
    there = digests(source / "bagua" / "codecs" / "_native.so", CROSS, tmp_path, QEMU, "-L", SYSROOT)
    assert len(here) > 60 and there == here
