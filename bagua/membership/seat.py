"""A rank's view of the membership, and its connection to the agent of its host. Without torch."""

from __future__ import annotations

import json
import logging
import queue
import time
from dataclasses import dataclass
from typing import Protocol

from bagua.membership.actions import Action, Blocked, EpochBegan, Excluded, Left, Slow, Verdict
from bagua.membership.epoch import Epoch, Member
from bagua.membership.messages import MAX_SEATS
from bagua.membership.transport import Transport

__all__ = ["LocalSeat", "Seat", "View", "describe_event", "payload_of", "ranks_in", "store_in", "view_of"]

_POLL_S = 0.005
_log = logging.getLogger("bagua")


@dataclass(frozen=True)
class View:
    """The process groups in use, as one rank sees them.

    Attributes:
        epoch: number of the epoch.
        group: number of the epoch that opened the process groups.
        step: steps that counted when they were opened.
        members: names of the ranks that train, in their order: that of the host, or "host/1" for the rank with local
            rank 1 of a host that has several.
        rank: of this one; None if it does not train.
        store: host:port of the store in which the groups meet: that of the first member.
        reason: why the epoch was decided, for the log.
        learners: names of the hosts that wait for the weights, to train with the others.
        learns: if its host is one of them: whether this rank is to fetch the weights. The others of the host get them
            when the groups are opened.
    """

    epoch: int
    group: int
    step: int
    members: tuple[str, ...]
    rank: int | None
    store: str
    reason: str
    learners: tuple[str, ...] = ()
    learns: bool = True

    def lists(self, host: str) -> bool:
        """Whether the host is a member of the job, with or without weights."""
        return host in self.learners or any(each == host or each.startswith(f"{host}/") for each in self.members)


def payload_of(store: str, ranks: int = 1) -> str:
    """What the members of an epoch say of themselves: host:port of the store that the host serves, and how many ranks
    it starts.
    """
    return json.dumps({"store": store} if ranks == 1 else {"store": store, "ranks": ranks})


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


def ranks_in(payload: str) -> int:
    """How many ranks the host of this payload starts. The number of a rank, modulo this, is its local rank.

    Raises:
        ValueError: it is not one of `payload_of`.
    """
    store_in(payload)
    ranks = json.loads(payload).get("ranks", 1)
    if type(ranks) is not int or not 0 < ranks <= MAX_SEATS:
        raise ValueError(f"payload {payload!r}: expected a number of ranks from 1 to {MAX_SEATS}")
    return ranks


def view_of(epoch: Epoch, name: str, incarnation: int, seat: int = 0, learns: bool = True) -> View:
    """`epoch` as rank number `seat` of the host `name` sees it.

    Hosts are ordered by seniority, the ranks of a host by local rank: the same order on all of them.

    Args:
        epoch: the newest one.
        name: of the host.
        incarnation: of the host.
        seat: see `Member.seats`.
        learns: see `View`.

    Example:
        >>> from bagua.membership import Member
        >>> members = [Member(each, 0, each, payload_of(f"{each}:1", 2), seats=(0, 1)) for each in ("a", "b")]
        >>> view = view_of(Epoch.first(members), "b", 0, seat=1)
        >>> view.members, view.rank, view.store
        (('a/0', 'a/1', 'b/0', 'b/1'), 3, 'a:1')
    """
    trainers, ranks = epoch.trainers, _ranks_of(epoch)
    own = epoch.member(name, incarnation)
    rank = next((at for at, (host, number, _) in enumerate(ranks) if host is own and number == seat), None)
    return View(
        epoch=epoch.number,
        group=epoch.group,
        step=epoch.group_step,
        members=tuple(label for _, _, label in ranks),
        rank=rank,
        store=store_in(trainers[0].payload) if trainers else "",
        reason=epoch.reason,
        learners=tuple(each.name for each in epoch.members if not each.trains),
        learns=learns,
    )


def _ranks_of(epoch: Epoch) -> list[tuple[Member, int, str]]:
    """Host, number and name of each rank that trains, in the order of the ranks."""
    found: list[tuple[Member, int, str]] = []
    for each in epoch.trainers:
        size = ranks_in(each.payload)
        for number in sorted(each.seats, key=lambda number: (number % size, number)):
            found.append((each, number, each.name if size == 1 else f"{each.name}/{number % size}"))
    return found


class Seat(Protocol):
    """How a rank speaks to the agent of its host. Called by the training thread only."""

    @property
    def name(self) -> str:
        """Of the host."""
        ...

    def view(self) -> View | None:
        """The newest view; None before the host is a member. Cheap: it may be asked every few milliseconds."""
        ...

    def wants_weights(self) -> None:
        """This rank waits for the weights, to train with the others."""
        ...

    def await_group(self, after: int, timeout_s: float) -> View:
        """Wait for a view in which this rank trains and `group` is larger than `after`.

        Raises:
            TimeoutError: there was none; says what is known.
        """
        ...

    def start_step(self, group: int, step: int) -> Verdict:
        """See `Agent.start_step`."""
        ...

    def arrived(self, group: int, step: int) -> None:
        """See `Agent.arrived`."""
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

    def wants_weights(self) -> None:
        """See `Seat`."""
        self._transport.call(lambda agent, now: agent.rank_wants_weights(now, 0))

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
        return self._transport.call(lambda agent, now: agent.start_step(group, step, now=now))

    def arrived(self, group: int, step: int) -> None:
        """See `Seat`."""
        self._transport.call(lambda agent, now: agent.arrived(now, group, step))

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
        ranks = _ranks_of(event.epoch)
        now = {(name, number) for _, number, name in ranks}
        before = now if event.previous is None else {(name, number) for _, number, name in _ranks_of(event.previous)}
        gone, came = (", ".join(name for name, _ in sorted(each)) for each in (before - now, now - before))
        who = "".join((f"; lost {gone}" if gone else "", f"; joined {came}" if came else ""))
        hosts = len(event.epoch.trainers)
        train = "1 host trains" if hosts == 1 else f"{hosts} hosts train"
        train += f" with {len(ranks)} ranks" if len(ranks) > hosts else ""
        return f"epoch {event.epoch.number}: {train} from step {event.epoch.step}{who}"
    if isinstance(event, Excluded):
        return f"epoch {event.epoch.number} was decided without this host ({event.epoch.reason})"
    if isinstance(event, Slow):
        return f"{event.name} has kept this host waiting for {event.waited_s:.1f} s"
    if isinstance(event, Blocked):
        return f"no epoch can be decided: {event.reason}"
    return "this host has left the job" if isinstance(event, Left) else type(event).__name__
