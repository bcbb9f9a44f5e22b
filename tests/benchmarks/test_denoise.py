"""The benchmark of noise in second moments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagua.codecs import available_backends
from benchmarks import denoise

pytestmark = pytest.mark.process


def test_every_backend_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert denoise.main(["--elements", "1000", "--tensors", "3", "--rounds", "2", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert content["settings"] == {"elements": 1000, "tensors": 3, "rounds": 2}
    assert set(content["ms"]) == {denoise.STEP, *available_backends()}
    assert all(len(times) == 2 and min(times) > 0 for times in content["ms"].values())
    assert denoise.STEP in capsys.readouterr().out


def test_wrong_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        denoise.main(["--tensors", "0"])
    assert "--tensors must be at least 1" in capsys.readouterr().err
