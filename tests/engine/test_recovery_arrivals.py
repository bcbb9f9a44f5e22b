"""A rank arrives, and something fails while it gets the weights and the lanes of the new groups are opened."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import QAdam
from bagua.algorithms.base import Bucket, Context
from bagua.comm.team import Team
from bagua.engine.recovery import catch_up, next_lanes
from tests.engine.membership_store import Killed
from tests.engine.test_recovery_nodes import LIMIT_S, RANKS, RETURNS, Script
from tests.rank_threads import run_teams


class Arrival(Script):
    """The first rank is lost, and comes back; `dies` says whether it is lost in the transfer and comes once more."""

    def __init__(self, store: str, dies: bool) -> None:
        super().__init__(store, host=0, within=True)
        self.dies = dies

    def called(self, name: str, what: str) -> None:
        here, members = self.here, self.members
        if here.lost and here.step == 3 and what == "finish":
            raise Killed
        with members.changed:
            self.at[threading.get_ident()] = here.step
            members.changed.notify_all()
            if here.step == RETURNS and what == "start":
                back = members.changed.wait_for(lambda: any(seat >= RANKS for _, seat in members.progress), LIMIT_S)
                assert back

    def run(self, host: int, seat: int, algorithm: str, options: dict[str, Any]) -> dict[str, Any]:
        try:
            return super().run(host, seat, algorithm, options)
        except Killed:
            if seat != RANKS or not self.dies:
                raise
        self.members.lose(self.names[host], seat)
        return super().run(host, seat + RANKS, algorithm, options)


class ScaledArrival(Arrival):
    """Momenta are sent in units of the scaled loss."""

    def make(self, model: nn.Module) -> tuple[torch.optim.Optimizer, bagua.GradScaler]:
        scaler = bagua.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
        return bagua.optim.QAdam(model.parameters(), lr=0.01, warmup_steps=2), scaler


def lanes_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "bagua-lanes"]


def check_ends(ends: list[dict[str, Any]]) -> None:
    assert all(torch.equal(end["weights"], ends[0]["weights"]) for end in ends)
    assert all(end["layouts"][-1] == ((0, 1), (2, 3)) for end in ends)
    for thread in lanes_threads():
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_the_newcomer_is_lost_in_the_transfer_when_its_lanes_are_open(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, struck = catch_up.replicate_tensors, threading.Event()

    def strike(tensors: Any, group: Any, device: torch.device, src: int = 0) -> None:
        if group.rank and not struck.is_set():
            struck.set()
            for thread in lanes_threads():
                thread.join(LIMIT_S)
            raise Killed
        plain(tensors, group, device, src)

    monkeypatch.setattr(catch_up, "replicate_tensors", strike)
    script = Arrival(store, dies=True)
    ends = run_teams(2 * RANKS, script.train, "bytegrad", {})
    assert struck.is_set()
    check_ends(ends)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_lanes_cannot_be_opened_on_one_rank(store: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All open others: who has them must not train on lanes that another rank lacks."""
    plain, struck = next_lanes.NextLanes._work, threading.Event()

    def strike(self: next_lanes.NextLanes, team: Team, ended: threading.Event) -> None:
        if team.rank == rank and not struck.is_set():
            struck.set()
            self._error = bagua.CommunicationError("no connection")
            ended.set()
            return
        plain(self, team, ended)

    monkeypatch.setattr(next_lanes.NextLanes, "_work", strike)
    script = Arrival(store, dies=False)
    ends = run_teams(2 * RANKS, script.train, "bytegrad", {})
    assert struck.is_set()
    check_ends(ends)


def test_all_know_the_loss_scale_in_the_first_pass_with_other_members(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that did not would send momenta thousands of times too small, and get other gradients from their mean."""
    plain, scales = QAdam.on_ready, list[tuple[int, bool]]()

    def on_ready(self: QAdam, ctx: Context, bucket: Bucket) -> None:
        scales.append((ctx.step, ctx.loss_scale is not None))
        plain(self, ctx, bucket)

    monkeypatch.setattr(QAdam, "on_ready", on_ready)
    options = {"codec": "sign", "hierarchical": False}
    check_ends(run_teams(2 * RANKS, ScaledArrival(store, dies=False).train, "qadam", options))
    assert {known for step, known in scales if step} == {True}
