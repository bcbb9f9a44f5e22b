"""A rank's view of the membership, and its connection to the agent of its host. Without torch."""

from __future__ import annotations

import json
import logging
import queue
import time
from dataclasses import dataclass
from typing import Protocol

from bagua.membership.actions import Action, Blocked, EpochBegan, Excluded, Left, Slow, Verdict
from bagua.membership.epoch import Epoch
from bagua.membership.transport import Transport

__all__ = ["LocalSeat", "Seat", "View", "describe_event", "payload_of", "store_in", "view_of"]

_POLL_S = 0.005
_log = logging.getLogger("bagua")


@dataclass(frozen=True)
class View:
    """The process groups in use, as one host sees them.

    Attributes:
        epoch: number of the epoch.
        group: number of the epoch that opened the process groups.
        step: steps that counted when they were opened.
        members: names of the hosts that train, in the order of their ranks.
        rank: of this host; None if it does not train.
        store: host:port of the store in which the groups meet: that of the first member.
        reason: why the epoch was decided, for the log.
        learners: names of the hosts that wait for the weights, to train with the others.
    """

    epoch: int
    group: int
    step: int
    members: tuple[str, ...]
    rank: int | None
    store: str
    reason: str
    learners: tuple[str, ...] = ()


def payload_of(store: str) -> str:
    """What the members of an epoch say of themselves: host:port of the store that the host serves."""
    return json.dumps({"store": store})


def store_in(payload: str) -> str:
    """The address in a payload.

    Raises:
        ValueError: it is not one of `payload_of`.
    """
    try:
        store = json.loads(payload)["store"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"payload {payload!r}: expected the address of a store") from None
    if not isinstance(store, str):
        raise ValueError(f"payload {payload!r}: expected the address of a store")
    return store


def view_of(epoch: Epoch, name: str, incarnation: int) -> View:
    """`epoch` as the host `name` sees it. The order of ranks is that of seniority, the same on all hosts.

    Example:
        >>> from bagua.membership import Member
        >>> members = [Member(each, 0, each, payload_of(f"{each}:1")) for each in ("a", "b")]
        >>> view = view_of(Epoch.first(members), "b", 0)
        >>> view.members, view.rank, view.store
        (('a', 'b'), 1, 'a:1')
    """
    trainers = epoch.trainers
    rank = next((at for at, each in enumerate(trainers) if (each.name, each.incarnation) == (name, incarnation)), None)
    return View(
        epoch=epoch.number,
        group=epoch.group,
        step=epoch.group_step,
        members=tuple(each.name for each in trainers),
        rank=rank,
        store=store_in(trainers[0].payload) if trainers else "",
        reason=epoch.reason,
        learners=tuple(each.name for each in epoch.members if not each.trains),
    )


class Seat(Protocol):
    """How a rank speaks to the agent of its host. Called by the training thread only."""

    @property
    def name(self) -> str:
        """Of the host."""
        ...

    def view(self) -> View | None:
        """The newest view; None before the host is a member. Cheap: it may be asked every few milliseconds."""
        ...

    def await_group(self, after: int, timeout_s: float) -> View:
        """Wait for a view in which this host trains and `group` is larger than `after`.

        Raises:
            TimeoutError: there was none; says what is known.
        """
        ...

    def start_step(self, group: int, step: int) -> Verdict:
        """See `Agent.start_step`."""
        ...

    def finish_step(self, group: int, step: int) -> Verdict:
        """See `Agent.finish_step`."""
        ...

    def weights_fetched(self, epoch: int, step: int) -> Verdict:
        """See `Agent.weights_fetched`."""
        ...

    def exchange_failed(self, group: int) -> None:
        """See `Agent.exchange_failed`."""
        ...

    def close(self) -> None:
        """Give the connection up."""
        ...


class LocalSeat:
    """A seat beside the agent itself, in the same process: where there is no launcher that runs it.

    Args:
        transport: runs the agent. `close` closes it.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def name(self) -> str:
        """See `Seat`."""
        return self._transport.call(lambda agent, _: agent.name)

    def view(self) -> View | None:
        """See `Seat`."""
        self._log_events()
        record = self._transport.call(lambda agent, _: agent.record)
        return None if record.epoch is None else view_of(record.epoch, record.name, record.incarnation)

    def await_group(self, after: int, timeout_s: float) -> View:
        """See `Seat`."""
        deadline = time.monotonic() + timeout_s
        while True:
            view = self.view()
            if view is not None and view.rank is not None and view.group > after:
                return view
            if time.monotonic() > deadline:
                suspected = self._transport.call(lambda agent, _: agent.suspected)
                raise TimeoutError(f"no new epoch within {timeout_s:g} s; suspected: {suspected or 'nobody'}")
            time.sleep(_POLL_S)

    def start_step(self, group: int, step: int) -> Verdict:
        """See `Seat`."""
        return self._transport.call(lambda agent, _: agent.start_step(group, step))

    def finish_step(self, group: int, step: int) -> Verdict:
        """See `Seat`."""
        return self._transport.call(lambda agent, _: agent.finish_step(group, step))

    def weights_fetched(self, epoch: int, step: int) -> Verdict:
        """See `Seat`."""
        return self._transport.call(lambda agent, _: agent.weights_fetched(epoch, step))

    def exchange_failed(self, group: int) -> None:
        """See `Seat`."""
        self._transport.call(lambda agent, now: agent.exchange_failed(now, group))

    def close(self) -> None:
        """See `Seat`."""
        self._transport.close()

    def _log_events(self) -> None:
        while True:
            try:
                event = self._transport.events.get_nowait()
            except queue.Empty:
                return
            _log.info("membership: %s", describe_event(event))


def describe_event(event: Action) -> str:
    """What has happened, as a line of the log."""
    if isinstance(event, EpochBegan):
        now = {each.name for each in event.epoch.trainers}
        before = now if event.previous is None else {each.name for each in event.previous.trainers}
        gone, came = ", ".join(sorted(before - now)), ", ".join(sorted(now - before))
        who = "".join((f"; lost {gone}" if gone else "", f"; joined {came}" if came else ""))
        train = "1 host trains" if len(now) == 1 else f"{len(now)} hosts train"
        return f"epoch {event.epoch.number}: {train} from step {event.epoch.step}{who}"
    if isinstance(event, Excluded):
        return f"epoch {event.epoch.number} was decided without this host ({event.epoch.reason})"
    if isinstance(event, Slow):
        return f"{event.name} has kept this host waiting for {event.waited_s:.1f} s"
    if isinstance(event, Blocked):
        return f"no epoch can be decided: {event.reason}"
    return "this host has left the job" if isinstance(event, Left) else type(event).__name__
