"""What the state machine asks of its driver, and how it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from bagua.membership.epoch import Epoch
from bagua.membership.messages import Envelope

__all__ = ["Action", "Blocked", "EpochBegan", "Excluded", "Left", "Persist", "Send", "Slow", "Verdict"]


class Verdict(Enum):
    """Answer to a local request.

    Attributes:
        GRANTED: do it.
        WAIT: an epoch is being decided; ask again after the next `EpochBegan` or `Excluded`.
        DENIED: drop it: the group is no longer in use, or the weights are not those of the epoch.
    """

    GRANTED = "granted"
    WAIT = "wait"
    DENIED = "denied"


@dataclass(frozen=True)
class Send:
    """Send a message to the agent at an address. It may be lost, delayed, repeated or overtaken."""

    address: str
    envelope: Envelope


@dataclass(frozen=True)
class Persist:
    """Make the record durable before any later action is carried out; the newest record replaces earlier ones.

    A driver without durable memory skips this. Its host must then come back under another name.
    """

    record: bytes


@dataclass(frozen=True)
class _EpochAction:
    """Tells the driver of a decided epoch."""

    epoch: Epoch


@dataclass(frozen=True)
class EpochBegan(_EpochAction):
    """An epoch is decided and this host is a member.

    Groups are opened anew if `epoch.group` changed, for `epoch.trainers`. Exchanges in flight go on if it did not.
    """

    previous: Epoch | None


@dataclass(frozen=True)
class Excluded(_EpochAction):
    """An epoch was decided without this host: what it trained since does not count.

    The agent asks to join, unless it leaves.
    """


@dataclass(frozen=True)
class Left(_EpochAction):
    """This host has left in order, and a quorum of the epoch's voters know of it. The agent may end."""


@dataclass(frozen=True)
class Blocked:
    """No epoch can be decided for now."""

    reason: str


@dataclass(frozen=True)
class Slow:
    """A member answers, but has kept this one waiting."""

    name: str
    waited_s: float


Action = Send | Persist | EpochBegan | Excluded | Left | Blocked | Slow
