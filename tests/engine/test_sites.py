"""Hierarchies of several levels: ranks of a host, hosts of a site, sites."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.codecs import Identity, MinMaxUInt8
from bagua.comm.groups import Groups
from bagua.comm.node_keys import Sites, node_key
from bagua.comm.team import Team
from bagua.engine.distributed_module import attachment_of
from bagua.exchanges import AllReduce, Exchange, Gossip, Hierarchical, ScatterGather
from tests.rank_threads import run_teams, run_threads

# Hosts of 2, 1 and 3 ranks, and one alone, which is all that its site has.
UNEVEN = ["a:0", "a:0", "a:1", "b:2", "c:3", "b:2", "c:4", "c:4", "c:4"]
SITES = ((0, 1, 2), (3, 5), (4, 6, 7, 8))


def sizes(groups: Groups) -> tuple[int, ...]:
    """Ranks of this host, hosts of the site, sites; 0 where this rank has no such group."""
    return tuple(0 if each is None else each.size for each in (groups.intra, groups.site, groups.inter))


def layout(groups: Groups) -> tuple[Any, ...]:
    return groups.nodes, sizes(groups), groups.num_summed


def test_groups_of_a_host_of_a_site_and_of_sites() -> None:
    found = run_threads(9, layout, nodes=UNEVEN, hierarchical=True)
    assert all(nodes == SITES for nodes, *_ in found)
    assert [sizes for _, sizes, _ in found] == [
        (2, 2, 3),
        (2, 0, 0),
        (1, 2, 0),
        (2, 0, 3),  # one host is the site
        (1, 2, 3),
        (2, 0, 0),
        (3, 2, 0),
        (3, 0, 0),
        (3, 0, 0),
    ]
    assert [summed for *_, summed in found] == [3, 3, 3, 2, 4, 2, 4, 4, 4]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["a:0", "a:1", "b:2", "b:3"], [(2, 0, 2), (2, 0, 0)] * 2),  # one rank a host: no level of hosts
        (["a:0", "a:0", "a:1", "a:1"], [(2, 0, 2), (2, 0, 0)] * 2),  # one site: hosts are the nodes
        (["a:0", "b:1", "c:2", "d:3"], [(1, 0, 4)] * 4),
    ],
)
def test_levels_that_are_not_there(nodes: list[str], expected: list[tuple[int, ...]]) -> None:
    assert [each[1] for each in run_threads(4, layout, nodes=nodes, hierarchical=True)] == expected


def test_the_key_of_a_node_has_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "3")
    monkeypatch.delenv("BAGUA_SITE", raising=False)
    assert node_key() == "GROUP_RANK=3"
    monkeypatch.setenv("BAGUA_SITE", "paris")
    assert node_key() == "GROUP_RANK=3\nparis"


def exchanged(groups: Groups, exchange: Exchange, x_RN: Tensor) -> tuple[Tensor, int, tuple[int, ...]]:
    """The result, what was sent between sites, and what was sent in the site."""
    x_N = x_RN[groups.world.rank].clone()
    state = exchange.init(x_N, groups)
    exchange.run(x_N, state, groups, 0)
    between = groups.inter.meter.sent if groups.inter is not None else 0
    return x_N, between, tuple(each.meter.sent for each in (groups.intra, groups.site) if each is not None)


@pytest.mark.parametrize("exchange", [ScatterGather(Identity()), AllReduce(), ScatterGather(MinMaxUInt8())])
@pytest.mark.parametrize("nodes", [UNEVEN, [f"{'abc'[rank // 3]}:{rank // 3}" for rank in range(9)]])
def test_the_mean_is_that_of_all_ranks(exchange: Exchange, nodes: list[str]) -> None:
    x_RN = torch.randn(9, 5000, generator=torch.Generator().manual_seed(4))
    found = run_threads(9, exchanged, Hierarchical(exchange), x_RN, nodes=nodes, hierarchical=True)
    error = (found[0][0] - x_RN.mean(0)).norm() / x_RN.mean(0).norm()
    assert error < (0.02 if exchange.lossy else 1e-6)
    assert all(torch.equal(found[0][0], each) for each, *_ in found)
    whole = exchange.bytes_per_rank(5000, 3)
    assert all(sent == pytest.approx(whole, rel=0.02) for _, sent, _ in found if sent)
    assert sum(sent > 0 for _, sent, _ in found) == 3, "the first rank of each site alone"


def test_with_a_sparse_exchange_each_site_counts_once() -> None:
    x_RN = torch.randn(9, 100, generator=torch.Generator().manual_seed(5))
    exchange = Hierarchical(Gossip(bagua.topologies.get("ring")))
    found = run_threads(9, exchanged, exchange, x_RN, nodes=UNEVEN, hierarchical=True)
    mean = torch.stack([x_RN[list(site)].mean(0) for site in SITES]).mean(0)  # a ring of 3 is all
    for each, *_ in found:
        torch.testing.assert_close(each, mean)


def train(team: Team, algorithm: str, options: dict[str, Any]) -> tuple[list[Tensor], Any]:
    """Weights in the end, and the groups' sizes, of the first lane and of all."""
    torch.manual_seed(0)
    weights = torch.randn(3, 20, 20, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(3)))
    for layer, weight in zip(model, weights, strict=True):
        assert isinstance(layer, nn.Linear)
        layer.weight.data.copy_(weight)
        layer.bias.data.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = bagua.distribute(model, optimizer, algorithm, process_group=team, num_lanes=2, bucket_bytes=2000, **options)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * team.rank + step))
        model(x).square().mean().mul(0.01).backward()
        optimizer.step()
    shapes = [sizes(lane.groups) for lane in attachment_of(model).engine.pool.shared]
    bagua.detach(model)
    return [param.detach().clone() for param in model.parameters()], shapes


@pytest.mark.parametrize("algorithm", ["bytegrad", "gradient_allreduce", "low_precision_decentralized"])
def test_a_training_over_sites(algorithm: str) -> None:
    nodes = ["a:0", "a:0", "a:1", "b:2", "b:2"]
    found = run_teams(5, train, algorithm, {"hierarchical": True}, nodes=nodes)
    flat = run_teams(5, train, algorithm, {"hierarchical": False}, nodes=nodes)
    assert found[0][1] == [(2, 2, 2), (2, 2, 2)] and found[2][1] == [(1, 2, 0), (1, 2, 0)]
    if algorithm == "low_precision_decentralized":
        return
    for weights, _ in found:
        assert all(map(torch.equal, weights, found[0][0]))
    for mine, theirs in zip(found[0][0], flat[0][0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 if algorithm == "gradient_allreduce" else 1e-2)


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "local_sgd", "diloco"])
def test_exchanges_are_hierarchical_over_sites_by_default(algorithm: str) -> None:
    nodes = ["a:0", "a:1", "b:2", "b:3"]
    options = {"codec": "identity"} if algorithm in ("local_sgd", "diloco") else {}
    assert run_teams(4, train, algorithm, options, nodes=nodes)[0][1] == [(2, 0, 2)] * 2


def test_groups_know_that_their_nodes_are_sites() -> None:
    """As guards, and the choice of the algorithm, ask for the default of `hierarchical` later."""

    def kinds(groups: Groups) -> bool:
        return isinstance(groups.nodes, Sites)

    assert run_threads(3, kinds, nodes=["a:0", "b:1", "b:2"], hierarchical=True) == [True] * 3
    assert run_threads(3, kinds, nodes=[0, 1, 1], hierarchical=True) == [False] * 3


def test_exact_sums_are_not_hierarchical_over_nodes_by_default() -> None:
    assert run_teams(4, train, "gradient_allreduce", {}, nodes=[0, 0, 1, 1])[0][1] == [(0, 0, 0)] * 2


def test_ranks_of_a_job_where_one_has_no_site_are_all_told() -> None:
    with pytest.raises(AssertionError) as failed:
        run_teams(3, train, "bytegrad", {}, nodes=["a:0", "b:1", 2])
    assert len(re.findall("BAGUA_SITE: rank 2 has none, and rank 0 has 'a'", str(failed.value))) == 3
