"""Reports that were measured one after the other become one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bagua.bench import machine, tradeoff
from bagua.bench.main import main
from bagua.bench.merge import merged, resumed


def report(condition: str, *contenders: str, **changes: Any) -> dict[str, Any]:
    settings = {"conditions": [{"name": condition}], "hosts": 4, "compute_ms": 300}
    machine = {"cpu": "a", "cores": 2, "torch": "2.13.0"}
    rows = [{"condition": condition, "hosts": 4, "entrant": contender} for contender in contenders]
    made = {"kind": "tradeoff", "bagua": "1", "model": {"name": "m"}, "machine": machine, "settings": settings}
    return {**made, "rows": rows, **changes}


def written(folder: Path, *reports: Any) -> list[Path]:
    files = [folder / f"{number}.json" for number in range(len(reports))]
    for file, each in zip(files, reports, strict=True):
        file.write_text(json.dumps(each))
    return files


def test_rows_and_conditions_are_joined(tmp_path: Path) -> None:
    files = written(tmp_path, report("1gbit/0ms", "ddp", "bytegrad"), report("nolimit", "ddp"))
    found = merged(files)
    assert [(row["condition"], row["entrant"]) for row in found["rows"]] == [
        ("1gbit/0ms", "ddp"),
        ("1gbit/0ms", "bytegrad"),
        ("nolimit", "ddp"),
    ]
    assert [each["name"] for each in found["settings"]["conditions"]] == ["1gbit/0ms", "nolimit"]
    assert merged(files[:1]) == report("1gbit/0ms", "ddp", "bytegrad")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (report("1gbit/0ms", "ddp"), "1gbit/0ms, 4, ddp is in an earlier file"),
        (report("nolimit", "ddp", model={"name": "n"}), "model is {'name': 'n'}"),
        (report("nolimit", "ddp", machine={"cpu": "b"}), "machine.cpu is 'b'"),
        (report("nolimit", "ddp", settings={"hosts": 8}), "settings.hosts is 8"),
        ({"kind": "weather"}, "not written by bagua bench"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, other: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = written(tmp_path, report("1gbit/0ms", "ddp"), other)
    with pytest.raises(ValueError, match=r"1\.json: ") as caught:
        merged(files)
    assert message in str(caught.value)
    assert main(["report", *map(str, files)]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_is_resumed_measures_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(plan: tradeoff.Plan, folder: Any, told: Any, keep: Any) -> None:
        ran.extend(each.name for each in plan.conditions)
        rows = [{"condition": each.name, "entrant": "ddp", "error": "", "hosts": 4} for each in plan.conditions]
        keep({**tradeoff.report(plan, []), "rows": rows})

    monkeypatch.setattr(tradeoff, "run", run)
    monkeypatch.setattr(machine, "describe_machine", lambda: {"cpu": "a", "cores": 2, "torch": "2.13.0"})
    file = tmp_path / "out.json"
    words = ["curves", "--algorithms", "ddp", "--json", str(file), "--resume", "--conditions"]
    assert main([*words, "100mbit/0ms"]) == 0
    first = json.loads(file.read_text())
    assert main([*words, "100mbit/0ms,50mbit/0ms"]) == 0
    assert ran == ["100mbit/0ms", "50mbit/0ms"], "the first one once only"
    found = json.loads(file.read_text())
    assert found["rows"][0] == first["rows"][0] and found["date"] == first["date"]
    assert [row["condition"] for row in found["rows"]] == ran
    assert [each["name"] for each in found["settings"]["conditions"]] == ran
    assert main([*words, "nolimit", "--compute-ms", "7"]) == 2
    assert "another compute_ms" in capsys.readouterr().err
    assert json.loads(file.read_text()) == found


def test_conditions_are_named_once_though_both_reports_have_them() -> None:
    earlier, later = report("1gbit/0ms", "ddp"), report("nolimit", "ddp")
    earlier["settings"]["conditions"].append({"name": "nolimit"})
    found = resumed(earlier, later, Path("out.json"))
    assert [each["name"] for each in found["settings"]["conditions"]] == ["1gbit/0ms", "nolimit"]
    assert len(found["rows"]) == 2
