"""Whatever works with DDP works here, with every algorithm: one test for each feature and algorithm.

All features of one algorithm share one job of the rank processes; see `feature.run_features`.
"""

from __future__ import annotations

import pytest

from tests.parity.case import NAMES
from tests.parity.feature import Cell, Feature, load, run_features
from tests.rank_pool import RankPool

ALWAYS = ("gradient_allreduce", "bytegrad")
ONE_IN = 3  # of the others: each feature with some algorithms, each algorithm with some features
FEATURES = load()
PLACES = {name: place for place, name in enumerate([*FEATURES, *NAMES])}


def is_daily(row: Feature, algorithm: str) -> bool:
    """Whether to run it with every change."""
    if row.daily is not None:
        return algorithm in row.daily
    return algorithm in ALWAYS or (PLACES[row.name] + PLACES[algorithm]) % ONE_IN == 0


CELLS = [
    pytest.param(algorithm, name, id=f"{algorithm}-{name}", marks=() if is_daily(row, algorithm) else pytest.mark.slow)
    for algorithm in NAMES
    for name, row in FEATURES.items()
]


class Outcomes:
    """Runs what was asked for of an algorithm, once."""

    def __init__(self, pool: RankPool, wanted: dict[str, list[str]]) -> None:
        self._pool, self._wanted = pool, wanted
        self._found: dict[str, dict[str, Cell]] = {}

    def of(self, algorithm: str, name: str) -> Cell:
        """What came of one feature."""
        if algorithm not in self._found:
            self._found[algorithm] = self._run(algorithm, list(self._wanted[algorithm]))
        return self._found[algorithm][name]

    def _run(self, algorithm: str, names: list[str]) -> dict[str, Cell]:
        found: dict[str, Cell] = {}
        while names:
            try:
                ranks = self._pool.run(2, run_features, algorithm, names, timeout_s=120, group_timeout_s=15, fresh=True)
            except AssertionError as error:  # ranks that are stuck or gone: which feature it was is in their stacks
                found |= dict.fromkeys(names, Cell("failed", str(error)))
                break
            for name in names:
                cells = [rank[name] for rank in ranks if name in rank]
                bad = [cell for cell in cells if cell.kind == "failed"]
                if bad or len(cells) < len(ranks):
                    found[name] = Cell("failed", "\n".join(cell.remark for cell in bad) or "not reached by all ranks")
                    break
                same = len({cell.kind for cell in cells}) == 1
                found[name] = cells[0] if same else Cell("failed", f"ranks differ: {cells}")
            names = [name for name in names if name not in found]
        return found


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, pool: RankPool) -> Outcomes:
    """Of the features that were selected."""
    wanted: dict[str, list[str]] = {}
    for item in request.session.items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if item.module is request.module and "feature" in params:
            wanted.setdefault(params["algorithm"], []).append(params["feature"])
    return Outcomes(pool, wanted)


@pytest.mark.parametrize(("algorithm", "feature"), CELLS)
def test_parity(outcomes: Outcomes, algorithm: str, feature: str, record_property: pytest.RecordProperty) -> None:
    cell = outcomes.of(algorithm, feature)
    problem = FEATURES[feature].problem(algorithm, cell)
    assert not problem, problem
    record_property("cell", [feature, algorithm, *cell])
