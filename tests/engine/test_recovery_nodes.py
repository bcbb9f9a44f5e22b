"""Hosts with two ranks: the leader of one is lost and comes back, and the hierarchy follows the members."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.comm import abortable_nccl
from bagua.engine.hooks import attachments
from bagua.engine.recovery import limits
from tests.elastic.nccl_stand_in import StandIn
from tests.engine.membership_store import Killed, drop_rank
from tests.engine.shared_membership import SharedMembership
from tests.rank_threads import run_teams

RANKS, LEAVES, TOTAL = 2, 3, 13  # ranks of a host; steps of the lost rank; and of the others
RETURNS = 9  # in gossip ranks may be three steps ahead of the lost one before they notice
LIMIT_S = 60.0


class Script:
    """Four ranks, of which the first of a host is lost at its step `LEAVES` and comes back as another one.

    Args:
        store: host:port of the store in which groups meet.
        host: of the rank that is lost.
        within: it is lost in the step, when its exchange has ended; else before.
        backend: of the exchanges.
    """

    def __init__(self, store: str, host: int, within: bool, backend: str = "gloo") -> None:
        self.names, self.host, self.within, self.backend = ["a", "b"], host, within, backend
        self.members = SharedMembership(self.names, store, self.called, RANKS)
        self.here = threading.local()
        self.at: dict[int, int] = {}  # the step that each rank has come to

    def called(self, name: str, what: str) -> None:
        """A rank asks its agent: that it may begin a step, or apply it."""
        here, members = self.here, self.members
        if here.lost and here.step == LEAVES and what == ("finish" if self.within else "start"):
            raise Killed
        with members.changed:
            self.at[threading.get_ident()] = here.step
            members.changed.notify_all()
            if here.step == RETURNS and what == "start":  # the others do not get to the end without it
                back = members.changed.wait_for(lambda: (self.names[self.host], RANKS) in members.progress, LIMIT_S)
                assert back

    def train(self, team: Any, algorithm: str, options: dict[str, Any]) -> dict[str, Any]:
        """One rank of the four; the one that is lost comes back in the same thread."""
        here, (host, seat) = self.here, divmod(team.rank, RANKS)
        here.lost = host == self.host and seat == 0
        try:
            return self.run(host, seat, algorithm, options)
        except Killed:
            self.members.lose(self.names[host], seat)
        here.lost = False
        with self.members.changed:
            del self.at[threading.get_ident()]
            went_on = self.members.changed.wait_for(lambda: min(self.at.values()) == RETURNS, LIMIT_S)
            assert went_on
        return self.run(host, seat + RANKS, algorithm, options)

    def make(self, model: nn.Module) -> tuple[torch.optim.Optimizer, bagua.GradScaler]:
        """What a rank trains `model` with."""
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), bagua.GradScaler("cpu", enabled=False)

    def run(self, host: int, seat: int, algorithm: str, options: dict[str, Any]) -> dict[str, Any]:
        here = self.here
        here.step = 0
        torch.manual_seed(0 if seat < RANKS else 99)  # one that comes back has other weights
        model = nn.Linear(40, 30, bias=False)
        optimizer, scaler = self.make(model)
        seated = self.members.seat(self.names[host], seat)
        tolerance = bagua.FaultTolerance(seat=seated, open_timeout_s=600, backend=self.backend)
        bagua.distribute(model, optimizer, algorithm, fault_tolerant=tolerance, **options)
        inputs = torch.Generator().manual_seed(RANKS * host + seat)
        layouts: list[Any] = []
        try:
            while (now := bagua.stats(model)).steps < TOTAL:
                here.step = now.steps
                scaler.scale(model(torch.randn(4, 40, generator=inputs)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                layout = attachments[model].engine.pool.groups.nodes
                if layout not in layouts[-1:]:
                    layouts.append(layout)
        except Killed:
            drop_rank(model)
            raise
        root = attachments[model].engine.state.root
        ended = {"weights": model.weight.detach().clone(), "layouts": layouts, "root": root}
        ended["changes"] = [(each.lost, each.joined) for each in bagua.stats(model).membership]
        bagua.detach(model)
        return ended


@pytest.mark.parametrize(
    ("algorithm", "options", "host", "within", "backend"),
    [
        ("bytegrad", {}, 0, True, "gloo"),
        ("bytegrad", {}, 1, True, "nccl"),
        pytest.param(
            "local_sgd", {"hierarchical": True, "communication_interval": 1}, 1, True, "gloo", marks=pytest.mark.slow
        ),
        ("decentralized", {}, 0, False, "gloo"),
        pytest.param("gradient_allreduce", {"hierarchical": True}, 0, False, "nccl", marks=pytest.mark.slow),
        pytest.param("low_precision_decentralized", {}, 1, True, "gloo", marks=pytest.mark.slow),
    ],
)
def test_a_leader_is_lost_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
    store: str,
    algorithm: str,
    options: dict[str, Any],
    host: int,
    within: bool,
    backend: str,
) -> None:
    monkeypatch.setattr(abortable_nccl, "make_nccl", StandIn)
    monkeypatch.setattr(limits, "why_no_nccl", lambda device: None)
    script = Script(store, host, within, backend)
    ends = run_teams(2 * RANKS, script.train, algorithm, options)
    lost = f"{script.names[host]}/0"
    uneven = ((0,), (1, 2)) if host == 0 else ((0, 1), (2,))
    whole = ((0, 1), (2, 3))
    for rank, end in enumerate(ends):
        returned = rank == RANKS * host
        assert end["layouts"][-1] == whole and (returned or uneven in end["layouts"])
        changes = [change for change in end["changes"] if change != ((), ())]
        assert changes == ([] if returned else [((lost,), ()), ((), (lost,))])
        assert end["root"].hierarchical is (algorithm != "low_precision_decentralized")
    if algorithm not in ("decentralized", "low_precision_decentralized"):
        assert all(torch.equal(end["weights"], ends[0]["weights"]) for end in ends)
