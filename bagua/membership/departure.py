"""Whether this host leaves, and who knows that it is left out."""

from __future__ import annotations

from bagua.membership.epoch import Epoch, is_quorum

__all__ = ["Departure"]


class Departure:
    """A host that leaves in order is needed until a quorum of the epoch without it knows of that epoch.

    Until then the others may have to decide it again, with the vote of the one that leaves.

    Attributes:
        begun: it wants to leave, or has left.
        confirmed: members that know of the epoch.
    """

    def __init__(self) -> None:
        self.begun = False
        self.confirmed: set[str] = set()

    def confirm(self, epoch: Epoch, sender: str) -> bool:
        """`sender` knows of `epoch`, which is without this host. True if that makes the quorum."""
        before = is_quorum(epoch, self.confirmed)
        self.confirmed.add(sender)
        return not before and is_quorum(epoch, self.confirmed)
