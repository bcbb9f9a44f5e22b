"""One look at a job: hosts, ranks and changes of the members, checked as they come from other processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Event", "Picture", "Rank", "picture_of"]

_MAX_TEXT = 300
_COUNTS = ("bytes_sent", "bytes_received", "exposed_s", "comm_s")


@dataclass(frozen=True)
class Rank:
    """One rank.

    Attributes:
        host: name of its host.
        pid: of its process there.
        rank: among those that train the module; None: it has not come through `bagua.distribute`.
        algorithm: by name; of "auto" with what it trains with now.
        steps: completed.
        restarts: how often its launcher has started ranks again.
        bytes_sent, bytes_received: in all steps.
        exposed_s: seconds in which training waited for communication, in all steps.
        comm_s: seconds in which communication ran, in all steps.
        clock: seconds on the clock of its host, when it answered.
        stalled_s: seconds since it noticed a change of the members, if it does not train with the new ones yet.
        problem: why it does not train, or does not answer; "" if it trains.
        steps_per_s, sent_per_s, received_per_s: of the time since the look before; None at the first one.
        exposed: share of that time in which training waited for communication.
    """

    host: str
    pid: int
    rank: int | None = None
    algorithm: str = ""
    steps: int = 0
    restarts: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    exposed_s: float = 0.0
    comm_s: float = 0.0
    clock: float = 0.0
    stalled_s: float = 0.0
    problem: str = ""
    steps_per_s: float | None = None
    sent_per_s: float | None = None
    received_per_s: float | None = None
    exposed: float | None = None


@dataclass(frozen=True)
class Event:
    """A change of the members, or why there is none.

    Attributes:
        time: seconds since 1970.
        text: what has happened and why.
        epoch: of the membership; None: of no epoch.
        lost, joined: names of hosts.
        stalled_s: the longest time for which a rank could not train because of it.
        skipped: a rank has dropped a step.
    """

    time: float
    text: str
    epoch: int | None = None
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    stalled_s: float = 0.0
    skipped: bool = False


@dataclass(frozen=True)
class Picture:
    """One look at a job.

    Attributes:
        job: its name.
        fault_tolerant: hosts agree on their members.
        epoch: of the membership, as far as any host knows; 0 without `fault_tolerant`.
        hosts: names of those that answer.
        missing: hosts of the job that do not answer, and why.
        ranks: in order.
        events: oldest first.
    """

    job: str
    fault_tolerant: bool
    epoch: int
    hosts: tuple[str, ...]
    missing: dict[str, str]
    ranks: tuple[Rank, ...]
    events: tuple[Event, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def picture_of(replies: Sequence[dict[str, Any]], missing: dict[str, str], before: Picture | None) -> Picture:
    """What the hosts of one job have answered, with rates since `before`.

    Args:
        replies: of the hosts; at least one. Fields of a wrong type count as not given.
        missing: hosts that do not answer.
        before: the look before.
    """
    earlier = {} if before is None else {(rank.host, rank.pid): rank for rank in before.ranks}
    ranks: list[Rank] = []
    events: dict[tuple[int | None, str], Event] = {}
    for reply in replies:
        host = text_of(reply.get("host"))
        for told in _list(reply.get("ranks")):
            if isinstance(told, dict):
                rank = _rank(host, told)
                ranks.append(_with_rates(rank, earlier.get((host, rank.pid))))
                for change in _list(told.get("changes")):
                    _add(events, change)
        for entry in _list(reply.get("events")):
            if isinstance(entry, list) and len(entry) == 2:
                event = Event(_number(entry[0]), f"{host}: {text_of(entry[1])}")
                events[None, event.text] = event
    ranks.sort(key=lambda each: (each.rank is None, each.rank or 0, each.host, each.pid))
    return Picture(
        job=text_of(replies[0].get("job")),
        fault_tolerant=any(reply.get("fault_tolerant") is True for reply in replies),
        epoch=max(int(_number(reply.get("epoch"))) for reply in replies),
        hosts=tuple(sorted({text_of(reply.get("host")) for reply in replies})),
        missing=missing,
        ranks=tuple(ranks),
        events=tuple(sorted(events.values(), key=lambda each: each.time)),
    )


def text_of(value: Any) -> str:
    """Text that does nothing to a terminal."""
    if not isinstance(value, str):
        return ""
    return "".join(each if each.isprintable() else "?" for each in value[:_MAX_TEXT])


def _rank(host: str, told: dict[str, Any]) -> Rank:
    pid, rank = int(_number(told.get("pid"))), told.get("rank")
    if error := text_of(told.get("error")):
        return Rank(host, pid, problem=f"does not answer: {error}")
    if type(rank) is not int:
        return Rank(host, pid, clock=_number(told.get("clock")))
    given = told.get("total")
    total = given if isinstance(given, dict) else {}
    counts: dict[str, Any] = {name: _number(total.get(name)) for name in _COUNTS}
    restarts = text_of(told.get("restarts"))
    return Rank(
        host,
        pid,
        rank,
        text_of(told.get("algorithm")),
        int(_number(told.get("steps"))),
        int(restarts) if restarts.isdecimal() else 0,
        clock=_number(told.get("clock")),
        stalled_s=_number(told.get("stalled_s")),
        problem="an exchange has failed" if told.get("failed") is True else "",
        **counts,
    )


def _with_rates(rank: Rank, before: Rank | None) -> Rank:
    if before is None or before.rank is None or rank.rank is None or rank.clock <= before.clock:
        return rank
    passed = rank.clock - before.clock
    rates = {
        "steps_per_s": (rank.steps - before.steps) / passed,
        "sent_per_s": (rank.bytes_sent - before.bytes_sent) / passed,
        "received_per_s": (rank.bytes_received - before.bytes_received) / passed,
        "exposed": (rank.exposed_s - before.exposed_s) / passed,
    }
    return Rank(**{**asdict(rank), **{name: max(0.0, value) for name, value in rates.items()}})


def _add(events: dict[tuple[int | None, str], Event], change: Any) -> None:
    """All ranks tell of the same change. The longest stall counts."""
    if not isinstance(change, dict):
        return
    epoch = int(_number(change.get("epoch")))
    lost, joined = _names(change.get("lost")), _names(change.get("joined"))
    stalled_s = _number(change.get("stalled_s"))
    known = events.get((epoch, ""))
    who = [f"lost {', '.join(lost)}"] * bool(lost) + [f"joined {', '.join(joined)}"] * bool(joined)
    text = f"epoch {epoch} from step {int(_number(change.get('step')))}: {'; '.join(who) or 'the same members'}"
    if reason := text_of(change.get("reason")):
        text += f" ({reason})"
    event = Event(
        _number(change.get("time")), text, epoch, lost, joined, stalled_s, skipped=change.get("skipped") is True
    )
    if known is None:
        events[epoch, ""] = event
    else:
        # A rank that has just come does not know who was lost.
        fuller = max(known, event, key=lambda each: len(each.lost) + len(each.joined))
        longest, skipped = max(known.stalled_s, stalled_s), known.skipped or event.skipped
        events[epoch, ""] = Event(
            min(known.time, event.time), fuller.text, epoch, fuller.lost, fuller.joined, longest, skipped
        )


def _names(value: Any) -> tuple[str, ...]:
    return tuple(text_of(each) for each in _list(value))


def _list(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else ()


def _number(value: Any) -> float:
    return value if type(value) in (int, float) and abs(value) < 2**62 else 0
