"""Figures and tables say what was measured: settings that are drawn together are equal, no rival is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bagua.bench import contenders
from benchmarks.figures import advice, charts, hero, losses, pairs, table, tradeoff
from benchmarks.figures.__main__ import drawings
from benchmarks.figures.results import RESULTS, TORCH, Convergence, Tradeoff, newest, newest_complete, timed
from benchmarks.figures.suite import Suite

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def times() -> Tradeoff:
    return Tradeoff(newest("bench", "tradeoff.json"))


@pytest.fixture(scope="module")
def runs() -> Convergence:
    return Convergence(newest("convergence", "results.json"))


@pytest.fixture(scope="module")
def learnt() -> Suite:
    return Suite(newest("suite", "suite.json"))


def changed(results: Tradeoff, tmp_path: Path, **rows: dict[str, Any]) -> Tradeoff:
    """The same results with other values in the rows of some contenders."""
    data = json.loads((tradeoff_file(results)).read_text())
    for row in data["rows"]:
        row.update(rows.get(row["entrant"], {}))
    (tmp_path / "tradeoff.json").write_text(json.dumps(data))
    return Tradeoff(tmp_path / "tradeoff.json")


def tradeoff_file(results: Tradeoff) -> Path:
    return ROOT / results.path


def test_what_is_drawn_together_has_the_same_settings(times: Tradeoff, runs: Convergence) -> None:
    drawn = tradeoff.points_of(times, runs)
    assert {"bytegrad", "int4", "qadam", "local_sgd"} <= set(drawn)
    for contender in drawn:
        assert pairs.differences(contender, pairs.CANDIDATES[contender], times, runs) == []
    for contender, what in (
        ("power_sgd", "rank 8"),
        ("diloco", "communication_interval 64"),
        ("async", "a round every"),
    ):
        assert contender not in drawn
        found = pairs.differences(contender, pairs.CANDIDATES[contender], times, runs)
        assert any(what in line for line in found), found
    text = tradeoff.draw_loss_against_time(times, runs).render()
    assert "power_sgd: rank 8 in the time, 4 in the loss" in text


def test_options_of_a_contender_count(times: Tradeoff, runs: Convergence) -> None:
    assert pairs.differences("power_sgd:rank=4", "power_sgd", times, runs) == []
    assert pairs.differences("int4", "bytegrad", times, runs)  # another codec


@pytest.mark.parametrize("entrant", pairs.SUITE)
def test_a_speed_up_and_a_loss_of_the_suite_have_the_same_settings(entrant: str) -> None:
    assert pairs.suite_differences(entrant) == []


def test_the_loss_is_that_of_the_worst_task(learnt: Suite) -> None:
    tasks = ("conv, sgd", "regression, sgd", "gpt, adamw", "vit, adamw")
    rows = {f"{row['task']}, {row['family']}": row["behind"] for row in learnt.rows if row["label"] == "diloco"}
    assert learnt.worst("diloco", ("sgd", "adamw")) == (max(rows[task] for task in tasks), 4)
    assert learnt.worst("diloco", ("sgd",)) == (max(rows[task] for task in tasks[:2]), 2)
    with pytest.raises(ValueError, match="lacks runs of power_sgd rank=4"):
        learnt.worst("power_sgd rank=4", ("sgd",))  # not on the regression


def test_what_is_recommended_has_its_defaults(learnt: Suite) -> None:
    """DiLoCo every 64 steps is faster, and loses most: it is in no table or figure that recommends."""
    for text in (advice.advice(learnt), table.speedups(learnt), charts.draw_choice(learnt).render()):
        (line,) = [line for line in re.split(r"[\n]|(?<=</text>)", text) if "diloco" in line]
        assert "64" not in line
    assert "diloco" not in {name for name, _ in hero.ROWS}


def test_entrants_with_options_come_from_the_run_of_such() -> None:
    assert timed("100mbit/5ms", pairs.EDEN).name.endswith("-advice")
    assert timed("100mbit/5ms", "bytegrad").name.endswith("-bench")


def test_an_exact_warm_up_is_counted(times: Tradeoff, learnt: Suite) -> None:
    after, whole = times.speedup("100mbit/5ms", "qadam_1bit"), times.speedup("100mbit/5ms", "qadam_1bit", 0.2)
    assert after is not None and whole == pytest.approx(1 / (0.2 + 0.8 / after))
    assert after > 20 and whole < 4.5
    rows = {line.split(" | ")[0]: line.split(" | ")[1:] for line in table.speedups(learnt).splitlines()}
    assert all(
        float(counted.split("x")[0]) < float(plain.split("x")[0])
        for counted, plain in zip(
            rows["| the same with 20 % exact warm-up"][:3],
            rows['| `qadam`, `codec="sign"`, after its warm-up'][:3],
            strict=True,
        )
    )


def test_a_disturbed_ddp_flatters_nobody(times: Tradeoff, tmp_path: Path) -> None:
    condition = "250mbit/0ms"
    exact = times.row(condition, "gradient_allreduce")
    assert exact is not None
    slow = changed(times, tmp_path, ddp={"step_ms": 99_999.0})
    assert slow.reference_ms(condition) == exact["step_ms"]
    assert slow.speedup(condition, "bytegrad") == pytest.approx(times.speedup(condition, "bytegrad"), rel=0.02)


def test_no_rival_is_left_out() -> None:
    assert {name for name, _ in hero.ROWS} >= set(TORCH)
    for condition in table.NETWORKS:
        results = newest_complete(condition)
        times = {name: (results.row(condition, name) or {})["step_ms"] for name in TORCH}
        assert results.best_of_torch(condition) == min(times, key=lambda name: times[name])
    grid = table.grid(newest_complete(table.NETWORKS[-1]))
    assert all(f"| torch `{name}` |" in grid for name in TORCH)


def test_a_run_without_a_rival_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: Tradeoff) -> None:
    folder = tmp_path / "2026-01-01-bench"
    folder.mkdir()
    changed(times, folder, post_local_sgd={"error": "gone"})
    monkeypatch.setattr("benchmarks.figures.results.RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError, match="post_local_sgd"):
        newest_complete("1gbit/5ms")


def test_what_was_not_measured_is_said(times: Tradeoff, tmp_path: Path) -> None:
    lacking = changed(times, tmp_path, post_local_sgd={"error": "gone"})
    line = next(line for line in table.grid(lacking).splitlines() if "post_local_sgd" in line)
    assert line.count("not measured") == 5
    stars = [line.count("*") for line in table.grid(times).splitlines() if line.startswith("|")]
    counts = [int(cell.split(" of ")[0]) for cell in table.grid(times).splitlines()[-1].split(" | ")[1:]]
    assert sum(counts) == sum(stars)


def test_the_loss_counts_beside_the_accuracy() -> None:
    """With the former outer momentum the accuracy was within a point of DDP's, the loss more than twice as high."""
    runs = Convergence(RESULTS / "2026-11-21-convergence" / "results.json")
    assert runs.row("digits", "diloco")["within"]
    assert runs.misses("diloco") == {"digits loss"}
    assert runs.misses("bytegrad") == set()
    (row,) = [line for line in losses.of_algorithm(runs, "diloco").splitlines() if line.startswith("| diloco |")]
    assert row.endswith("| missed |") and "(0.37), missed" in row


def test_figures_and_tables_have_one_sign(times: Tradeoff, runs: Convergence, learnt: Suite) -> None:
    """Positive is worse than DDP: 3.0 points fewer right, 4.9 % more loss."""
    text = drawings(times, runs)["convergence-sparse_loco"].render()
    assert "92.2 % right (+3.0 points)" in text and "(+4.9 %)" in text
    assert "| +3.0, missed |" in losses.of_algorithm(runs, "sparse_loco")
    assert "| +4.9, missed |" in losses.of_algorithm(runs, "sparse_loco")
    (line,) = [line for line in advice.advice(learnt).splitlines() if "diloco" in line]
    assert line.endswith("| +5.7 % (4 tasks) |")


def test_every_figure_has_a_dark_form(times: Tradeoff, runs: Convergence) -> None:
    for drawing in drawings(times, runs).values():
        light, dark = drawing.render(), drawing.render(dark=True)
        assert '"#ffffff"' in light and '"#ffffff"' not in dark
        assert light.count("<text") == dark.count("<text")


def test_contenders_said_to_have_their_defaults_have_them() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    (line,) = [line for line in page.splitlines() if line.endswith("| with their defaults |")]
    said = set(re.findall(r"`(\w+)`", line))
    ours = [each for each in contenders.available().values() if each.family == "bagua"]
    assert said and said <= {each.name for each in ours if not each.options and each.optimizer == "sgd"}
