"""The fit of the constants of `bagua plan`."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest

from bagua.plan import CPU, Costs
from benchmarks import plan


def test_a_fit_finds_the_constants_that_made_the_data() -> None:
    wanted = Costs(0.7, 0.9, 2e-9, 1e-3, 2e-3, 1e-9, 1e-11)

    def error_of(costs: Costs) -> float:
        return sum(abs(math.log(getattr(costs, f.name) / getattr(wanted, f.name))) for f in fields(Costs))

    found, error = plan.fit(error_of, CPU)
    assert error == pytest.approx(error_of(found)) and error < 7 * 0.006
    for field in fields(Costs):
        assert getattr(found, field.name) == pytest.approx(getattr(wanted, field.name), rel=0.01), field.name


def test_no_efficiency_above_one() -> None:
    found, _ = plan.fit(lambda costs: -costs.link_efficiency - costs.mesh_efficiency, CPU)
    assert 0.98 < found.link_efficiency <= 1 and 0.98 < found.mesh_efficiency <= 1


def test_only_fitted_cells_count_in_a_fit() -> None:
    fitted = {table for table, _ in plan.FITTED}
    table = next(each for each in plan.TABLES if each in fitted)
    cells = list(plan.cells_of(table, fitted_only=True))
    assert cells and {cell["group"] for cell in cells} == {plan.FITTED_GROUP}
    for other in set(plan.TABLES) - fitted:
        assert not list(plan.cells_of(other, fitted_only=True))
    (first,) = list(plan.cells_of(table, replace(CPU, link_efficiency=0.1), fitted_only=True))[:1]
    assert first["predicted_ms"] > cells[0]["predicted_ms"]


def test_what_was_measured_again_replaces_the_first_measurement() -> None:
    for table, others in plan.AGAIN.items():
        cells = [(c["condition"], c["hosts"], c["algorithm"], c["measured_ms"]) for c in plan.cells_of(table)]
        assert len({cell[:3] for cell in cells}) == len(cells)
        for other in others:
            newer = [(c["condition"], c["hosts"], c["algorithm"], c["measured_ms"]) for c in plan.cells_of(other)]
            assert [cell in cells for cell in newer] == [cell[2] != "ddp" for cell in newer]


def test_a_cell_that_is_in_no_table_is_no_second_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "AGAIN", {"2026-11-21-bench/scaling.json": ("2026-11-23-cells/diloco.json",)})
    with pytest.raises(ValueError, match="diloco"):
        list(plan.cells_of("2026-11-21-bench/scaling.json"))
