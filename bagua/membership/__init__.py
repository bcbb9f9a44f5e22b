"""Agreement on the members of a job: epochs, the step they begin at, losses and arrivals. No I/O, no torch.

`Agent` is the state machine that each host runs; a driver gives it messages, time and local events, and carries out the
actions it returns. The design and its proofs: docs/design/0008-membership.md.
"""

from __future__ import annotations

from bagua.membership.actions import Action, Blocked, EpochBegan, Excluded, Persist, Send, Slow, Verdict
from bagua.membership.agent import Agent
from bagua.membership.epoch import Ballot, Epoch, Member
from bagua.membership.messages import Envelope, MessageError, decode, encode
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
