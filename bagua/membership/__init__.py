"""Agreement on the members of a job: epochs, the step they begin at, losses and arrivals. Without torch.

`Agent` is the state machine that each host runs, without I/O. A driver gives it messages, time and local events, and
carries out the actions it returns; `bagua.membership.transport` is one, over TCP. The design, and how it is checked:
docs/design/0008-membership.md.
"""

from __future__ import annotations

from bagua.membership.actions import Action, Blocked, EpochBegan, Excluded, Left, Persist, Send, Slow, Verdict
from bagua.membership.agent import Agent
from bagua.membership.encoding import decode, encode
from bagua.membership.epoch import Ballot, Epoch, Member
from bagua.membership.messages import Envelope, MessageError
from bagua.membership.options import Options
from bagua.membership.record import Record

__all__ = [
    "Action",
    "Agent",
    "Ballot",
    "Blocked",
    "Envelope",
    "Epoch",
    "EpochBegan",
    "Excluded",
    "Left",
    "Member",
    "MessageError",
    "Options",
    "Persist",
    "Record",
    "Send",
    "Slow",
    "Verdict",
    "decode",
    "encode",
]
