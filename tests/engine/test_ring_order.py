"""The best ring against all rings."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest

from bagua.engine.startup.ring_order import best_ring, worth_of


def rates_of(count: int, seed: int, values: list[float] | None = None) -> list[list[float]]:
    draws = Random(seed)
    rates = [[1.0] * count for _ in range(count)]
    for a in range(count):
        for b in range(a):
            rates[a][b] = rates[b][a] = draws.choice(values) if values else 10 ** (7 + 2 * draws.random())
    return rates


@pytest.mark.parametrize("count", [4, 5, 6, 7])
@pytest.mark.parametrize("values", [None, [5e7, 1e8, 1e9], [1e9]])
def test_is_the_best_of_all(count: int, values: list[float] | None) -> None:
    for seed in range(5):
        rates = rates_of(count, seed, values)
        best = max(worth_of([0, *rest], rates) for rest in permutations(range(1, count)))
        ring = best_ring(rates)
        found = worth_of(ring, rates)
        assert sorted(ring) == list(range(count)) and ring[0] == 0 and ring[1] <= ring[-1]
        assert found == pytest.approx(best)


def test_nine_nodes_are_exact_and_more_are_improved() -> None:
    for count in (9, 14):
        fast = [0, *Random(count).sample(range(1, count), count - 1)]
        rates = rates_of(count, 3, [5e7])
        for a, b in zip(fast, [*fast[1:], 0], strict=True):
            rates[a][b] = rates[b][a] = 1e9
        assert best_ring(rates) == (fast if fast[1] < fast[-1] else [0, *reversed(fast[1:])])
    rates = rates_of(14, 5)
    assert worth_of(best_ring(rates), rates) > worth_of(list(range(14)), rates)
    assert best_ring(rates) == best_ring(rates)


def test_few_nodes_have_one_ring() -> None:
    assert [best_ring(rates_of(count, 0)) for count in (1, 2, 3)] == [[0], [0, 1], [0, 1, 2]]
