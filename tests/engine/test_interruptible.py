"""A transfer of weights ends when a member is lost, also if gloo does not wake who waits for it."""

from __future__ import annotations

import threading

import pytest

from bagua.comm.gloo_connections import GlooConnections
from bagua.comm.groups import Group, Groups
from bagua.engine.recovery.interruptible import run_interruptibly
from bagua.errors import CommunicationError

BOUND_S = 60.0


class Stuck:
    """A transfer that does not end by itself."""

    def __init__(self) -> None:
        self.begun, self.released, self.ended = threading.Event(), threading.Event(), threading.Event()

    def wait(self) -> None:
        self.begun.set()
        self.released.wait(BOUND_S)
        self.ended.set()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    monkeypatch.setattr("bagua.engine.lanes.lane._STUCK_S", 0.01)
    return Groups(Group(None, 0, 2, (0, 1), connections=GlooConnections()), ((0,), (1,)))


def test_a_transfer_in_the_middle_of_a_message_is_left_behind(groups: Groups) -> None:
    transfer, wrote = Stuck(), []

    def replicate() -> None:
        groups.world.wait(transfer)
        wrote.append("into the weights")

    def alert() -> None:
        if transfer.begun.is_set():
            raise CommunicationError("the members have changed")

    with pytest.raises(CommunicationError, match="^the members have changed$"):
        run_interruptibly(groups, replicate, alert)
    assert not transfer.ended.is_set() and threading.current_thread().name != "bagua-lane"
    transfer.released.set()
    assert transfer.ended.wait(BOUND_S)
    assert wrote == []


def test_what_fails_in_the_transfer_is_raised(groups: Groups) -> None:
    def replicate() -> None:
        raise ValueError("optimizer state")

    with pytest.raises(ValueError, match="optimizer state"):
        run_interruptibly(groups, replicate, lambda: None)


def test_without_a_loss_it_returns_when_all_is_there(groups: Groups) -> None:
    wrote: list[str] = []
    run_interruptibly(groups, lambda: wrote.append("weights"), lambda: None)
    assert wrote == ["weights"]
