"""Routes by hand, and that they help where they are taken."""

from __future__ import annotations

import itertools
import random

import pytest

from bagua.engine.startup.routes import best_routes, slowest_share

Pairs = dict[tuple[int, int], float]


def table(count: int, pairs: Pairs, other: float) -> list[list[float]]:
    return [[pairs.get((min(a, b), max(a, b)), other) for b in range(count)] for a in range(count)]


def near(count: int) -> list[list[float]]:
    return [[1e-3] * count for _ in range(count)]


def loads(count: int, routes: dict[tuple[int, int], int]) -> tuple[dict[frozenset[int], int], list[int]]:
    """Chunks over each link, and out of each node, if each node sends one to each other one. Step by step."""
    links = {frozenset(pair): 0 for pair in itertools.combinations(range(count), 2)}
    out = [0] * count
    for source, target in itertools.permutations(range(count), 2):
        via = routes.get((min(source, target), max(source, target)))
        hops = [source, target] if via is None else [source, via, target]
        for a, b in itertools.pairwise(hops):
            links[frozenset((a, b))] += 1
            out[a] += 1
    return {link: both // 2 for link, both in links.items()}, out


def seconds(rates: list[list[float]], routes: dict[tuple[int, int], int]) -> float:
    links, out = loads(len(rates), routes)
    fastest = [max(rate for b, rate in enumerate(row) if b != a) for a, row in enumerate(rates)]
    over = [many / rates[min(link)][max(link)] for link, many in links.items()]
    return max(*over, *(sent / rate for sent, rate in zip(out, fastest, strict=True)))


def test_two_slow_pairs_go_through_the_fastest_nodes() -> None:
    rates = table(
        4, {(0, 1): 50e6, (0, 2): 600e6, (0, 3): 1000e6, (1, 2): 400e6, (1, 3): 800e6, (2, 3): 100e6}, other=1.0
    )
    routes = best_routes(rates, near(4))
    assert routes == {(0, 1): 3, (2, 3): 0}
    assert slowest_share(rates, {}) == 50e6
    assert slowest_share(rates, routes) == 300e6, "0-2 and 0-3 carry two chunks and more"
    assert loads(4, routes)[0] == {
        frozenset(pair): many
        for pair, many in {(0, 1): 0, (0, 2): 2, (0, 3): 3, (1, 2): 1, (1, 3): 2, (2, 3): 0}.items()
    }


def test_three_nodes_have_a_way_round() -> None:
    assert best_routes(table(3, {(1, 2): 20e6}, other=500e6), near(3)) == {(1, 2): 0}


@pytest.mark.parametrize(
    "pairs",
    [
        {},
        {(0, 1): 420e6},  # within what measurements differ by
        {(0, 1): 50e6, (0, 2): 50e6, (0, 3): 50e6},  # node 0's own link is slow
    ],
)
def test_equal_links_and_a_slow_node_have_no_routes(pairs: Pairs) -> None:
    assert best_routes(table(4, pairs, other=500e6), near(4)) == {}


def test_what_a_node_sends_to_all_others_limits_what_it_passes_on() -> None:
    """Several links of 320 Mbit/s at a node, which share its network card or do not."""
    rates = table(4, {(0, 1): 78e6, (0, 2): 83e6, (0, 3): 309e6, (1, 2): 318e6, (1, 3): 57e6, (2, 3): 320e6}, other=1.0)
    assert best_routes(rates, near(4)) == {}
    assert best_routes(rates, near(4), [320e6] * 4) == {}
    assert best_routes(rates, near(4), [1e9] * 4) == {(1, 3): 2}


def test_a_way_round_that_is_far_is_not_taken() -> None:
    rates = table(3, {(0, 1): 50e6}, other=1e9)
    latencies = table(3, {(0, 1): 1e-3}, other=5e-3)  # 64 KiB take 10.5 ms directly and 0.5 ms through node 2
    assert best_routes(rates, latencies) == {(0, 1): 2}
    assert best_routes(rates, table(3, {(0, 1): 1e-3}, other=6e-3)) == {}


@pytest.mark.parametrize("seed", range(40))
def test_what_is_routed_is_clearly_faster(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(3, 9)
    pairs = {pair: 10 ** draw.uniform(7, 9) for pair in itertools.combinations(range(count), 2)}
    rates = table(count, pairs, other=1.0)
    routes = best_routes(rates, near(count))
    assert all(a < b and via not in (a, b) for (a, b), via in routes.items())
    if routes:
        assert seconds(rates, routes) * 1.2 <= seconds(rates, {}) * (1 + 1e-9)
        links, _ = loads(count, routes)
        assert slowest_share(rates, routes) == pytest.approx(
            min(rates[min(link)][max(link)] / many for link, many in links.items() if many)
        )
    assert best_routes(rates, near(count)) == routes


def test_many_random_nodes_have_routes() -> None:
    """Of the forty matrices above, a good part."""
    found = 0
    for seed in range(40):
        draw = random.Random(seed)
        count = draw.randint(3, 9)
        pairs = {pair: 10 ** draw.uniform(7, 9) for pair in itertools.combinations(range(count), 2)}
        found += bool(best_routes(table(count, pairs, other=1.0), near(count)))
    assert found > 15


def test_of_two_ways_round_the_one_with_faster_links_is_taken() -> None:
    """Both nodes have as much to send; behind node 3 are faster links."""
    rates = table(4, {(0, 1): 50e6, (0, 2): 600e6, (1, 2): 600e6}, other=1e9)
    assert best_routes(rates, near(4), [1e9] * 4) == {(0, 1): 3}
