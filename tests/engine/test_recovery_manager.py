"""What the training thread of a rank does with the answers of its host's agent."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from typing import Any

import pytest
import torch

import bagua
from bagua.engine.recovery.manager import RecoveryManager
from bagua.errors import CommunicationError
from bagua.membership.actions import Verdict
from bagua.membership.seat import View
from tests.engine.membership_store import serve_store
from tests.engine.scripted_seat import ScriptedSeat, view

CPU = torch.device("cpu")
GRANTED, WAIT, DENIED = Verdict.GRANTED, Verdict.WAIT, Verdict.DENIED


class Lanes:
    """Counts how often connections are cut, and looks at what that has not freed."""

    def __init__(self) -> None:
        self.cut = self.looks = 0

    def sever(self) -> None:
        self.cut += 1

    def leave_stuck(self) -> None:
        assert self.cut
        self.looks += 1


def in_group(number: int, *answers: Verdict, repeats: bool = False, **options: Any) -> tuple[ScriptedSeat, Any, Lanes]:
    """A seat, and a manager that uses the groups of epoch `number`."""
    seat, lanes = ScriptedSeat(view(number, "n0", "n1", "n2"), answers, repeats), Lanes()
    manager: Any = RecoveryManager(seat, bagua.FaultTolerance(seat=seat, **options))
    manager.view = seat.now
    manager.watch(lanes)
    return seat, manager, lanes


# -- answers of the agent --------------------------------------------------------------------------------------------


def test_a_step_begins_when_the_agent_has_stopped_waiting() -> None:
    seat, manager, _ = in_group(3, WAIT, WAIT, GRANTED)
    assert manager.may_begin(7)
    assert seat.asked == [("start", 3, 7)] * 3


def test_a_step_that_may_not_begin_is_not_yet_lost() -> None:
    _, manager, lanes = in_group(3, WAIT, DENIED)
    assert not manager.may_begin(7)
    assert manager.lost == "" and lanes.cut == 0


def test_a_step_is_applied_when_the_agent_has_stopped_waiting() -> None:
    seat, manager, _ = in_group(3, WAIT, GRANTED)
    assert manager.may_apply(7)
    assert seat.asked == [("finish", 3, 7)] * 2
    assert manager.step_ended() and manager.attempts == 1


def test_a_step_that_is_denied_is_lost_and_not_asked_about_again() -> None:
    seat, manager, _ = in_group(3, WAIT, DENIED)
    assert not manager.may_apply(7)
    assert manager.lost == "the members have changed"
    assert not manager.may_apply(7)
    assert seat.asked == [("finish", 3, 7)] * 2
    assert not manager.step_ended() and manager.attempts == 1


@pytest.mark.parametrize("question", ["may_begin", "may_apply"])
def test_a_decision_that_never_comes(question: str) -> None:
    seat, manager, _ = in_group(3, WAIT, repeats=True, max_blocked_s=0.05)
    with pytest.raises(CommunicationError, match=r"host n0: no membership epoch was decided within 0.05 s"):
        getattr(manager, question)(7)
    assert len(seat.asked) > 1


def test_weights_that_were_fetched_too_late() -> None:
    seat, manager, _ = in_group(3, WAIT, GRANTED, DENIED)
    manager.weights_fetched(8)
    assert seat.asked == [("fetched", 3, 8)] * 2
    with pytest.raises(CommunicationError, match="the weights of step 8 came too late for group 3"):
        manager.weights_fetched(8)


# -- exchanges in flight ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ends", ["nothing", "an exchange that counts", "a new epoch", "a lost member", "a while without failures"]
)
def test_exchanges_that_fail_for_no_reason_are_not_repeated_for_ever(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    now = [1000.0]
    monkeypatch.setattr("bagua.engine.recovery.manager._LOOKS", 2)
    monkeypatch.setattr("bagua.engine.recovery.failure_streak.time.monotonic", lambda: now[0])
    seat, manager, _ = in_group(3, GRANTED, open_timeout_s=10.0)
    for number in range(25):
        assert not manager.fails_in_vain(), f"after {number} failures within {now[0] - 1000.0:.0f} s"
        manager.exchange_failed("connection closed by peer", loses_step=False)
        now[0] += 0.4
    now[0] += 1.0
    assert manager.fails_in_vain()
    if ends == "an exchange that counts":
        assert manager.counts(7)
    if ends == "a new epoch":
        seat.now = view(4, "n0", "n1")
    if ends == "a lost member":
        manager.recovered(view(2, "n0", "n1", "n2", "n3"), 7)
    if ends == "a while without failures":
        now[0] += 11.0
        manager.exchange_failed("connection closed by peer", loses_step=False)
    assert manager.fails_in_vain() == (ends == "nothing")


def test_groups_that_cannot_be_opened_have_a_limit_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """`max_blocked_s`: until a partition heals, exchanges cannot work."""
    now = [1000.0]
    monkeypatch.setattr("bagua.engine.recovery.manager._LOOKS", 2)
    monkeypatch.setattr("bagua.engine.recovery.manager._RETRY_S", 0.0)
    monkeypatch.setattr("bagua.engine.recovery.manager.time.monotonic", lambda: now[0])
    _, manager, _ = in_group(3, GRANTED, open_timeout_s=10.0)
    for _ in range(60):
        manager.reopening_failed(RuntimeError("connection refused"))
        now[0] += 1.0
    assert not manager.fails_in_vain()


def test_a_failed_exchange_loses_the_step_and_its_groups() -> None:
    seat, manager, lanes = in_group(3)
    manager.exchange_failed("no response")
    manager.exchange_failed("another one, for the same reason")
    assert manager.lost == "no response"
    assert lanes.cut == 1, "once"
    assert seat.asked == [("failed", 3)] * 2
    assert not manager.may_apply(0) and not manager.step_ended()


def test_a_rank_that_waits_is_freed_when_the_members_change() -> None:
    seat, manager, lanes = in_group(3)
    manager.poll()
    manager.check_group()
    assert lanes.cut == 0
    seat.now = view(4, "n0", "n1")
    manager.poll()
    manager.poll()
    assert lanes.cut == 1 and lanes.looks and manager.out_of_use
    with pytest.raises(CommunicationError, match="the members of group 3 have changed"):
        manager.check_group()


def test_an_epoch_with_the_same_groups_changes_nothing() -> None:
    seat, manager, lanes = in_group(3)
    now = view(3, "n0", "n1", "n2")
    seat.now = type(now)(**{**vars(now), "epoch": 9})
    manager.poll()
    assert not manager.out_of_use and lanes.cut == 0


# -- new groups ------------------------------------------------------------------------------------------------------


def test_a_team_meets_in_the_store_of_the_view() -> None:
    store, server = serve_store()
    seat, manager, lanes = in_group(3, open_timeout_s=61.0)
    manager.exchange_failed("a test")
    now = seat.now = view(5, "n0", store=store)
    team = manager.open_team(now, CPU)
    assert (team.rank, team.size, team.timeout.total_seconds()) == (0, 1, 61.0)
    assert manager.view is now and manager.group == 5 and not manager.out_of_use
    team.store.set("key", "value")
    assert server.get("bagua/group/5/key") == b"value"
    manager.sever()
    assert lanes.cut == 2, "the connections of the new groups are others"


def test_a_store_that_is_gone_is_not_waited_for_once_the_members_change() -> None:
    seat, manager, _ = in_group(3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = f"127.0.0.1:{listener.getsockname()[1]}"
    seat.now = view(6, "n0", "n2")
    with pytest.raises(CommunicationError, match="the members of group 5 have changed"):
        manager.open_team(view(5, "n0", "n1", store=gone), CPU)


def test_groups_that_cannot_be_opened_are_given_up_in_the_end() -> None:
    seat, manager, _ = in_group(3, max_blocked_s=0.05)
    manager.leave_groups()
    cause = CommunicationError("connection refused")
    with pytest.raises(
        CommunicationError, match=r"no groups could be opened within 0.05 s; at last: connection refused"
    ) as raised:
        for _ in range(100):
            manager.reopening_failed(cause)
    assert raised.value.__cause__ is cause
    assert set(seat.asked) <= {("failed", 3)}


# -- members and newcomers -------------------------------------------------------------------------------------------


def learning(group: int) -> View:
    """The host n0 waits for the weights that n1 and n2 train."""
    return replace(view(group, "n1", "n2", rank=None, reason="n0 is silent"), learners=("n0",))


def never(_: View) -> None:
    """Fetches weights."""
    raise AssertionError("this host has its weights")


class Calls:
    """Fetches weights: takes note, and goes on to the next view."""

    def __init__(self, seat: ScriptedSeat, manager: Any, *then: View | bool) -> None:
        self.seen: list[int] = []
        self._seat, self._manager, self._then = seat, manager, list(then)

    def __call__(self, now: View) -> None:
        self.seen.append(now.group)
        then = self._then.pop(0)
        if isinstance(then, View):
            self._seat.now = then
        elif then:
            assert self._manager.has_fetched(now.epoch, 40)
            self._seat.now = view(now.group + 1, "n1", "n2", "n0", rank=2)


def test_the_next_groups_are_used_when_there_are_some() -> None:
    seat, manager, _ = in_group(3, max_blocked_s=0.05)
    with pytest.raises(CommunicationError, match=r"host n0: no membership epoch after group 3 within 0.05 s"):
        manager.await_view(never)
    seat.now = view(4, "n0", "n1")
    assert manager.await_view(never) is seat.now
    assert manager.view.group == 3, "it is adopted when the groups are opened"


def test_a_host_that_is_left_out_fetches_the_weights_until_it_has_them(caplog: pytest.LogCaptureFixture) -> None:
    seat, manager, _ = in_group(3)
    seat.now = learning(4)
    learn = Calls(seat, manager, False, learning(6), True)  # the first transfer breaks off
    with caplog.at_level(logging.WARNING, logger="bagua"):
        now = manager.await_view(learn)
    assert (now.group, now.rank) == (7, 2) and manager.newcomer
    assert learn.seen == [4, 4, 6]
    assert seat.asked == [("wants_weights",), ("wants_weights",), ("fetched", 6, 40)], "once in each epoch"
    assert caplog.text.count("host n0 was left out of membership epoch 4 (n0 is silent)") == 1
    manager.view, before = now, manager.view
    manager.recovered(before, 41)
    assert not manager.newcomer


def test_a_rank_whose_host_is_served_by_another_one_takes_the_weights_over_when_it_trains() -> None:
    seat, manager, _ = in_group(3)
    manager.newcomer = True
    seat.now = replace(learning(4), learns=False)
    seat.then = view(5, "n1", "n2", "n0/0", "n0/1", rank=3)
    now = manager.await_view(never)
    assert now.rank == 3 and manager.blank and not manager.replicated, "whatever its round"
    manager.view = now
    manager.weights_fetched(40)
    assert not manager.blank, "another attempt to open groups counts on its weights"


def test_a_host_that_has_the_weights_waits_until_it_trains() -> None:
    seat, manager, _ = in_group(3, max_blocked_s=0.05)
    manager.newcomer = True
    seat.now = learning(4)
    assert manager.has_fetched(4, 40)
    with pytest.raises(CommunicationError, match="no membership epoch after group 3"):
        manager.await_view(never)


def test_weights_that_do_not_count_any_more_are_fetched_again() -> None:
    seat, manager, _ = in_group(3, WAIT, DENIED)
    manager.newcomer = True
    assert not manager.has_fetched(4, 40)
    seat.now = learning(4)
    learn = Calls(seat, manager, view(5, "n0", "n1", "n2"))
    assert manager.await_view(learn).group == 5
    assert learn.seen == [4]


def test_a_newcomer_waits_until_it_is_let_in() -> None:
    seat = ScriptedSeat(None)
    manager = RecoveryManager(seat, bagua.FaultTolerance(seat=seat, max_blocked_s=0.05))
    for stranger in (None, view(4, "n1", "n2", rank=None)):
        seat.now = stranger
        with pytest.raises(CommunicationError, match=r"host n0 was not let into the job within 0.05 s"):
            manager.await_member()
    for member in (learning(4), view(4, "n0")):
        seat.now = member
        assert manager.await_member() is member


# -- steps and changes -----------------------------------------------------------------------------------------------


def test_a_rank_that_has_begun_fewer_steps_skips_as_many() -> None:
    seat, manager, _ = in_group(3)
    assert [manager.step_ended() for _ in range(4)] == [True] * 4
    manager.exchange_failed("a test")
    assert not manager.step_ended()
    manager.view = view(4, "n0", "n1")
    manager.to_skip = 2  # others had begun 7
    manager.recovered(view(3, "n0", "n1", "n2"), 4)
    seat.asked.clear()
    counted: list[bool] = []
    for _ in range(3):
        applied = manager.may_apply(4)
        counted.append(manager.step_ended())
        assert applied == counted[-1]
    assert counted == [False, False, True]
    assert manager.attempts == 8 and manager.to_skip == 0
    assert seat.asked == [("finish", 4, 4)], "skipped steps are nobody's business"


def test_changes_are_recorded(caplog: pytest.LogCaptureFixture) -> None:
    _, manager, _ = in_group(3)
    manager.exchange_failed("a test")
    manager.step_ended()
    before, manager.view = manager.view, view(4, "n0", "n3", reason="n1 is silent")
    with caplog.at_level(logging.WARNING, logger="bagua"):
        manager.recovered(before, 12)
    (change,) = manager.changes
    assert (change.epoch, change.step, change.reason, change.skipped) == (4, 12, "n1 is silent", True)
    assert (change.lost, change.joined) == (("n1", "n2"), ("n3",))
    assert change.stalled_s > 0 and manager.lost == ""
    assert "2 ranks train on from step 12 in epoch 4; lost n1, n2; joined n3" in caplog.text
    assert "one step dropped" in caplog.text


def test_a_change_that_costs_no_step() -> None:
    _, manager, _ = in_group(3)
    before, manager.view = manager.view, view(4, "n0", "n1", "n2", "n3")
    manager.recovered(before, 12)
    (change,) = manager.changes
    assert (change.lost, change.joined, change.skipped, change.stalled_s) == ((), ("n3",), False, 0.0)


def test_the_newest_changes_are_kept() -> None:
    _, manager, _ = in_group(3)
    for step in range(1100):
        manager.recovered(manager.view, step)
    assert [change.step for change in manager.changes] == list(range(100, 1100))
