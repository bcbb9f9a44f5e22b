"""Which rank others follow when groups are opened: its weights, its step, and how many batches each rank leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from bagua.algorithms import LostStep

if TYPE_CHECKING:
    from bagua.engine.recovery.manager import RecoveryManager

__all__ = ["align", "begun", "who_leads"]


def begun(rank: dict[str, Any]) -> int:
    """Steps that this rank has completed, or would have but for their exchange."""
    return rank["step"] + rank["ending"]


def who_leads(ranks: list[dict[str, Any]]) -> tuple[int, list[int], list[int]]:
    """The rank whose state others take over; those that do: they lack an exchange that counts, or the weights that the
    job begins with, or are new; and those that lack an exchange, but keep their state.

    Where replicas differ, a newcomer never leads: it has fetched no state that it could train on with. If it has the
    newest round all the same, from a rank that has been lost, all others go on without it. Of ranks that made
    their last step alone (`LostStep.KEEP`) those that have begun fewer go on at the place of the others, too.
    """
    newest = max(each["round"] for each in ranks)
    candidates = [rank for rank, each in enumerate(ranks) if not each["newcomer"]] or list(range(len(ranks)))
    # A rank that was lost in `distribute` may have given its weights to some only: they count, once one rank has them.
    candidates = [rank for rank in candidates if ranks[rank]["replicated"]] or candidates
    # Of ranks that are as far, the one with most of those that need its state beside it on its host.
    needs = Counter(each.get("node") for each in ranks if each["newcomer"] or each["round"] < newest)
    near = [needs[each.get("node")] for each in ranks]
    source = max(candidates, key=lambda rank: (ranks[rank]["round"], begun(ranks[rank]), near[rank], -rank))
    alike = ranks[source]["lost_step"] in (LostStep.SKIP.value, LostStep.FREE.value)
    if alike:  # then a newcomer leads that alone holds a step of a rank that has been lost
        source = max(range(len(ranks)), key=lambda rank: (ranks[rank]["round"], rank in candidates, near[rank], -rank))
    behind: list[int] = []
    without: list[int] = []
    for rank, each in enumerate(ranks):
        lacks = each["round"] < newest
        if not each["replicated"]:
            if rank != source:
                behind.append(rank)
        elif each["newcomer"]:
            if rank != source and (not alike or lacks):
                behind.append(rank)
        elif each["lost_step"] == ranks[source]["lost_step"] == LostStep.KEEP.value:
            if lacks or begun(each) < begun(ranks[source]):
                without.append(rank)
        elif lacks:
            keeps = (
                each["lost_step"] in (LostStep.KEEP.value, LostStep.FREE.value)
                or each["round"] == ranks[source]["round"]
            )
            (without if keeps else behind).append(rank)
    ranks[source]["round"] = newest
    return source, behind, without


def align(
    manager: RecoveryManager, ranks: Sequence[dict[str, Any]], source: int, moved: Collection[int], me: int
) -> None:
    """Skip as many steps as the rank that has lost most has lost more: batch numbers are equal then.

    Args:
        moved: ranks that are now where `source` is.
    """

    if ranks[source]["lost_step"] == LostStep.FREE.value:
        manager.to_skip = 0
        return

    def missed(rank: int) -> int:
        at = ranks[source if rank in moved else rank]
        return ranks[rank]["attempts"] - begun(at)

    most = max((missed(rank) for rank, each in enumerate(ranks) if not each["newcomer"]), default=0)
    if manager.newcomer:
        manager.attempts = most + begun(ranks[source])
    skips = not (manager.newcomer or manager.progress.repeats)
    manager.to_skip = most - missed(me) if skips else 0
