"""What must hold at every moment of a run."""

from __future__ import annotations

from bagua.membership import Agent, Epoch, Member
from bagua.membership.epoch import NO_MODEL, is_quorum
from bagua.membership.record import MAX_RECORD
from tests.elastic.protocol_simulation.host import Host, Log, Rank


class Violation(AssertionError):
    """An invariant does not hold."""


class Invariants:
    """Everything that hosts have decided, completed or trained, compared as it comes.

    Attributes:
        decided: epochs by number.
        known: the newest epoch that each host has learned.
    """

    def __init__(self) -> None:
        self.decided: dict[int, Epoch] = {}
        self.known: dict[str, int] = {}
        self._bases: dict[int, Log] = {}  # group -> the weights that it began with
        self._steps: dict[tuple[int, int], tuple[str, ...]] = {}  # (group, step) -> what was averaged
        self._superseded: dict[int, int] = {}  # group -> the step at which it ended

    def check_decision(self, agent: Agent, epoch: Epoch) -> None:
        """At most one decision per epoch; a group ends at one step."""
        self.known[agent.name] = epoch.number
        known = self.decided.setdefault(epoch.number, epoch)
        if known != epoch:
            raise Violation(f"two epochs {epoch.number}: {describe(known)} and, on {agent.name}, {describe(epoch)}")
        before = self.decided.get(epoch.number - 1)
        if before is not None and before.group != epoch.group:
            self._superseded[before.group] = epoch.step
        if len(agent.record.to_bytes()) > MAX_RECORD:
            raise Violation("a record is too long")

    def check_left(self, host: Host, epoch: Epoch) -> None:
        """Who leaves in order is not needed any more: a quorum knows, or has known before it was lost."""
        know = {name for name, number in self.known.items() if number >= epoch.number}
        if not is_quorum(epoch, know):
            raise Violation(f"{host.address} leaves, but only {sorted(know)} know of {describe(epoch)}")

    def check_lineage(self, host: Host, epoch: Epoch, me: Member) -> None:
        """Who trains holds what the epoch says, and it is the job's. A rank that has ended since may have held more."""
        for rank in host.ranks.values():
            self.check_held(rank)
        if host.agent is not None and host.agent.held > me.held:
            raise Violation(f"{me.name} holds {host.agent.held}, epoch {epoch.number} says {me.held}")

    def check_held(self, rank: Rank) -> None:
        """A rank's weights have completed as many steps as its agent says."""
        held = NO_MODEL if rank.progress is None else rank.progress.held
        if held != NO_MODEL and (len(rank.log) != held + 1 or rank.log[0] != "initial"):
            raise Violation(f"{rank.name} holds step {held}, but its weights are {rank.log[:1]} + {len(rank.log) - 1}")

    def check_start(self, agent: Agent, group: int, step: int, log: Log) -> None:
        """All that begin a step begin it with the same weights, and those are the job's."""
        if not log or log[0] != "initial":
            raise Violation(f"{agent.name} trains weights that are not the job's: {log[:1]}")
        assert agent.epoch is not None
        base = log[: agent.epoch.group_step + 1]
        if self._bases.setdefault(group, base) != base:
            raise Violation(f"{agent.name} begins group {group} with other weights than the others")
        for earlier in range(agent.epoch.group_step, step):
            if self._steps.get((group, earlier)) != log[earlier + 1]:
                raise Violation(f"{agent.name}: step {earlier} of group {group} counts here only")

    def check_completed(self, agent: Agent, group: int, step: int, mean: tuple[str, ...]) -> None:
        """A step has one mean, and none is completed after its group has ended."""
        if self._steps.setdefault((group, step), mean) != mean:
            raise Violation(f"step {step} of group {group} has two means")
        if step > self._superseded.get(group, step):
            raise Violation(f"{agent.name} completes step {step} of group {group}, ended at {self._superseded[group]}")


def describe(epoch: Epoch) -> str:
    """An epoch in one line."""
    members = " ".join(f"{m.name}.{m.incarnation}@{m.held}{'*' if m.votes else ''}" for m in epoch.members)
    return f"epoch {epoch.number} step {epoch.step} group {epoch.group} [{members}] ({epoch.reason})"
