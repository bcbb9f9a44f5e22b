"""Type checkers see the types of public names, and no name that does not exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bagua
import lightning_bagua

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MISSPELT = """
import torch
import bagua
from bagua import data, elastic, exchanges

bagua.distribut
data.CachedDatasets
elastic.Stat
exchanges.Gosip
bagua.distribute(torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), "bytegrad", bucket_bytes="1 MB")
bagua.stats(torch.nn.Linear(1, 1)).step
"""
MISTAKES = {6, 7, 8, 9, 10, 11}  # lines of it


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a script that is right, and one with mistakes."""
    (tmp_path / "consumer.py").write_bytes((HERE / "consumer.py").read_bytes())
    (tmp_path / "misspelt.py").write_text(MISSPELT)
    return tmp_path


def test_both_packages_are_marked_as_typed() -> None:
    for package in (bagua, lightning_bagua):
        assert package.__file__ is not None
        assert Path(package.__file__).with_name("py.typed").exists()
    settings = (HERE.parent.parent / "pyproject.toml").read_text()
    assert 'bagua = ["py.typed"]' in settings
    assert 'lightning_bagua = ["py.typed"]' in settings


@pytest.mark.process
def test_pyright(folder: Path) -> None:
    config = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard", "reportPrivateImportUsage": False}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=140)
    errors = [each for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    assert not [each["message"] for each in errors if each["file"].endswith("consumer.py")]
    assert {each["range"]["start"]["line"] + 1 for each in errors} == MISTAKES


@pytest.mark.process
def test_mypy(folder: Path) -> None:
    pytest.importorskip("mypy")  # CI installs it
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--follow-imports=silent", "--ignore-missing-imports"]
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    files = ["consumer.py", "misspelt.py"]
    done = subprocess.run([*command, *files], capture_output=True, text=True, cwd=folder, env=env, timeout=140)
    found = re.findall(r"^(\w+\.py):(\d+): error:", done.stdout, re.MULTILINE)
    assert {(name, int(line)) for name, line in found} == {("misspelt.py", line) for line in MISTAKES}, done.stdout
    assert "INTERNAL ERROR" not in done.stdout + done.stderr
