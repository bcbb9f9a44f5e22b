"""Links are measured between all pairs, in rounds in which no host is in two pairs."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua.auto import Link, Links
from bagua.auto.links import _better, _slow_pairs, measure_links, rounds_of
from bagua.comm.team import Team
from tests.rank_threads import run_teams


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_rounds_have_every_pair_once_and_no_host_twice(count: int) -> None:
    rounds = rounds_of(count)
    if count < 5:
        assert sorted(chain(*rounds)) == list(combinations(range(count), 2))
    for pairs in rounds:
        hosts = list(chain(*pairs))
        assert len(hosts) == len(set(hosts))


def test_many_hosts_take_no_more_rounds() -> None:
    assert len(rounds_of(64)) <= 4
    assert all(len(pairs) == 32 for pairs in rounds_of(64))
    assert rounds_of(1) == [[]]


def measured(team: Any) -> Links:
    nodes = team.discover_nodes([message.decode() for message in team.all_gather_bytes("nodes", team.node.encode())])
    return measure_links(team, nodes, torch.device("cpu"))


def test_all_ranks_know_every_way() -> None:
    found = run_teams(3, measured, nodes=[0, 1, 2])
    assert found[0] == found[1] == found[2]
    assert sorted((each.source, each.target) for each in found[0].between) == [
        (a, b) for a in range(3) for b in range(3) if a != b
    ]
    assert found[0].within == ()
    assert all(each.one_flow > 0 and each.several_flows > 0 and each.latency_s > 0 for each in found[0].between)


def test_within_a_node_two_ranks_are_measured() -> None:
    links, _, other, _ = run_teams(4, measured, nodes=[0, 0, 1, 1])
    assert links == other
    assert {(each.source, each.target) for each in links.between} == {(0, 2), (2, 0)}
    assert {(each.source, each.target) for each in links.within} == {(0, 1), (1, 0), (2, 3), (3, 2)}


class InOrder:
    """A backend whose sends and receives of a pair run one after the other, as over NCCL: none begins before its turn.

    Args:
        pg: of gloo.
    """

    def __init__(self, pg: Any) -> None:
        self._pg = pg
        self._pairs: dict[int, ThreadPoolExecutor] = {}

    def _begin(self, start: Callable[..., Any], tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        pair = self._pairs.setdefault(peer, ThreadPoolExecutor(1))
        done = pair.submit(lambda: start(tensors, peer, tag).wait())
        return SimpleNamespace(wait=done.result)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._begin(self._pg.send, tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._begin(self._pg.recv, tensors, peer, tag)


def measured_in_order(team: Any) -> Links:
    opened = team.open

    def in_order(name: str) -> Any:
        groups = opened(name)
        groups.world.p2p = InOrder(groups.world.pg)
        return groups

    team.open = in_order
    return measured(team)


@pytest.mark.parametrize("nodes", [[0, 1, 2], [0, 0, 1, 1]])
def test_transfers_of_a_pair_may_run_one_after_the_other(nodes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagua.auto.links.replace", lambda team, **_: team)  # a copy would have the class's `open`
    found = run_teams(len(nodes), measured_in_order, nodes=nodes, timeout_s=20)
    assert len(found[0].between) == (6 if len(nodes) == 3 else 2)


def made(rates: dict[tuple[int, int], float]) -> Links:
    return Links(tuple(Link(a, b, rate, 0.9 * rate, 1e-3) for (a, b), rate in rates.items()), (), 0.1)


def test_the_slowest_host_counts_and_a_single_disturbed_measurement_does_not() -> None:
    rates = {(a, b): 1e9 for a in range(4) for b in range(4) if a != b}
    assert made({**rates, (0, 1): 2e8}).bandwidth == 1e9
    slow_in = {pair: 1e8 if pair[1] == 2 else rate for pair, rate in rates.items()}
    assert made(slow_in).bandwidth == 1e8
    assert made(slow_in).asymmetry == 10.0


def two_sites() -> dict[tuple[int, int], float]:
    """Hosts 0 and 1, 2 and 3: 1 Gbit/s within a site, 50 Mbit/s for each pair between them."""
    return {(a, b): 1e9 if a // 2 == b // 2 else 5e7 for a in range(4) for b in range(4) if a != b}


def test_ways_slower_than_the_hosts_limit_rings_and_meshes() -> None:
    links = made(two_sites())
    assert (links.bandwidth, links.ring_bandwidth, links.mesh_bandwidth) == (1e9, 5e7, 1.5e8)
    equal = made(dict.fromkeys(two_sites(), 1e8))
    assert equal.bandwidth == equal.ring_bandwidth == equal.mesh_bandwidth == 1e8
    assert links.differs(equal, 1.5)
    slower = made({pair: min(rate, 1e9) if rate > 1e8 else 2e7 for pair, rate in two_sites().items()})
    assert slower.bandwidth == links.bandwidth
    assert slower.differs(links, 1.5)
    assert not made({pair: 1.1 * rate for pair, rate in two_sites().items()}).differs(links, 1.5)


def test_slow_pairs_are_measured_again_and_the_best_counts() -> None:
    rates = {(a, b): 1e8 for a in range(4) for b in range(4) if a != b}
    disturbed = made({**rates, (0, 1): 1e7}).between
    assert _slow_pairs(disturbed) == {(0, 1)}
    assert _slow_pairs(made(rates).between) == set()
    assert _slow_pairs(made({pair: 1e7 if 2 in pair else 1e8 for pair in rates}).between) == set()  # a slow host
    again = made({(0, 1): 9e7, (1, 0): 2e7}).between
    found = {(each.source, each.target): each.one_flow for each in _better(disturbed, again)}
    assert (found[0, 1], found[1, 0], found[2, 3]) == (9e7, 1e8, 1e8)


def test_links_are_plain_data() -> None:
    links = replace(made({(0, 1): 1e9, (1, 0): 2e9}), outward=(1.5e9, 2.5e9))
    assert Links.from_dict(json.loads(json.dumps(links.as_dict()))) == links


def measured_ways_out(team: Team) -> tuple[float, ...]:
    nodes = [[0, 1], [2], [3]]
    return measure_links(team, nodes, torch.device("cpu"), every_pair=True).outward


def test_every_node_sends_to_all_others_at_once() -> None:
    """Once all pairs are measured; ranks that are not the first of their node only learn of it."""
    found = run_teams(4, measured_ways_out, nodes=[0, 0, 1, 2])
    assert len(found[0]) == 3 and all(rate > 1e6 for rate in found[0])
    assert found == [found[0]] * 4
