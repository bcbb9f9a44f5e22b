"""Follows the membership while a module trains: which step counts, and when the exchanges in flight are dropped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bagua.algorithms.base import Algorithm
from bagua.comm.team import Team
from bagua.engine.lanes.pool import LanePool
from bagua.engine.recovery.backup import Backup
from bagua.engine.recovery.change import MembershipChange
from bagua.engine.recovery.epoch_team import team_of_epoch
from bagua.engine.recovery.failure_streak import FailureStreak
from bagua.engine.recovery.loss_scale import LossScale
from bagua.engine.recovery.meetings import Meetings
from bagua.engine.recovery.opening import Opening
from bagua.engine.recovery.options import FaultTolerance
from bagua.engine.recovery.progress import Progress
from bagua.errors import CommunicationError
from bagua.membership.actions import Verdict
from bagua.membership.seat import Seat, View

__all__ = ["RecoveryManager"]

_POLL_S = 0.002
_LOOKS = 2500  # about 5 s, in which agents notice a loss
_RETRY_S = 0.1  # between two attempts to open groups
_log = logging.getLogger("bagua")


def _cannot_recover() -> None:
    raise AssertionError("no engine follows the membership")


class RecoveryManager:
    """The membership as the training thread of one rank follows it.

    A step begins and ends with the agreement of the host's agent (docs/design/0008-membership.md). A step is *lost* if
    an exchange fails, or the agent refuses it: its gradients are dropped, the optimizer has none to step with, and the
    groups of the next epoch are opened before the next step.

    Args:
        seat: the connection to the agent.
        options: of the user.

    Attributes:
        view: the members whose groups are in use.
        lost: why the step in progress is lost; "" if it is not.
        dropped: the last step that has ended was lost.
        round: exchanges that count, as the agent knows them: those of gradients, or at the end of a step.
        attempts: steps that this rank has begun, lost ones included.
        to_skip: steps that this rank skips because others have already begun as many more.
        means: of the replicas, that this rank has taken between two steps; a newcomer as many as the others.
        means_of_others: the most of any rank, itself included, when groups were opened last.
        meetings: of the ranks between two steps.
        newcomer: this rank has no weights of the job: it has just started, or was left out of an epoch.
        replicated: this rank holds the weights that the job begins with, or later ones; while False it has its own.
        changes: of the membership, newest last.
        opening: groups that are opened while training goes on, see `LostStep.FREE`; None: there are none.
        waited_s: time that training has waited for them.
        recover: opens the groups of the next epoch within a step, and ends this step there.
        progress: of the user's loop.
        loss_scale: of the user's loop.
        thread: the training thread.
        backup: of what a newcomer has fetched, made while the others train; None: there is none.
        algorithm: as given to `distribute`, not fitted to any nodes yet: those change with the members.
        transport: as `chosen_transport` returned it.
    """

    def __init__(self, seat: Seat, options: FaultTolerance) -> None:
        self.seat, self.options = seat, options
        self.view: View | None = None
        self.lost = ""
        self.dropped = False
        self.round = self.attempts = self.to_skip = 0
        self.means = self.means_of_others = 0
        self.meetings = Meetings()
        self.newcomer = False
        self.replicated = True
        self.changes: tuple[MembershipChange, ...] = ()
        self.opening: Opening[Any] | None = None
        self.waited_s = 0.0
        self.recover: Callable[[], None] = _cannot_recover
        self.progress = Progress()
        self.loss_scale = LossScale()
        self.thread = threading.get_ident()
        self.backup: Backup | None = None
        self.algorithm: Algorithm | None = None
        self.transport: str | None = None
        self._pool: LanePool | None = None
        self._severed = self._fetched = self._stopped = False
        self._noticed = 0.0
        self._streak = FailureStreak(options.open_timeout_s)
        self._arrived = 0, 0  # group and round of the exchange in which this rank has said that it waits

    @property
    def blank(self) -> bool:
        """Whether this rank arrives without weights: another one of its host has fetched them, or has them."""
        return self.newcomer and not self._fetched

    @property
    def group(self) -> int:
        """Number of the epoch that opened the groups in use; 0 before the first."""
        return 0 if self.view is None else self.view.group

    # -- groups --------------------------------------------------------------------------------------------------

    def await_member(self) -> View:
        """Wait until this host is a member of the job, with or without the weights.

        Raises:
            CommunicationError: it was not within `max_blocked_s`.
        """
        deadline = time.monotonic() + self.options.max_blocked_s
        while (view := self.seat.view()) is None or not (view.rank is not None or view.lists(self.seat.name)):
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"host {self.seat.name} was not let into the job within {self.options.max_blocked_s:g} s"
                )
            time.sleep(_POLL_S)
        return view

    def await_view(self, learn: Callable[[View], None]) -> View:
        """Wait for groups other than those in use, in which this rank trains.

        Args:
            learn: fetches the weights from those that train; called while this host has none and this rank is to.

        Raises:
            CommunicationError: there were none within `max_blocked_s`.
        """
        deadline = time.monotonic() + self.options.max_blocked_s
        announced = 0
        while True:
            self._check_wanted()
            view = self.seat.view()
            if view is not None and view.rank is None:
                if not self.newcomer and view.group > self.group:
                    _log.warning(
                        "recovery: host %s was left out of membership epoch %d (%s): what it trained since does not "
                        "count; it joins again", self.seat.name, view.epoch, view.reason,
                    )  # fmt: skip
                    self.newcomer, self._fetched = True, False
                if self.newcomer and view.epoch != announced:
                    announced = view.epoch
                    self.seat.wants_weights()
                    continue  # the answer comes with the view
                is_learner = self.seat.name in view.learners
                self._fetched &= is_learner  # else it has been left out since
                if self.newcomer and is_learner and view.learns and not self._fetched:
                    learn(view)
                    deadline = time.monotonic() + self.options.max_blocked_s
            elif view is not None and view.group > self.group:
                if self.blank:
                    self.replicated = False  # it takes over those of another rank, whatever its round
                return view
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"host {self.seat.name}: no membership epoch after group {self.group} within "
                    f"{self.options.max_blocked_s:g} s"
                )
            time.sleep(_POLL_S)

    def open_team(self, view: View, device: torch.device) -> Team:
        """The members of `view` as a team that meets in the store of the first one. Adopts the view.

        Raises:
            CommunicationError: the store does not answer, or the members have changed meanwhile.
        """
        self.view, self._severed = view, False
        return team_of_epoch(view, self.seat.name, self.options, device, partial(self._check_group, view.group))

    def watch(self, pool: LanePool) -> None:
        """Cut the connections of these lanes once their groups are out of use."""
        self._pool = pool

    def check_group(self) -> None:
        """Raise if the groups in use are those of the past.

        Raises:
            CommunicationError: they are.
        """
        self._check_group(self.group)

    def _check_group(self, group: int) -> None:
        self._check_wanted()
        view = self.seat.view()
        if view is not None and view.group != group:
            raise CommunicationError(f"the members of group {group} have changed")

    @property
    def out_of_use(self) -> bool:
        """Whether the members have changed since the groups in use were opened."""
        view = self.seat.view()
        return view is not None and view.group != self.group

    # -- within a step -------------------------------------------------------------------------------------------

    def poll(self, waits: bool = True) -> None:
        """While this rank waits for an exchange: say so, and free it if the members have changed.

        Args:
            waits: for one that all make together.
        """
        if self.out_of_use:
            self.sever()
        elif waits and self._arrived != (self.group, self.round):
            self._arrived = self.group, self.round
            self.seat.arrived(self.group, self.round)
        if self._severed and self._pool is not None:
            self._pool.leave_stuck()

    def sever(self) -> None:
        """Cut all connections of the groups in use. Exchanges in flight fail, here and at the peers."""
        if not self._severed and self._pool is not None:
            self._severed = True
            self._noticed = self._noticed or time.monotonic()
            self._pool.sever()

    @property
    def stalled_s(self) -> float:
        """Seconds since this rank noticed that members have changed; 0 once it trains with the new ones."""
        noticed = self._noticed
        return time.monotonic() - noticed if noticed else 0.0

    @property
    def severed(self) -> bool:
        """Whether the groups in use are cut, so that no step can begin with them."""
        return self._severed

    def leave_groups(self) -> None:
        """Before the next ones are opened."""
        self._noticed = self._noticed or time.monotonic()
        self.sever()

    def exchange_failed(self, why: str, loses_step: bool = True) -> None:
        """An exchange of the step in progress has failed: its groups are lost.

        Args:
            loses_step: the step is, too. Else the exchange is repeated, or the step is made without it.
        """
        self._streak.failed()
        self._give_groups_up(why, loses_step)

    def _give_groups_up(self, why: str, loses_step: bool) -> None:
        self._noticed = self._noticed or time.monotonic()
        if not loses_step:
            _log.info("recovery: groups %d have failed: %s", self.group, why)
        elif not self.lost:
            _log.info("recovery: step %d is lost: %s", self.attempts, why)
            self.lost = why
        self.sever()
        self.seat.exchange_failed(self.group)

    def fails_in_vain(self) -> bool:
        """Whether one exchange after the other fails, and no members are lost that would explain it.

        Waits a little if it seems so: a closed connection may be known before the epoch that explains it.
        """
        for _ in range(_LOOKS):
            if not self._streak.too_long or self.out_of_use:
                return False
            time.sleep(_POLL_S)
        return self._streak.too_long

    def reopening_failed(self, error: RuntimeError) -> None:
        """The groups of the present view could not be opened: have others, unless that has been tried for too long.

        Raises:
            CommunicationError: it has.
        """
        self._check_wanted()
        now = time.monotonic()
        if now - self._noticed > self.options.max_blocked_s:
            raise CommunicationError(
                f"host {self.seat.name}: no groups could be opened within {self.options.max_blocked_s:g} s; at last: "
                f"{error}"
            ) from error
        self._give_groups_up(f"{type(error).__name__}: {error}", loses_step=False)
        time.sleep(_RETRY_S)

    def has_fetched(self, epoch: int, step: int) -> bool:
        """A newcomer holds the weights that a member held in `epoch` after `step` steps. Whether these count."""
        self._fetched = self._granted(lambda: self.seat.weights_fetched(epoch, step))
        return self._fetched

    def weights_fetched(self, step: int) -> None:
        """This rank holds the weights of `step`, which it lacked when the groups were opened.

        Raises:
            CommunicationError: the members have changed meanwhile, so that these may not count any more.
        """
        view = self.view
        assert view is not None
        if not self._granted(lambda: self.seat.weights_fetched(view.epoch, step)):
            raise CommunicationError(f"the weights of step {step} came too late for group {self.group}")
        self._fetched = True

    def hear_of_means(self, counts: Sequence[int]) -> None:
        """The ranks have told each other how many means of the replicas they have taken."""
        self.means_of_others = max(counts)
        if self.newcomer:
            self.means = self.means_of_others

    def may_begin(self, step: int) -> bool:
        """Whether step `step` can begin with the groups in use. Waits while the next epoch is being decided.

        Raises:
            CommunicationError: it took longer than `max_blocked_s`.
        """
        return self._granted(lambda: self.seat.start_step(self.group, step))

    def may_apply(self, step: int) -> bool:
        """Whether the mean gradients of `step` may be applied. If not, the step is lost. Waits as `may_begin`."""
        if not self.lost and not self.counts(step):
            self.lost = "the members have changed"
        return not self.lost

    def commit(self) -> None:
        """The exchange at the end of a step has ended here. Returns if it counts. Waits as `may_begin`.

        Raises:
            CommunicationError: it does not.
        """
        if not self.counts(self.round):
            raise CommunicationError(f"the members of group {self.group} have changed")

    def counts(self, step: int) -> bool:
        """Whether what the ranks have exchanged in `step` counts. Waits as `may_begin`."""
        if not self._granted(lambda: self.seat.finish_step(self.group, step)):
            self._noticed = self._noticed or time.monotonic()
            return False
        self.round = step + 1
        self._streak.end()
        return True

    def _granted(self, ask: Callable[[], Verdict]) -> bool:
        deadline = time.monotonic() + self.options.max_blocked_s
        while (verdict := ask()) is Verdict.WAIT:
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"host {self.seat.name}: no membership epoch was decided within {self.options.max_blocked_s:g} s"
                )
            time.sleep(_POLL_S)
        return verdict is Verdict.GRANTED

    def may_go_on(self) -> bool:
        """Whether this host trains in the newest epoch, with or without its groups, and no other is being decided."""
        view = self.seat.view()
        if view is None or view.rank is None:
            return False
        return self.seat.start_step(view.group, self.round) is Verdict.GRANTED

    def stop_soon(self) -> None:
        """At the end of training: open no more groups. From any thread."""
        self._stopped = True

    def stop(self, timeout_s: float) -> None:
        """As `stop_soon`, and wait for that."""
        self.stop_soon()
        if self.opening is not None:
            self.opening.cancel(timeout_s)
            self.opening = None

    def _check_wanted(self) -> None:
        if self._stopped:
            raise CommunicationError("training has ended")

    # -- between steps -------------------------------------------------------------------------------------------

    def step_ended(self) -> bool:
        """The optimizers have stepped. Returns whether the step counts."""
        self.attempts += 1
        self.progress.begun = False
        counts = not self.lost
        self.dropped = not counts
        if self.to_skip:
            self.to_skip -= 1
            self.lost = "other ranks have begun more steps" if self.to_skip else ""
        return counts

    def recovered(self, before: View | None, step: int, stalled_s: float | None = None) -> None:
        """The groups of the present view are in use.

        Args:
            stalled_s: how long training has waited. Default: since the loss was noticed.
        """
        view = self.view
        assert view is not None
        old = view.members if before is None else before.members
        gone = tuple(each for each in old if each not in view.members)
        came = tuple(each for each in view.members if each not in old)
        if gone or came:
            self._streak.end()
        stalled = stalled_s
        if stalled is None:
            stalled = time.monotonic() - self._noticed if self._noticed else 0.0
        change = MembershipChange(view.epoch, step, gone, came, view.reason, bool(self.lost), stalled, time.time())
        self.changes = (*self.changes[-999:], change)
        self._noticed, self.newcomer, self._fetched, self.waited_s = 0.0, False, False, 0.0
        self.backup = None
        self.lost = "other ranks have begun more steps" if self.to_skip else ""
        who = "".join((f"; lost {', '.join(gone)}" if gone else "", f"; joined {', '.join(came)}" if came else ""))
        _log.warning(
            "recovery: %d ranks train on from step %d in epoch %d%s (stalled %.2f s%s)",
            len(view.members), step, view.epoch, who, stalled, ", one step dropped" if change.skipped else "",
        )  # fmt: skip
