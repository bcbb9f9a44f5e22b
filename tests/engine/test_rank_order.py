"""Ranks in another order: the same bits as of renumbered ranks, one order on all ranks, and wrong orders refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.auto import links as measuring
from bagua.auto.links import Link, Links
from bagua.checkpoint.reshard import load_algorithm
from bagua.comm.mesh import why_no_mesh
from bagua.engine.averaging import mean_optimizers
from bagua.engine.hooks import attachments
from tests.engine.training import batch, seeded
from tests.rank_threads import run_teams

ORDER = (0, 2, 1, 3)
CODED = {"codec": "int4", "error_feedback": True}


def made(team: Any, algorithm: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)), team.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return bagua.distribute(model, optimizer, algorithm, process_group=team, **options), optimizer


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, data_of: int, count: int = 4) -> list[torch.Tensor]:
    for step in range(count):
        optimizer.zero_grad()
        model(batch(data_of, step)).square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def trained(team: Any, algorithm: str, order: tuple[int, ...], options: dict[str, Any], data: tuple[int, ...]) -> Any:
    model, optimizer = made(team, algorithm, rank_order=order, **options)
    found = steps(model, optimizer, data[team.rank])
    world = attachments[model].engine.groups.world
    assert world.ranks == order and world.ranks[world.rank] == team.rank and not world.direct
    assert all(lane.groups.world.ranks == world.ranks for lane in attachments[model].engine.pool.all)
    bagua.detach(model)
    return found


@pytest.mark.parametrize(
    ("algorithm", "options", "nodes", "order"),
    [
        ("gradient_allreduce", {}, [0, 1, 2, 3], ORDER),
        ("gradient_allreduce", CODED, [0, 1, 2, 3], ORDER),
        ("low_precision_decentralized", {}, [0, 1, 2, 3], ORDER),
        ("decentralized", {"peer_selection_mode": "shift_one"}, [0, 1, 2, 3], ORDER),
        ("decentralized", {"topology": "ring", "hierarchical": True}, [0, 0, 1, 2, 3], (0, 1, 3, 2, 4)),
    ],
)
def test_bits_are_those_of_renumbered_ranks(algorithm: str, options: Any, nodes: list[int], order: Any) -> None:
    size = len(nodes)
    ordered = run_teams(size, trained, algorithm, order, options, tuple(range(size)), nodes=nodes)
    numbers = [nodes[rank] for rank in order]
    plain = run_teams(size, trained, algorithm, tuple(range(size)), options, order, nodes=numbers)
    for place, rank in enumerate(order):
        assert all(map(torch.equal, ordered[rank], plain[place])), f"rank {rank} is number {place} in the rings"


def test_a_ring_begins_with_rank_0_and_a_switch_keeps_it() -> None:
    def main(team: Any) -> Any:
        model, optimizer = made(team, "gradient_allreduce", rank_order=[2, 1, 3, 0])
        steps(model, optimizer, team.rank)
        first = attachments[model].engine.groups.world.ranks
        bagua.distribute(model, optimizer, "bytegrad")
        steps(model, optimizer, team.rank)
        return first, attachments[model].engine.groups.world.ranks, bagua.stats(model).notices

    for first, second, notices in run_teams(4, main, nodes=[0, 1, 2, 3]):
        assert first == second == (0, 2, 1, 3)
        assert notices == ()


def test_state_of_another_rank_is_that_ranks() -> None:
    """Momenta that only some ranks have are copied by rank, not by place in the ring."""

    def main(team: Any) -> Any:
        model, optimizer = made(team, "gradient_allreduce", rank_order=ORDER)
        engine = attachments[model].engine
        weight = model[0].weight
        if team.rank == 2:
            optimizer.state[weight]["count"] = torch.tensor([7])
        mean_optimizers([optimizer], {"weight": weight}, team, engine.groups.world, torch.device("cpu"))
        return optimizer.state[weight]["count"].item()

    assert run_teams(4, main, nodes=[0, 1, 2, 3]) == [7] * 4


def slow_except(*fast: tuple[int, int]) -> Any:
    """A measurement by which links are slow, but for a few."""

    def measure(team: Any, nodes: Any, device: torch.device, *, every_pair: bool = False) -> Links:
        assert every_pair
        team.all_gather_bytes("measured", b"-")
        leaders = [node[0] for node in nodes]
        rates = {
            pair: 1e9 if pair in fast or pair[::-1] in fast else 5e7 for pair in itertools.permutations(leaders, 2)
        }
        return Links(
            tuple(Link(a, b, rate, rate, 1e-3) for (a, b), rate in rates.items()), (), 2.0, tuple(9e9 for _ in nodes)
        )

    return measure


def measured(team: Any, **options: Any) -> Any:
    options = {"rank_order": "measured", "routes": "direct", **options}
    model, optimizer = made(team, "low_precision_decentralized", hierarchical=False, **options)
    steps(model, optimizer, team.rank, 2)
    world = attachments[model].engine.groups.world
    return world.ranks, bagua.stats(model).notices, world.direct


def test_measured_links_make_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measure_links", slow_except((0, 3), (3, 1), (1, 4), (4, 0)))
    for ranks, (line,), _ in run_teams(5, measured, nodes=[0, 1, 1, 3, 4]):
        assert ranks == (0, 3, 1, 2, 4), "ranks 1 and 2 share a host"
        assert "measured the links of 4 hosts in 2.0 s; rings in the order 0,3,1,2,4" in line
        assert "slowest link 1000 Mbit/s, and 50 in the order of the ranks" in line


def test_equal_links_keep_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measure_links", slow_except())
    for ranks, (line,), direct in run_teams(4, measured, nodes=[0, 1, 2, 3]):
        assert ranks == (0, 1, 2, 3) and "the ranks keep their order" in line and direct
    monkeypatch.setattr(measuring, "measure_links", slow_except((0, 1), (1, 2), (2, 3), (3, 0)))
    for ranks, (line,), direct in run_teams(4, measured, nodes=[0, 1, 2, 3]):
        assert ranks == (0, 1, 2, 3) and "the ranks keep their order" in line
        assert not direct, "small sums would take the slow links"


def test_links_are_measured_and_agreed_on() -> None:
    found = run_teams(4, measured, nodes=[0, 1, 2, 3])
    assert len({ranks for ranks, _, _ in found}) == 1 and sorted(found[0][0]) == [0, 1, 2, 3]
    ((few, (line,), _), *_) = run_teams(3, measured, nodes=[0, 1, 2])
    assert few == (0, 1, 2) and "none was measured" in line


def routed(team: Any, options: dict[str, Any]) -> Any:
    model, optimizer = made(team, "bytegrad", **options)
    weights = steps(model, optimizer, team.rank, 3)
    engine = attachments[model].engine
    found = dict(engine.team.routes), engine.team.order, bagua.stats(model).notices, weights
    bagua.detach(model)
    return found


needs_mesh = pytest.mark.skipif(bool(why_no_mesh()), reason=why_no_mesh() or "there is one")


@needs_mesh
@pytest.mark.parametrize("asked", [{"routes": "measured"}, {"rank_order": "measured"}])
def test_slow_pairs_send_through_other_ranks(monkeypatch: pytest.MonkeyPatch, asked: Any) -> None:
    """Ranks 0 and 1 are far from each other; the two ranks of the third host share what they send."""
    monkeypatch.setattr(measuring, "measure_links", slow_except((0, 2), (1, 2)))
    nodes = [0, 1, 2, 2]
    plain = run_teams(4, routed, {"hierarchical": False}, nodes=nodes)
    found = run_teams(4, routed, {"hierarchical": False, **asked}, nodes=nodes)
    for (routes, order, notices, weights), (no_routes, *_, without) in zip(found, plain, strict=True):
        assert routes == {(0, 1): 2} and not no_routes and order == ()
        assert (
            "routes: measured the links of 3 hosts in 2.0 s; pairs of ranks that send through another one:"
            in notices[-1]
        )
        assert "0-1 through 2: the slowest pair has 500 Mbit/s, and 50 directly" in notices[-1]
        assert all(map(torch.equal, weights, without)), "the same bits"


@needs_mesh
def test_ranks_of_a_host_share_what_they_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measure_links", slow_except((0, 4), (2, 4)))
    found = run_teams(6, routed, {"routes": "measured"}, nodes=[0, 0, 1, 1, 2, 2])
    for routes, *_ in found:
        assert routes == {(0, 2): 4, (0, 3): 5, (1, 2): 5, (1, 3): 4}


@needs_mesh
def test_routes_are_kept_by_a_switch_and_may_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measure_links", slow_except((0, 2), (1, 2)))

    def main(team: Any) -> Any:
        model, optimizer = made(team, "gradient_allreduce", routes="measured")
        found = [attachments[model].engine.team.routes]
        bagua.distribute(model, optimizer, "bytegrad")
        found.append(attachments[model].engine.team.routes)
        bagua.distribute(model, optimizer, "bytegrad", routes="direct")
        return [*found, attachments[model].engine.team.routes]

    assert run_teams(3, main, nodes=[0, 1, 2]) == [[{(0, 1): 2}, {(0, 1): 2}, {}]] * 3

    over_gloo = {"routes": "measured", "transport": "gloo"}
    for routes, _, notices, _ in run_teams(3, routed, over_gloo, nodes=[0, 1, 2]):
        assert not routes and notices == (
            "routes: none, since the native transport does not carry this module's exchanges",
        )


@needs_mesh
def test_equal_links_have_no_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measure_links", slow_except())
    monkeypatch.setenv("BAGUA_ROUTES", "measured")
    for routes, _, notices, _ in run_teams(3, routed, {}, nodes=[0, 1, 2]):
        assert not routes and notices[-1] == "routes: measured the links of 3 hosts in 2.0 s; all pairs send directly"
    for routes, _, notices, _ in run_teams(2, routed, {}, nodes=[0, 1]):
        assert not routes and notices == ("routes: none, since there is no third host",)
    monkeypatch.setenv("BAGUA_ROUTES", "no")
    with pytest.raises(AssertionError, match="BAGUA_ROUTES: expected one of 'measured', 'direct', got 'no'"):
        run_teams(2, routed, {})


def test_wrong_routes_are_refused() -> None:
    def main(team: Any) -> str:
        with pytest.raises(ValueError) as caught:
            made(team, "gradient_allreduce", routes="fastest")
        return str(caught.value)

    assert all("routes: expected one of 'measured', 'direct', got 'fastest'" in each for each in run_teams(2, main))

    def differing(team: Any) -> str:
        with pytest.raises(bagua.RankMismatchError) as caught:
            made(team, "gradient_allreduce", routes="direct" if team.rank else None)
        return str(caught.value)

    assert all("routes differs" in found for found in run_teams(2, differing))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("fastest", "rank_order: expected 'measured' or a list"),
        ([0, 1, 1, 3], "rank_order: expected each rank from 0 on once"),
        ([0, 1, 2], "holds 3 ranks, and there are 4"),
        ([0, True, 2, 3], "rank_order: expected 'measured' or a list of ranks"),
        (3, "rank_order: expected 'measured' or a list of ranks"),
        ([0, 2, 1, 3], "the ranks of one host must follow one another, and 0, 1 do not"),
    ],
)
def test_wrong_orders_are_refused(order: Any, message: str) -> None:
    def main(team: Any) -> str:
        with pytest.raises((ValueError, TypeError)) as caught:
            made(team, "gradient_allreduce", rank_order=order)
        return str(caught.value)

    assert all(message in found for found in run_teams(4, main, nodes=[0, 0, 1, 1]))


def test_ranks_must_agree_and_the_environment_is_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def differing(team: Any) -> str:
        with pytest.raises(bagua.RankMismatchError) as caught:
            made(team, "gradient_allreduce", rank_order=ORDER if team.rank else None)
        return str(caught.value)

    assert all("rank_order differs" in found for found in run_teams(4, differing, nodes=[0, 1, 2, 3]))

    def default(team: Any) -> Any:
        model, _ = made(team, "gradient_allreduce")
        return attachments[model].engine.groups.world.ranks

    monkeypatch.setenv("BAGUA_RANK_ORDER", "0, 2,1,3")
    assert run_teams(4, default, nodes=[0, 1, 2, 3]) == [ORDER] * 4
    monkeypatch.setenv("BAGUA_RANK_ORDER", "0,x")
    with pytest.raises(AssertionError, match="BAGUA_RANK_ORDER: expected 'measured' or a list"):
        run_teams(2, default)


def test_simulated_ranks_take_a_list_only() -> None:
    def run(order: Any, **options: Any) -> Any:
        return bagua.simulate(
            "bytegrad",
            ranks=4,
            model=lambda: nn.Linear(6, 2),
            loss=lambda module, rank, step: module(batch(rank, step)).square().mean(),
            steps=2,
            nodes=[0, 1, 2, 3],
            rank_order=order,
            **options,
        )

    assert run(ORDER).consensus.max().item() == 0
    with pytest.raises(ValueError, match="simulated ranks have none"):
        run("measured")
    with pytest.raises(ValueError, match='routes: "measured" measures links, and simulated ranks have none'):
        run(None, routes="measured")


def test_state_of_another_order_is_refused() -> None:
    """Residuals belong to chunks, and replicas to neighbours: both are others in another order."""

    def main(team: Any) -> str:
        model, optimizer = made(team, "gradient_allreduce", rank_order=ORDER, **CODED)
        steps(model, optimizer, team.rank)
        saved = bagua.state_dict(model)
        before = steps(model, optimizer, team.rank)
        bagua.detach(model)
        model, optimizer = made(team, "gradient_allreduce", **CODED)
        with pytest.raises(ValueError, match=r"pass rank_order=\[0, 2, 1, 3\]"):
            bagua.load_state_dict(model, saved)
        bagua.detach(model)
        model, optimizer = made(team, "gradient_allreduce", rank_order=ORDER, **CODED)
        bagua.load_state_dict(model, saved)
        return f"{len(before)}"

    run_teams(4, main, nodes=[0, 1, 2, 3])


@pytest.mark.parametrize("size", [2, 3])
def test_other_numbers_of_ranks_get_the_chunks_in_their_order(size: int) -> None:
    def save(team: Any) -> Any:
        model, optimizer = made(team, "gradient_allreduce", rank_order=ORDER, **CODED)
        steps(model, optimizer, team.rank)
        found = bagua.state_dict(model)
        bagua.detach(model)
        return found

    saved = run_teams(4, save, nodes=[0, 1, 2, 3])
    assert saved[0]["rank_order"] == list(ORDER)

    def load(team: Any) -> Any:
        model, optimizer = made(team, "gradient_allreduce", **CODED)
        load_algorithm(attachments[model].engine, saved, "here")
        found = bagua.state_dict(model)
        steps(model, optimizer, team.rank)
        bagua.detach(model)
        return found

    loaded = run_teams(size, load, nodes=list(range(size)))
    assert loaded[0]["rank_order"] == [], "another number of ranks does not inherit it"
    for number, entry in enumerate(saved[0]["states"]):
        numel = entry["tensors"]["residual"].numel()
        old = torch.cat([saved[rank]["states"][number]["tensors"]["chunk_residual"] for rank in ORDER])[:numel]
        if size == 2:  # they have no chunks, and owe it themselves
            owed = torch.stack([each["states"][number]["tensors"]["residual"].view(-1) for each in saved]).mean(0)
            for each in loaded:
                torch.testing.assert_close(each["states"][number]["tensors"]["residual"].view(-1), owed + old)
            continue
        new = torch.cat([each["states"][number]["tensors"]["chunk_residual"] for each in loaded])[:numel]
        assert old.any() and torch.equal(old, new)
