"""The epoch that a proposer puts to the vote: made from the reports of the members and the hosts that want to join."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from bagua.membership.epoch import NO_MODEL, Ballot, Epoch, Member
from bagua.membership.messages import MAX_MEMBERS, Promise, Report

__all__ = ["Reported", "boundary", "compose", "survivors", "value_to_adopt"]


@dataclass(frozen=True)
class Reported:
    """A promise, and who gave it."""

    incarnation: int
    promise: Promise


def value_to_adopt(epoch: Epoch, promises: Mapping[str, Reported]) -> Epoch | None:
    """The value that a voter accepted under the largest ballot: it may have been decided already (Paxos, phase 2a)."""
    found: list[tuple[Ballot, Epoch]] = []
    for name in epoch.voters:
        promise = promises[name].promise if name in promises else None
        if promise is not None and promise.accepted_ballot is not None and promise.accepted is not None:
            found.append((promise.accepted_ballot, promise.accepted))
    return max(found, key=lambda each: each[0])[1] if found else None


def boundary(reports: Iterable[Report]) -> int:
    """The commit rule: the steps that count are those that at least one surviving member has completed.

    An exchange ends on no rank before all ranks have given their part. So the survivors differ by at most one step, the
    step that one of them completed is in everybody's reach, and one that none has completed is not missed anywhere.
    """
    return max((report.held for report in reports), default=NO_MODEL)


def survivors(epoch: Epoch, promises: Mapping[str, Reported], newcomers: bool) -> list[Member]:
    """Members that have reported and can hear each other.

    A member that has been recovered since is none: it comes back as a newcomer. Of two that cannot hear each other, one
    goes: learners before trainers, then the one with more such links, the one that is missed, the younger one.
    """
    places = {member.name: place for place, member in enumerate(epoch.members)}
    kept = {
        m.name: promises[m.name].promise.report
        for m in epoch.members
        if m.name in promises and promises[m.name].incarnation == m.incarnation
    }
    staying = {name: report for name, report in kept.items() if not report.leaving}
    if boundary(staying.values()) != NO_MODEL or not (staying or newcomers):
        kept = staying  # else those that leave have the only weights: they stay until another host has fetched them
    misses = {name: _unheard(epoch, report) - {name} for name, report in kept.items()}
    while True:
        missed = {name: {other for other in kept if name in misses[other]} for name in kept}
        links = {name: len(missed[name] | (misses[name] & kept.keys())) for name in kept}
        cut = [name for name in kept if links[name]]
        if not cut:
            break
        del kept[max(cut, key=lambda n: (kept[n].held == NO_MODEL, links[n], len(missed[n]), places[n]))]
    return [_as_reported(member, kept[member.name]) for member in epoch.members if member.name in kept]


def _as_reported(member: Member, report: Report) -> Member:
    seats = () if report.held == NO_MODEL else report.seats
    return replace(member, payload=report.payload, held=report.held, seats=seats)


def _unheard(epoch: Epoch, report: Report) -> set[str]:
    return {epoch.members[place].name for place in report.unheard if place < len(epoch.members)}


def compose(epoch: Epoch, promises: Mapping[str, Reported], joins: Iterable[Member], reason: str) -> Epoch | None:
    """The next epoch, or None if no survivor has the model: a newcomer's weights never become those of the job.

    Args:
        epoch: the last one decided.
        promises: of a quorum of its voters, and of all others that answered.
        joins: hosts that want to take part. They begin as learners, without a vote.
        reason: for the log.
    """
    joins = list(joins)
    stay = survivors(epoch, promises, newcomers=bool(joins))
    step = boundary(promises[m.name].promise.report for m in stay)
    if step == NO_MODEL:
        return None
    stay = [replace(m, votes=m.trains and m.held >= step - 1) for m in stay]
    names = {m.name for m in stay}
    new = [
        replace(m, held=NO_MODEL, votes=False, seats=())
        for m in sorted(joins, key=lambda m: m.name)
        if m.name not in names
    ]
    members = (*stay, *new[: max(0, MAX_MEMBERS - len(stay))])
    same = [m.key for m in members if m.trains] == [m.key for m in epoch.trainers]
    broken = any(m.trains and promises[m.name].promise.report.broken for m in stay)
    number = epoch.number + 1
    return Epoch(
        number=number,
        step=step,
        group=epoch.group if same and not broken else number,
        group_step=epoch.group_step if same and not broken else step,
        members=members,
        tie_break=epoch.tie_break,
        reason=reason,
    )
