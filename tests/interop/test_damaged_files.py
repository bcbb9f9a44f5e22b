"""Which file of a checkpoint of Accelerate is damaged, without its packages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bagua.interop.damaged_files import name_damaged_file

UNNAMED = RuntimeError("PytorchStreamReader failed reading zip archive")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Files as Accelerate writes them."""
    values = torch.arange(6.0)
    entry = {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "weight": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    torch.save({"state": values}, tmp_path / "optimizer.bin")
    return tmp_path


def test_whole_files_are_not_blamed(saved: Path) -> None:
    assert name_damaged_file(saved, UNNAMED) is None
    assert name_damaged_file(saved, FileNotFoundError(2, "No such file", f"{saved}/scheduler.bin")) is None, (
        "the error names the file itself"
    )


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
@pytest.mark.parametrize("left", ["nothing", "a few bytes", "half", "nearly all", "zeros"])
def test_a_truncated_file_is_named(saved: Path, name: str, left: str) -> None:
    path = saved / name
    content = path.read_bytes()
    sizes = {"nothing": 0, "a few bytes": 5, "half": len(content) // 2, "nearly all": len(content) - 1}
    path.write_bytes(bytes(len(content)) if left == "zeros" else content[: sizes[left]])
    said = name_damaged_file(saved, UNNAMED)
    assert said is not None and said.startswith(f"{path} is damaged: it has {path.stat().st_size} bytes")


@pytest.mark.parametrize(("number", "usual"), [("", "model.safetensors"), ("_1", "model_1.safetensors")])
def test_a_missing_model_is_named_as_it_is_saved(saved: Path, number: str, usual: str) -> None:
    said = name_damaged_file(saved, FileNotFoundError(2, "No such file", f"{saved}/pytorch_model{number}.bin"))
    assert said is not None and said.startswith(f"{saved} has neither {usual} nor pytorch_model{number}.bin")
