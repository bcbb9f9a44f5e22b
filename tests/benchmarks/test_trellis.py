"""The fit of centroids for trellises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import trellis


def test_a_fit_gains_and_is_no_better_than_what_is_possible(tmp_path: Path) -> None:
    file, found = tmp_path / "fit.json", list[dict[str, float]]()
    for rounds in ("1", "10"):
        options = ["--starts", "1", "--rounds", rounds, "--blocks", "60", "--json", str(file)]
        trellis.main(["--bits", "1", "--states", "8", *options])
        fit = json.loads(file.read_text())
        assert len(fit["table"]) == 16
        assert fit["starts"] == [fit["left"]]
        found.append(fit)
    assert 0.25 < found[1]["in_use"] < found[1]["left"] < found[0]["left"]


@pytest.mark.parametrize("wrong", [["--states", "12"], ["--bits", "3"], ["--rounds", "0"]])
def test_wrong_numbers_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        trellis.main(wrong)
    assert wrong[0] in capsys.readouterr().err
