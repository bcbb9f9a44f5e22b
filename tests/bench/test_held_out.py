"""Conditions drawn from a seed: the same everywhere, within their limits, and said to be drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bagua.bench import drawn_models, held_out, models, tables
from bagua.bench.conditions import parse
from bagua.bench.main import main


def test_a_seed_draws_the_same_conditions_on_every_machine() -> None:
    first, second, third, _ = held_out.draw(7, quick=True)
    assert (first.condition.name, first.hosts, first.model, first.compute_ms) == (
        "441mbit/0us/wiretbf",
        3,
        "huge_first@556254/1147182",
        250,
    )
    assert second.condition.name == "441mbit/0us/wirerelay" and second.model == first.model
    assert third.condition.name == "172mbit/6897us/wirerelay"
    assert held_out.draw(7) == held_out.draw(7) != held_out.draw(8)


def test_conditions_are_within_their_limits() -> None:
    drawn = [each for seed in range(50) for each in held_out.draw(seed)]
    assert {each.model.partition("@")[0] for each in drawn} == set(drawn_models.KINDS)
    assert {each.hosts for each in drawn} == {2, 3, 4, 6, 8, 12, 16}
    for each in drawn:
        assert 100e6 <= each.condition.bits_per_s <= 10e9
        assert 0 <= each.condition.latency_s <= 0.05
        assert 0 <= each.condition.loss <= 0.01
        assert parse(each.condition.name) == each.condition
    assert any(each.condition.loss for each in drawn)


@pytest.mark.parametrize("kind", drawn_models.KINDS)
def test_model_has_about_the_elements_of_its_name(kind: str) -> None:
    made = models.get(f"{kind}@3/2000000")
    assert made.num_elements == pytest.approx(2_000_000, rel=0.01)
    assert made == models.get(f"{kind}@3/2000000")
    assert all(layer.num_elements > 0 and layer.work > 0 for layer in made.layers)


def test_shapes_of_the_kinds() -> None:
    first, last = models.get("huge_first@3/2000000").layers, models.get("huge_last@3/2000000").layers
    assert first[0].num_elements > 0.15 * 2_000_000 and first[0].work < first[1].work
    assert last[-1].num_elements == max(layer.num_elements for layer in last)
    assert 1000 <= len(models.get("thousands@3/2000000").shapes) <= 3000
    assert len(models.get("single@3/2000000").layers) == 1
    assert models.get("even@3/2000000") != models.get("even@4/2000000")


@pytest.mark.parametrize("name", ["even@7", "odd@7/20000", "even@7/10", "even@x/20000", "@7/20000"])
def test_wrong_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="model"):
        models.get(name)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["tradeoff", "--seed", "7"], "--seed"),
        (["tradeoff", "--held-out", "--seed", "-1"], "--seed"),
        (["tradeoff", "--held-out", "--hosts", "4"], "--hosts"),
        (["tradeoff", "--held-out", "--conditions", "1gbit"], "--conditions"),
        (["tradeoff", "--held-out", "--algorithms", "bytegrat"], "bytegrat"),
        (["wan", "--conditions", "1gbit/loss1"], "loss1"),
    ],
)
def test_wrong_arguments(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert named in capsys.readouterr().err


def test_rows_are_kept_and_the_report_says_the_seed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(plan: Any, folder: Any, told: Any, keep: Any) -> None:
        row = {"condition": plan.conditions[0].name, "hosts": plan.hosts, "model": plan.model, "entrant": "ddp"}
        row |= dict.fromkeys(("step_ms", "p25_ms", "p75_ms", "bytes_per_host"), 3e6)
        row |= dict.fromkeys(("ratio_to_ddp", "exposed_ms", "bound_ms", "efficiency", "busy", "wait_share"))
        row |= {"error": "", "limited": "", "bytes_from": "device", "formula_bytes": 2e6}
        machine = {"cpu": "a", "cores": 2, "torch": "2.13.0", "load_1min": 0.5}
        keep({"date": "2026-11-23", "bagua": "1", "machine": machine, "left_out": [], "rows": [row]})

    monkeypatch.setattr("bagua.bench.tradeoff.run", measure)
    file = tmp_path / "out.json"
    assert main(["tradeoff", "--held-out", "--seed", "7", "--quick", "--json", str(file)]) == 0
    assert "drawn with seed 7" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["kind"] == "held-out" and len(report["rows"]) == 4
    text = tables.document(report)
    assert "held out: 4 conditions drawn with seed 7, quick form" in text
    assert "441mbit/0us/wirerelay, 3 hosts, huge_first@556254/1147182" in text
    assert "| 3.000 | 2.000 | 1.500 |" in text
    assert main(["report", str(file)]) == 0


def test_wan_has_all_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("bagua.bench.tradeoff.run", lambda plan, *_: seen.append(plan))
    main(["wan"])
    assert {each.latency_s for each in seen[0].conditions} == {0, 0.005, 0.02, 0.05}
    assert {each.bits_per_s for each in seen[0].conditions} == {100e6, 400e6, 1e9}
