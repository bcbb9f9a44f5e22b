"""`python -m build`, and its wheel in an environment of its own; `make dist-check` runs it with all that it needs."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.packaging.test_sdist import EPOCH, ROOT, copy_tracked

pytest.importorskip("build", reason="the package build is not installed; `make dist-check` has it")
pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(1500)]
TRAINING = """
import torch
import bagua
from torch import nn

bagua.init_process_group()
torch.manual_seed(0)
model = nn.Linear(64, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
bagua.distribute(model, optimizer, algorithm="bytegrad")
losses = []
for step in range(50):
    x = torch.randn(32, 64)
    losses.append(nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)))
    optimizer.zero_grad()
    losses[-1].backward()
    optimizer.step()
assert losses[-1] < losses[0] / 1.5, losses
print("trained with", bagua.__file__)
torch.distributed.destroy_process_group()
"""


class Dist(NamedTuple):
    sdist: Path
    wheel: Path


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path) -> Dist:
    copy_tracked(folder / "source")
    (folder / "source" / "bagua" / "codecs" / "_native.so").unlink()
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)}
    env.pop("PYTHONPATH", None)
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", cwd=folder / "source", env=env)
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return Dist(sdist, wheel)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Dist:
    return build(tmp_path_factory.mktemp("first"))


def test_two_builds_give_the_same_bytes(dist: Dist, tmp_path: Path) -> None:
    for one, other in zip(dist, build(tmp_path), strict=True):
        assert hashlib.sha256(one.read_bytes()).digest() == hashlib.sha256(other.read_bytes()).digest(), one.name


def test_the_wheel_holds_the_modules_and_the_libraries(dist: Dist) -> None:
    with zipfile.ZipFile(dist.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    with tarfile.open(dist.sdist) as tar:
        sources = {member.name.split("/", 1)[1] for member in tar}
    modules = {name for name in sources if re.fullmatch(r"(bagua|lightning_bagua)/.*\.(py|pyi)|\w+/py\.typed", name)}
    libraries = {"codecs/_native", "comm/_mesh", "lab/_relay", "lab/_pacing", "net/libnccl-net-bagua", "net/_driver"}
    assert names == modules | {f"bagua/{library}.so" for library in libraries}


def test_descriptions_are_valid_for_an_index(dist: Dist) -> None:
    pytest.importorskip("twine", reason="twine is not installed")
    run(sys.executable, "-m", "twine", "check", "--strict", *dist, cwd=dist.wheel.parent)


def test_the_libraries_need_nothing_but_the_c_and_cpp_runtime(dist: Dist, tmp_path: Path) -> None:
    pytest.importorskip("auditwheel", reason="auditwheel is not installed")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run(sys.executable, "-m", "auditwheel", "repair", "-w", tmp_path, dist.wheel, cwd=tmp_path, env=env)
    (repaired,) = tmp_path.glob("*.whl")
    assert re.search(r"-py3-none-(manylinux_2_\d+_\w+\.?)+\.whl$", repaired.name)
    with zipfile.ZipFile(repaired) as wheel:  # what auditwheel copies into a wheel lies in bagua.libs
        assert not [name for name in wheel.namelist() if name.startswith("bagua.libs/")]


def test_the_wheel_runs_where_there_is_no_compiler(dist: Dist, tmp_path: Path) -> None:
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    programs = home / "bin"
    torch = next(line for line in (ROOT / "constraints-dev.txt").read_text().splitlines() if line.startswith("torch=="))
    pip = [programs / "python", "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    pip += os.environ.get("PIP_ARGS", "").split()
    run(*pip, torch, cwd=tmp_path)
    run(*pip, dist.wheel, cwd=tmp_path)
    env = {"PATH": str(programs), "HOME": str(tmp_path)}
    assert not any(shutil.which(name, path=env["PATH"]) for name in ("g++", "gcc", "c++", "cc", "clang++"))
    doctor = run(programs / "bagua", "doctor", cwd=tmp_path, env=env)
    assert "codecs: built" in doctor and "native-" in doctor, doctor
    (tmp_path / "training.py").write_text(TRAINING)
    trained = run(programs / "bagua", "run", "--nproc-per-node", "2", "training.py", cwd=tmp_path, env=env)
    assert trained.count(str(home)) == 2, trained
