"""The benchmark of autotuning: wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.autotune.__main__ import main


def test_a_surface_without_the_condition_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "surfaces.json"
    file.write_text(json.dumps({"results": [{"condition": "1gbit/1ms"}]}))
    assert main(["--surface", str(file), "--conditions", "1gbit/1ms,200mbit/2ms"]) == 2
    assert "has no sweep of 200mbit/2ms, only 1gbit/1ms" in capsys.readouterr().err
