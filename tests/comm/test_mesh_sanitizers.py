"""The native transport built with AddressSanitizer and UndefinedBehaviorSanitizer, under its own tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bagua.comm.mesh import why_no_mesh

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "bagua/comm/csrc"
PROGRAM = """
import sys
from pathlib import Path
import bagua.comm.mesh
bagua.comm.mesh.LIBRARY = Path(sys.argv[1])
assert not bagua.comm.mesh.why_no_mesh()
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(not shutil.which("g++"), reason="needs g++"),
    pytest.mark.skipif(not CSRC.exists(), reason="needs a source checkout"),
    pytest.mark.skipif(bool(why_no_mesh()), reason=why_no_mesh() or "there is one"),
    pytest.mark.timeout(900),
]


def runtime(name: str) -> str:
    """The path of a library of the compiler."""
    asked = ["g++", f"-print-file-name={name}"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"g++ has no {name}")
    return found


def test_exchanges_touch_no_memory_of_others(tmp_path: Path) -> None:
    library = tmp_path / "_mesh.so"
    flags = ["-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-fsanitize=address,undefined"]
    subprocess.run(["g++", *flags, *sorted(CSRC.glob("*.cpp")), "-o", library, "-pthread"], check=True, timeout=300)
    env = {
        **os.environ,
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0",  # the interpreter keeps what it has
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    tests = ["tests/exchanges/test_native_rows.py", "tests/comm/test_mesh.py", "tests/comm/test_relays.py"]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library), *tests],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said[-4000:]
    assert "Sanitizer" not in said and "runtime error" not in said, said[-4000:]
    assert " passed" in said and " skipped" not in said.splitlines()[-1], said[-500:]
