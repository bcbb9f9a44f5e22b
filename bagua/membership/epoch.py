"""A membership epoch: who takes part in training, who votes on the next epoch, and at which step it begins."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

__all__ = ["FIRST_EPOCH", "NO_MODEL", "Ballot", "Epoch", "Member", "is_quorum"]

FIRST_EPOCH = 1  # of a job
NO_MODEL = -1  # `held` of a member that has no weights of this job


class Ballot(NamedTuple):
    """Number of one attempt to decide an epoch. It holds the proposer's name, so no two attempts share one."""

    round: int
    proposer: str


@dataclass(frozen=True)
class Member:
    """A host of the job, as an epoch lists it.

    Attributes:
        name: unique for the life of its durable record; a host that comes back without the record has another name.
        incarnation: how often the record has been recovered. A recovered host may vote, but has lost its weights.
        address: host:port of its agent.
        payload: what the engines of the members need to know of each other, such as addresses. Not read here.
        held: steps that its weights had completed when the epoch was decided; `NO_MODEL` for none. With several ranks,
            those of the rank that had completed most.
        votes: it is counted when the next epoch is decided. One vote, however many ranks it has.
        seats: numbers of its ranks that train, ascending; a rank that is started again has another number. Empty for a
            host that does not train.
    """

    name: str
    incarnation: int
    address: str
    payload: str = ""
    held: int = NO_MODEL
    votes: bool = False
    seats: tuple[int, ...] = (0,)

    @property
    def trains(self) -> bool:
        """Whether it takes part in exchanges. The others are learners: they fetch the weights."""
        return self.held != NO_MODEL

    @property
    def key(self) -> tuple[str, int, str, tuple[int, ...]]:
        """What must stay the same for its connections to stay open."""
        return self.name, self.incarnation, self.payload, self.seats


@dataclass(frozen=True)
class Epoch:
    """What one decision fixes.

    Attributes:
        number: counts decisions.
        step: steps that count: the most that any surviving member has completed. Later ones count for nobody.
        group: number of the epoch that opened the process groups in use. Unchanged if the same members train on.
        group_step: `step` of that epoch. A member that held less when the groups opened fetches the weights.
        members: by seniority. The first that votes leads.
        tie_break: exactly half of the voters are a quorum if the first voter is among them.
        reason: why it was proposed, for the log.
    """

    number: int
    step: int
    group: int
    group_step: int
    members: tuple[Member, ...]
    tie_break: bool = False
    reason: str = ""

    @classmethod
    def first(cls, members: Collection[Member], tie_break: bool = False) -> Epoch:
        """The epoch that a job begins with: all members train and vote, from step 0. Alike on all of them.

        Raises:
            ValueError: there are no members, two of the same name, or one without ranks.

        Example:
            >>> Epoch.first([Member("a", 0, "10.0.0.1:7000"), Member("b", 0, "10.0.0.2:7000")]).voters
            ('a', 'b')
        """
        names = [member.name for member in members]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"members: expected one or more, each with a name of its own, got {names}")
        if idle := [member.name for member in members if not member.seats]:
            raise ValueError(f"members: {idle[0]} has no ranks")
        founders = tuple(replace(m, held=0, votes=True) for m in members)
        return cls(FIRST_EPOCH, 0, FIRST_EPOCH, 0, founders, tie_break, "start")

    @cached_property
    def by_name(self) -> dict[str, Member]:
        """The members."""
        return {member.name: member for member in self.members}

    @cached_property
    def voters(self) -> tuple[str, ...]:
        """Names of those that decide the next epoch."""
        return tuple(member.name for member in self.members if member.votes)

    @cached_property
    def trainers(self) -> tuple[Member, ...]:
        """Members that take part in exchanges."""
        return tuple(member for member in self.members if member.trains)

    @cached_property
    def sources(self) -> tuple[Member, ...]:
        """Members whose weights were at `step` when the epoch was decided: the others can fetch them there."""
        return tuple(member for member in self.members if member.held == self.step)

    def member(self, name: str, incarnation: int) -> Member | None:
        """The member of that name, unless it has been recovered since."""
        found = self.by_name.get(name)
        return found if found is not None and found.incarnation == incarnation else None


def is_quorum(epoch: Epoch, names: Collection[str]) -> bool:
    """Whether `names` hold a majority of the voters of `epoch`. Any two quorums share a voter.

    Example:
        >>> four = Epoch.first([Member(name, 0, name) for name in "abcd"], tie_break=True)
        >>> is_quorum(four, {"a", "b"}), is_quorum(four, {"c", "d"})
        (True, False)
    """
    votes = sum(name in names for name in epoch.voters)
    if 2 * votes == len(epoch.voters):
        return epoch.tie_break and votes > 0 and epoch.voters[0] in names
    return 2 * votes > len(epoch.voters)
