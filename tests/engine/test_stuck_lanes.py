"""A transfer whose connection was cut in the middle, which gloo leaves waiting, holds up no lane."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from functools import partial

import pytest
import torch

from bagua.comm.gloo_connections import GlooConnections
from bagua.comm.groups import Group, Groups
from bagua.comm.team import Team
from bagua.engine.lanes.chunks import InPieces
from bagua.engine.lanes.lane import ThreadLane, Ticket
from bagua.errors import CommunicationError
from tests.rank_pool import RankPool

BOUND_S = 60.0


class Stuck:
    """A transfer that ends when the test says so."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.begun.set()
        assert self.released.wait(BOUND_S)


@pytest.fixture
def lane() -> ThreadLane:
    return ThreadLane(Groups(Group(None, 0, 2, (0, 1), connections=GlooConnections()), ((0,), (1,))))


def exchange(lane: ThreadLane, work: Stuck, wrote: list[str]) -> None:
    lane.groups.world.wait(work)
    wrote.append("into the tensor of the training thread")


def until_left(lane: ThreadLane) -> None:
    while not lane.leave_stuck():
        pass


def test_a_stuck_job_fails_with_all_that_is_queued_and_writes_nothing_later(lane: ThreadLane) -> None:
    work, wrote = Stuck(), []
    tickets = [lane.submit(partial(exchange, lane, work, wrote), "stuck")]
    assert work.begun.wait(BOUND_S)
    tickets.append(lane.submit(partial(wrote.append, "next"), "queued"))
    lane.sever()
    until_left(lane)
    tickets.append(lane.submit(partial(wrote.append, "later"), "submitted later"))
    for ticket in tickets:
        assert ticket.done and isinstance(ticket.error, CommunicationError)
    lane.close()  # does not wait for the thread
    assert lane._thread.is_alive()
    work.released.set()  # as if all had come after all
    lane._thread.join(BOUND_S)
    assert not lane._thread.is_alive() and wrote == []


def test_a_lane_that_is_not_cut_is_waited_for(lane: ThreadLane) -> None:
    work, wrote = Stuck(), []
    ticket = lane.submit(partial(exchange, lane, work, wrote), "slow")
    assert work.begun.wait(BOUND_S)
    assert not lane.groups.give_up_wait(float("inf"), 0.0)
    assert not lane.leave_stuck()
    work.released.set()
    ticket.wait()
    lane.close()
    assert ticket.error is None and len(wrote) == 1


def test_a_job_that_computes_is_waited_for(lane: ThreadLane) -> None:
    """It may be writing."""
    begun, released = threading.Event(), threading.Event()

    def compute() -> None:
        begun.set()
        assert released.wait(BOUND_S)

    ticket = lane.submit(compute, "decode")
    assert begun.wait(BOUND_S)
    lane.sever()
    assert not lane.leave_stuck()
    released.set()
    ticket.wait()
    lane.close()
    assert ticket.error is None


class Transfer:
    """Fails. What leads to it keeps the connections of its group."""

    def wait(self) -> None:
        raise RuntimeError("connection closed by peer")


def test_a_job_that_has_failed_keeps_no_transfer(lane: ThreadLane) -> None:
    """Not until the garbage collector runs, either: connections close when the lane is abandoned."""
    transfers: list[weakref.ref[Transfer]] = []
    tickets: list[Ticket] = []

    def exchange() -> None:
        transfer = Transfer()
        transfers.append(weakref.ref(transfer))
        lane.groups.world.wait(transfer)

    pieces = InPieces(1, lambda: tickets, None)  # as in `async`, whose rounds hold their tickets
    gc.disable()
    try:
        tickets.append(lane.submit(pieces.wrap(exchange), "failing"))
        tickets[0].wait()
        lane.close()
        assert str(tickets[0].error) == "connection closed by peer" and transfers[0]() is None
        ticket = weakref.ref(tickets[0])
        del pieces
        tickets = []
        assert ticket() is None
    finally:
        gc.enable()


def cut_in_the_middle() -> str:
    """Rank 1 stops rank 0 within a message, and cuts it off."""
    team = Team.of(None, torch.device("cpu"))
    peer = int(team.all_gather_bytes("process", str(os.getpid()).encode())[0])
    team.alert = lambda: None
    groups = team.open("lane", False, team.discover_nodes(["0", "1"]))
    lane, group = ThreadLane(groups), groups.world
    x = torch.full((1 << 27,), team.rank == 0, dtype=torch.uint8)
    ticket = lane.submit(lambda: group.wait(group.send(x, 1, 0) if team.rank == 0 else group.recv(x, 0, 0)), "message")
    if team.rank == 1:
        while not (x[0] or ticket.done):
            pass
        os.kill(peer, signal.SIGSTOP)
    else:
        ticket.ends_within(5.0)  # it is stopped meanwhile, and finds that it was cut off
    lane.sever()
    while not ticket.ends_within(0.01):
        lane.leave_stuck()
    lane.abandon()
    return type(ticket.error).__name__


def test_a_message_that_is_cut_in_the_middle(pool: RankPool) -> None:
    """Both ends return long before the timeout of the groups."""
    found = pool.run(2, cut_in_the_middle, stops=(0,), group_timeout_s=10 * BOUND_S)
    assert found[1] in ("CommunicationError", "RuntimeError")
