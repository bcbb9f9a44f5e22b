"""The benchmark steps what it says, and compares bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fused import __main__ as program
from benchmarks.fused import measure
from benchmarks.fused.shapes import MODELS


def test_shapes() -> None:
    def elements(name: str) -> int:
        return sum(measure.torch.Size(shape).numel() for shape in MODELS[name])

    assert len(MODELS["BERT-base"]) == 199 and elements("BERT-base") == 109_482_240
    assert len(MODELS["10,000 small"]) == 10_000 and elements("10,000 small") == 1_462_000


@pytest.mark.process  # the description of the machine may start one
def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(MODELS, "1,000 small", MODELS["1,000 small"][:20])
    file = tmp_path / "fused.json"
    program.main(["--models", "1,000 small", "--rounds", "1", "--json", str(file), "--device", "cpu"])
    rows = json.loads(file.read_text())["rows"]
    assert [row["optimizer"] for row in rows] == list(program.OPTIMIZERS)
    for row in rows:
        assert row["bit_identical"] and all(row["bit_identical"].values()), row
        assert not row["refused"]
        assert set(row["step_ms"]) == {label for i in row["bit_identical"] for label in (i, f"bagua on {i}")}
    assert {"for-loop", "foreach", "fused"} == set(rows[1]["bit_identical"])
    assert set(rows[-1]["bit_identical"]) == {"for-loop"}
    assert "DIFFER" not in capsys.readouterr().out
