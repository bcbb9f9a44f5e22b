"""Failure handling: an exchange failed, or an exception interrupted one rank's backward pass but not the others'."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import torch

from bagua.algorithms.base import Exactness, LostStep, Payload
from bagua.comm.flight_recorder import recorded_collectives
from bagua.comm.own_threads import start_thread
from bagua.comm.store_team import is_loss
from bagua.comm.team import Team
from bagua.engine.lanes.lane import Ticket
from bagua.engine.lanes.pool import LanePool
from bagua.engine.recovery.manager import RecoveryManager
from bagua.engine.reducer.broken_passes import LOOK_S, BrokenPasses
from bagua.engine.reducer.reducer import Reducer
from bagua.engine.training_state import TrainingState
from bagua.errors import CommunicationError

__all__ = ["LOOK_S", "Failures"]

_log = logging.getLogger("bagua")
_LOOK_AT_MEMBERS_S = 0.02
_SIGN_OF_LIFE_S = 3.0  # how long a failed rank waits for the others to fail too, before it names those that did not
_LAST_LOOK_S = 1.0  # at least so long it asks the store for the reason


class Failures:
    """Raises on all ranks what failed on some; after the first failure no exchange is launched.

    Args:
        key: a name that is new for the team and equal on all ranks.

    Attributes:
        key: of this module's failures in the store.
        recovery: trains on without the ranks that are lost; None: a loss is final.
    """

    def __init__(
        self,
        state: TrainingState,
        team: Team,
        pool: LanePool,
        reducer: Reducer,
        key: str,
        recovery: RecoveryManager | None = None,
    ) -> None:
        self.recovery = recovery
        self.key = f"failed/{key}"
        self._state, self._team, self._pool, self._reducer = state, team, pool, reducer
        self._failed = False
        self._why = ""  # it failed, if not in an exchange
        self._broken = BrokenPasses(team.store, f"broken/{key}", team.rank, team.size, team.timeout.total_seconds())

    @property
    def final(self) -> bool:
        """Whether exchanges have ended for good."""
        return self._failed

    @property
    def any(self) -> bool:
        """Whether an exchange failed, or a backward pass was interrupted."""
        return self._failed or (self._breaks_together and self._reducer.broken_off)

    @property
    def look_s(self) -> float:
        """How long a rank waits for an exchange before it looks for a reason not to."""
        return LOOK_S if self.recovery is None else _LOOK_AT_MEMBERS_S

    @property
    def step_is_lost(self) -> bool:
        """Whether the step in progress is dropped: see `RecoveryManager`."""
        return self.recovery is not None and bool(self.recovery.lost)

    @property
    def trains_alone(self) -> bool:
        """Whether exchanges have ended until other groups are open, and steps go on without."""
        if not self._failed or self.recovery is None:
            return False
        rule = self._state.lost_step
        return rule is LostStep.FREE or (rule is LostStep.KEEP and not self.recovery.lost)

    @property
    def keeps_step(self) -> bool:
        """Whether the step in progress is made without its exchange if that fails."""
        return bool(self._state.buckets) and self._state.lost_step is LostStep.KEEP

    def lose_step(self, why: CommunicationError) -> bool:
        """An exchange of the step in progress has failed. Whether training goes on: without the step, or alone.

        See `step_is_lost`.
        """
        if (recovery := self._recovers()) is None:
            return False
        self._failed = True
        recovery.exchange_failed(str(why), loses_step=not self.keeps_step)
        self._pool.abandon()
        return True

    def may_step_alone(self) -> bool:
        """Before a step of local gradients, of a rank that keeps its weights: whether to make it, alone if need be."""
        recovery = self.recovery
        assert recovery is not None
        if not (recovery.lost or self._failed or recovery.counts(recovery.round)):
            self.lose_step(CommunicationError("the members have changed"))
        return not recovery.lost

    def commit_exchange(self) -> None:
        """At the end of a step: return once what was exchanged counts.

        Raises:
            CommunicationError: it does not: the members have changed.
        """
        if self.recovery is not None:
            self.recovery.commit()

    def repeats_exchange(self, why: CommunicationError) -> bool:
        """The exchange at the end of a step has failed. Whether it is repeated with the ranks that are left."""
        if self._state.lost_step is not LostStep.REPEAT or (recovery := self._recovers()) is None:
            return False
        self._failed = True
        recovery.exchange_failed(str(why), loses_step=False)
        self._pool.abandon()
        return True

    def outlives_exchange(self, why: CommunicationError) -> bool:
        """An exchange of a step that counts already has failed. Whether training goes on without it."""
        if (recovery := self._recovers()) is None:
            return False
        self._failed = True
        recovery.exchange_failed(str(why), loses_step=False)
        self._pool.abandon()
        self._pool.drain()  # the weights are the caller's from here on
        return True

    def check_alive(self) -> None:
        """Raise if an exchange has failed.

        Raises:
            CommunicationError: says what failed.
        """
        if self._failed:
            raise CommunicationError(
                f"{self._why or 'an earlier exchange of this module failed'}; "
                "call bagua.distribute() again on all ranks, or restart"
            )

    def pass_broke_off(self) -> None:
        """Record that an exception ended a backward pass. Must not raise: destructors call it too."""
        if self._breaks_together and not self._failed:
            with suppress(RuntimeError, OSError):  # without a store the ranks cannot continue anyway
                self._broken.post(self._reducer.count)

    def look_for_broken(self) -> None:
        """Raise if another rank's pass was interrupted and this one waits for its exchanges.

        Raises:
            CommunicationError: names the rank.
        """
        if self.recovery is not None:
            self.recovery.poll(waits=self._state.lost_step is not LostStep.FREE)
        else:
            self._find_broken(_SIGN_OF_LIFE_S)

    def _find_broken(self, limit_s: float) -> CommunicationError | None:
        """As `look_for_broken`, within `limit_s`.

        Returns why the store could not be asked, if it could not: the exchange itself will fail.
        """
        if not self._breaks_together or self._failed:
            return None
        try:
            ranks = self._broken.look(self._reducer.count, limit_s)
        except CommunicationError as error:
            return error
        if ranks:
            self._refuse(ranks)
        return None

    def check_members(self) -> None:
        """While this rank waits in the store within a backward pass: raise if another one is not coming.

        Raises:
            CommunicationError: the members have changed, or see `look_for_broken`.
        """
        self.look_for_broken()
        if self.recovery is not None:
            self.recovery.check_group()

    def settle_broken(self) -> None:
        """After an exception in this rank's last backward pass: agree with the other ranks on what to do.

        Raises:
            CommunicationError: the pass was not interrupted on all ranks.
        """
        reducer = self._reducer
        if not self._breaks_together or self._failed:
            reducer.forget()
            return
        try:
            ranks = self._broken.settle(reducer.count, void=not reducer.failed_to_end)
        except (RuntimeError, OSError):  # there is no store to agree in
            ranks = [self._team.rank]
        if ranks:
            reducer.forget()
            self._refuse(ranks)
        reducer.void()

    def leave_broken_pass(self) -> None:
        """Before a restart: drop an interrupted backward pass, without waiting for other ranks."""
        if not self._failed and self.any:
            self.pass_broke_off()
            self._reducer.forget()
            self._shut()

    def give_up(self) -> None:
        """End all exchanges."""
        self._failed = True
        self._pool.abandon()

    def give_up_aside(self) -> None:
        """End all exchanges. Connections close in a thread of their own: gloo takes 10 ms and more for each group."""
        self._shut()

    def fail(self, ticket: Ticket) -> NoReturn:
        """Raise the lane's error, and name the ranks that do not respond.

        Raises:
            CommunicationError: names the rank, the exchange and the bucket.
            RuntimeError: the same, of an error that no lost rank can have caused, where ranks may be lost. Without the
                others, the exchange would fail again.
        """
        recovery, error, silent = self.recovery, ticket.error, None
        assert error is not None
        if recovery is not None:
            self.look_for_broken()
        else:
            # The exchange has used up the timeout, and the store may have been silent since it ended.
            silent = self._find_broken(max(ticket.ended + _SIGN_OF_LIFE_S - time.perf_counter(), _LAST_LOOK_S))
        cut = recovery is not None and (recovery.severed or recovery.out_of_use)
        self.give_up()
        what = str(error) if isinstance(error, CommunicationError) else f"{type(error).__name__}: {error}"
        text = f"{ticket.label}: {what}"
        if recovery is not None:  # the agents of the hosts know who is lost
            if cut or isinstance(error, CommunicationError | OSError) or is_loss(error):
                raise CommunicationError(text) from error
            raise RuntimeError(f"{text}; no lost rank is the cause, so this one ends") from error
        recorded = recorded_collectives() if self._team.backend == "gloo" else None
        algorithm = self._state.algorithm
        join = "" if algorithm.uneven else "bagua.join(model) or "
        remedy = f"If it made fewer steps than this rank, use {join}drop_last=True; otherwise read its log"
        if algorithm.exactness is Exactness.ASYNCHRONOUS:  # as many steps as each rank likes
            remedy = "Read its log"
        who = f"; {silent}" if silent else self._team.describe_missing(self.key, _SIGN_OF_LIFE_S, remedy=remedy)
        failure = CommunicationError(f"rank {self._team.rank}, {text}{who}")
        failure.flight_recorder = recorded
        raise failure from error

    def _recovers(self) -> RecoveryManager | None:
        """After an exchange has failed: who has other groups opened. None: it is final, or there is no hope."""
        if self.recovery is None or not self.recovery.fails_in_vain():
            return self.recovery
        _log.error("recovery: one exchange after the other fails, although no host is lost; training ends here")
        return None

    @property
    def _breaks_together(self) -> bool:
        """Whether a backward pass that is interrupted on one rank affects the others."""
        team = self._team
        if self.recovery is not None:
            return False  # a rank that raises ends, and is lost
        return team.size > 1 and team.backend != "local" and self._state.algorithm.payload is Payload.GRAD

    def _shut(self) -> None:
        """Abandon the lanes. Connections close once no exchange is in flight on them; this does not wait for that."""
        self._failed = True
        lanes = list(self._pool.all)

        def abandon() -> None:
            for lane in lanes:
                lane.abandon()

        start_thread(abandon, "bagua-abandon")

    def _refuse(self, ranks: Sequence[int]) -> NoReturn:
        """End the exchanges of this module: the backward passes of `ranks` were interrupted."""
        self._shut()
        for bucket in self._state.buckets:  # to lanes that are still busy the buckets' own memory is left
            for param in bucket.params:
                param.grad = None if param.grad is None else torch.zeros_like(param)
        self._team.missing_ranks(self.key, 0.0)  # a sign of life
        who = ", ".join(map(str, ranks))
        self._why = (
            f"step {self._state.step}: an exception interrupted the backward pass of rank {who} but not of all ranks, "
            f"so there are no gradients to step with (this is rank {self._team.rank})"
        )
        self.check_alive()
        raise AssertionError("unreachable")
