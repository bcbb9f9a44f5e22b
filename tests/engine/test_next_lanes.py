"""Groups of the next lanes, opened in a thread while the ranks wait for a transfer."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from bagua.comm.groups import Groups
from bagua.comm.mesh import why_no_mesh
from bagua.comm.team import Team
from bagua.engine.recovery.next_lanes import NextLanes
from bagua.errors import CommunicationError
from tests.rank_threads import run_teams

LIMIT_S = 60.0
NAMES = ("lane/1", "lane/1/1", "lane/1/2")


def all_sum(groups: Groups, value: float) -> float:
    total = torch.tensor([value])
    groups.world.wait(groups.world.pg.allreduce([total]))
    return total.item()


def open_and_use(team: Team, beside: bool, native: bool) -> list[float]:
    nodes = team.discover_nodes([str(rank) for rank in range(team.size)])
    lanes = NextLanes(team, NAMES, False, nodes, beside, native)
    opened = {NAMES[0]: lanes.take()}
    opened |= {name: team.open(name, False, nodes) for name in NAMES[1:]}  # connected already
    assert not team.prepared
    sums = [all_sum(groups, team.rank + number) for number, groups in enumerate(opened.values())]
    if native:
        meshes = [groups.world.mesh for groups in opened.values()]
        sums = []
        for number, mesh in enumerate(meshes):  # of one lane each
            assert mesh is not None
            mesh.sum_(total := torch.tensor([float(team.rank + number)]))
            sums.append(total.item())
    team.all_gather_bytes("all have them", b"")
    team.all_gather_bytes("so keys of the first message can go", b"")
    keys = [key for key in team.store.root.list_keys() if "/group/" in key or key.startswith("group/")]
    assert not keys, "what gloo has written is deleted, whoever has opened the groups"
    return sums


native_or_not = pytest.mark.parametrize(
    "native", [False, pytest.param(True, marks=pytest.mark.skipif(bool(why_no_mesh()), reason=why_no_mesh() or "-"))]
)


@native_or_not
@pytest.mark.parametrize("beside", [False, True])
def test_lanes_carry_exchanges_whenever_they_were_opened(beside: bool, native: bool) -> None:
    assert run_teams(3, open_and_use, beside, native) == [[3.0, 6.0, 9.0]] * 3


def one_is_lost(team: Team, took: threading.Barrier, lost: threading.Event, within: str) -> str:
    """The last rank opens nothing; then the members change."""

    def alert() -> None:
        if lost.is_set():
            raise CommunicationError("the members have changed")

    team.alert = alert
    nodes = team.discover_nodes(["n"] * team.size)
    last = team.rank == team.size - 1
    before = set(threading.enumerate())
    if last and within == "all":
        took.wait(LIMIT_S)
        lost.set()
        return ""
    names = NAMES[:1] if last else NAMES
    lanes = NextLanes(team, names, False, nodes, beside=True)
    if last:
        lanes.take()
        took.wait(LIMIT_S)
        lost.set()
        return ""
    took.wait(LIMIT_S)
    try:
        lanes.take()
        raise AssertionError("nobody else has opened them")
    except CommunicationError as error:
        said = str(error)
    lanes.drop()
    for thread in set(threading.enumerate()) - before:
        if thread.name == "bagua-lanes":
            thread.join(LIMIT_S)
            assert not thread.is_alive()
    assert not team.prepared
    return said


@pytest.mark.parametrize("within", ["all", "the second"])
def test_a_rank_is_lost_while_lanes_are_opened(within: str) -> None:
    took, lost = threading.Barrier(3, timeout=LIMIT_S), threading.Event()
    first, second, _ = run_teams(3, one_is_lost, took, lost, within, timeout_s=600.0)
    assert first == second == "the members have changed"


def dropped(team: Team, ended: threading.Barrier) -> bool:
    """Rank 0 opens lanes that the other one never does, and drops them as a transfer fails."""
    nodes = team.discover_nodes(["n"] * team.size)
    if team.rank == 0:
        team.alert = lambda: None
        before = set(threading.enumerate())
        lanes = NextLanes(team, NAMES, False, nodes, beside=True)
        threads = [each for each in set(threading.enumerate()) - before if each.name == "bagua-lanes"]
        lanes.drop()
        for thread in threads:
            thread.join(LIMIT_S)
        ended.wait(LIMIT_S)
        return not any(thread.is_alive() for thread in threads)
    ended.wait(LIMIT_S)
    return True


def test_lanes_that_nobody_wants_any_more_are_not_waited_for() -> None:
    assert run_teams(2, dropped, threading.Barrier(2, timeout=LIMIT_S), timeout_s=600.0) == [True, True]


def hold(team: Team, beside: bool, native: bool) -> list[weakref.ref[Any]]:
    """Take one lane of three, and forget everything."""
    team.alert = lambda: None
    lanes = NextLanes(team, NAMES, False, team.discover_nodes(["n"] * team.size), beside, native)
    groups = lanes.take()
    found = [weakref.ref(each.world.connections) for each in (groups, *team.prepared.values())]
    if native:
        found += [weakref.ref(each.world.mesh) for each in (groups, *team.prepared.values())]
    team.all_gather_bytes("all have them", b"")
    return found


@native_or_not
@pytest.mark.parametrize("beside", [False, True])
def test_lanes_that_nobody_holds_are_closed_at_once(beside: bool, native: bool) -> None:
    """Also those that were opened and never taken: gloo's objects are not known to the garbage collector."""
    gc.disable()
    try:
        for found in run_teams(2, hold, beside, native):
            assert len(found) == len(NAMES) * (1 + native) and all(each() is None for each in found)
    finally:
        gc.enable()


def test_a_single_rank_needs_no_connection() -> None:
    team = Team.alone()
    assert NextLanes(team, NAMES, False, ((0,),), beside=True).take().world.size == 1
    assert sorted(team.prepared) == sorted(NAMES[1:])
