"""Messages between agents, and the limits of what they hold."""

from __future__ import annotations

from dataclasses import dataclass

from bagua.membership.epoch import Ballot, Epoch

__all__ = [
    "MAX_ADDRESS",
    "MAX_FRAME",
    "MAX_MEMBERS",
    "MAX_NAME",
    "MAX_PAYLOAD",
    "MAX_SEAT",
    "MAX_SEATS",
    "Accept",
    "Accepted",
    "Body",
    "Decided",
    "Envelope",
    "Heartbeat",
    "Join",
    "MessageError",
    "Prepare",
    "Promise",
    "Rejected",
    "Report",
    "Request",
    "Rest",
    "Resting",
]

MAX_MEMBERS = 256
MAX_NAME = 64
MAX_ADDRESS = 128
MAX_PAYLOAD = 256
MAX_SEATS = 32  # ranks of a host
MAX_SEAT = 10**6  # largest number of a rank
MAX_FRAME = 2**19


class MessageError(ValueError):
    """A frame that is not one of ours: it is dropped, and its connection closed."""


@dataclass(frozen=True)
class Report:
    """What a member promises to stay at until the epoch is decided.

    Attributes:
        held: steps that its weights have completed, or `NO_MODEL`.
        payload: see `Member.payload`; may differ from the epoch's.
        broken: its connections of the present group have failed.
        leaving: it wants to be left out.
        unheard: places in `Epoch.members` of those that it cannot hear.
        seats: see `Member.seats`; may differ from the epoch's. Without meaning if `held` is `NO_MODEL`.
    """

    held: int
    payload: str = ""
    broken: bool = False
    leaving: bool = False
    unheard: tuple[int, ...] = ()
    seats: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class _InEpoch:
    """From a host whose newest epoch has the number `epoch`; a decision meant is the one that follows it."""

    epoch: int


@dataclass(frozen=True)
class _InBallot(_InEpoch):
    """About one attempt to decide."""

    ballot: Ballot


@dataclass(frozen=True)
class Heartbeat(_InEpoch):
    """I am here.

    Attributes:
        started: steps that I have begun, or can begin as those before are completed.
        arrived: I have given my part to the exchange of the last one of these, and wait for the others.
    """

    started: int
    arrived: bool = False


@dataclass(frozen=True)
class Join(_InEpoch):
    """I am not a member and want to be."""

    payload: str


@dataclass(frozen=True)
class Request(_InEpoch):
    """The epoch should change; a voter is to propose it.

    Attributes:
        can_wait: nobody is lost, so ranks may end their step first.
    """

    reason: str
    can_wait: bool = False


@dataclass(frozen=True)
class Rest(_InEpoch):
    """The epoch is going to change, and nobody is lost: begin no more than so many steps for a moment.

    Attributes:
        after: steps.
    """

    after: int


@dataclass(frozen=True)
class Resting(_InEpoch):
    """All my ranks have ended these steps."""


@dataclass(frozen=True)
class Prepare(_InBallot):
    """Paxos 1a, for the epoch that follows `epoch`: promise and report."""


@dataclass(frozen=True)
class Promise(_InBallot):
    """Paxos 1b: no smaller ballot will be accepted; what was accepted last; and the report."""

    report: Report
    accepted_ballot: Ballot | None
    accepted: Epoch | None


@dataclass(frozen=True)
class Accept(_InBallot):
    """Paxos 2a."""

    value: Epoch


@dataclass(frozen=True)
class Accepted(_InBallot):
    """Paxos 2b."""


@dataclass(frozen=True)
class Rejected(_InEpoch):
    """A larger ballot than yours was promised."""

    promised: Ballot


@dataclass(frozen=True)
class Decided:
    """The newest epoch that the sender knows."""

    value: Epoch


Body = Heartbeat | Join | Request | Rest | Resting | Prepare | Promise | Accept | Accepted | Rejected | Decided


@dataclass(frozen=True)
class Envelope:
    """A message with its ends.

    Attributes:
        job: messages of other jobs are ignored.
        sender: name of the agent.
        incarnation: of the sender; messages of an earlier one are ignored.
        address: where the sender can be reached.
        receiver: name of the agent, or "" if only its address is known.
    """

    job: str
    sender: str
    incarnation: int
    address: str
    receiver: str
    body: Body
