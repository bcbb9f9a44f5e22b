"""The benchmark of the Adams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import adams

pytestmark = pytest.mark.process


def test_every_contender_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert adams.main(["--elements", "1000", "--tensors", "3", "--rounds", "2", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert content["settings"] == {"elements": 1000, "tensors": 3, "rounds": 2}
    assert set(content["ms"]) == set(adams.CONTENDERS)
    assert all(len(times) == 2 and min(times) > 0 for times in content["ms"].values())
    assert "ZeroOneAdam" in capsys.readouterr().out


def test_wrong_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        adams.main(["--rounds", "0"])
    assert "--rounds must be at least 1" in capsys.readouterr().err
