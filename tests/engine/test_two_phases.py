"""Exchanges whose payload is final before their end: nobody waits for the peers until the next one."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.algorithms import LowPrecisionDecentralized
from bagua.codecs import Int4, MinMaxUInt8
from bagua.comm.groups import Groups
from bagua.engine.hooks import attachments
from bagua.errors import CommunicationError
from bagua.exchanges import AllReduce, DifferenceGossip, Exchange, Hierarchical
from bagua.topologies import Ring
from tests.rank_threads import run_teams, run_threads

GOSSIP = DifferenceGossip(Ring(), Int4())


def in_phases(groups: Groups, whole: bool, device: torch.device, exchange: Exchange = GOSSIP) -> list[Tensor]:
    """On a rank: the payload after each of three exchanges, and what is remembered."""
    x, held, seen = torch.randn(1003, generator=torch.Generator().manual_seed(groups.rank)).to(device), {}, []
    with torch.no_grad():
        state = exchange.init(torch.zeros_like(x), groups)
        for step in range(3):
            if whole:
                exchange.run(x, state, groups, step)
            else:
                exchange.begin(x, state, groups, held)
                seen.append(x.cpu().clone())
                exchange.finish(state, groups, held)
                assert torch.equal(seen.pop(), x.cpu()), "final after the first phase"
            seen.append(x.cpu().clone())
            x += 0.1 * groups.rank
    return [*seen, *(each.cpu() for each in state.values())]


def test_the_phases_are_the_exchange(device: torch.device) -> None:
    runs = [run_threads(3, in_phases, whole, device, staged=device.type == "cuda") for whole in (True, False)]
    for whole, phases in zip(*runs, strict=True):
        assert all(map(torch.equal, whole, phases))


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1, 1), ("a:0", "a:0", "a:1", "b:2", "b:3")])
def test_the_phases_are_the_exchange_of_leaders(nodes: tuple[Any, ...]) -> None:
    runs = [
        run_threads(5, in_phases, whole, torch.device("cpu"), Hierarchical(GOSSIP), nodes=nodes, hierarchical=True)
        for whole in (True, False)
    ]
    for whole, phases in zip(*runs, strict=True):
        assert all(map(torch.equal, whole, phases))
    assert sorted(map(len, runs[0])) == [3, 3, 3, 5, 5], "leaders remember replicas"


def test_which_exchanges_have_phases() -> None:
    gossip = DifferenceGossip(Ring(), MinMaxUInt8())
    assert gossip.two_phases and Hierarchical(gossip).two_phases
    assert not AllReduce().two_phases and not Hierarchical(AllReduce()).two_phases
    with pytest.raises(NotImplementedError, match="all_reduce has no phases"):
        AllReduce().begin(torch.zeros(1), {}, None, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1, 1)])
@pytest.mark.parametrize("codec", ["minmax_uint8", "int4"])
def test_a_step_ends_before_the_peers_have_come(codec: str, nodes: tuple[int, ...]) -> None:
    first, ended = threading.Event(), []

    def train(team: Any) -> None:
        model = nn.Linear(40, 30)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.distribute(model, optimizer, LowPrecisionDecentralized(codec=codec), process_group=team, bucket_bytes=600)
        assert bool(attachments[model].engine.state.algorithm.hierarchical) == (len(nodes) > 2)
        for step in range(3):
            if nodes[team.rank] == 1 and step == 1:  # before the first one all ranks agree on the weights
                assert first.wait(60), "node 0 waits for node 1"
            optimizer.zero_grad()
            model(torch.ones(2, 40)).square().mean().backward()
            optimizer.step()
            if team.rank == 0 and step == 1:
                first.set()
        ended.append(team.rank)
        bagua.detach(model)

    run_teams(len(nodes), train, nodes=nodes)
    assert len(ended) == len(nodes)


def test_what_failed_in_the_second_phase_is_raised_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("connection reset by a test")

    def train(team: Any) -> str:
        model = nn.Linear(40, 30)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.distribute(model, optimizer, LowPrecisionDecentralized(), process_group=team)
        model(torch.ones(2, 40)).square().mean().backward()
        optimizer.step()
        model(torch.ones(2, 40)).square().mean().backward()
        with pytest.raises(CommunicationError, match="connection reset by a test") as caught:
            optimizer.step()
        return str(caught.value)

    monkeypatch.setattr(DifferenceGossip, "finish", fail)
    assert all("difference_gossip" in message for message in run_teams(2, train))


def test_an_exchange_must_be_prepared() -> None:
    class Unprepared(LowPrecisionDecentralized):
        def setup(self, ctx: Any) -> None:
            """Prepares nothing."""

    def train(team: Any) -> None:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.distribute(model, optimizer, Unprepared(), process_group=team)
        model(torch.ones(2, 4)).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"was launched without ctx\.prepare"):
            optimizer.step()

    run_teams(2, train)
