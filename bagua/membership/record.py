"""What a voter must remember: the newest epoch, its promise, and what it has accepted."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from bagua.membership.encoding import checked_argument, epoch_from_wire, epoch_to_wire
from bagua.membership.epoch import Ballot, Epoch
from bagua.membership.messages import MAX_ADDRESS, MAX_FRAME, MAX_NAME, MessageError

__all__ = ["MAX_RECORD", "Record"]

MAX_RECORD = 2 * MAX_FRAME  # it holds two epochs, a message at most one


@dataclass(frozen=True)
class Record:
    """State of a Paxos acceptor. It decides one epoch after the other, so it is that of one decision.

    Attributes:
        job: the job.
        name: of the agent, the same for as long as this record exists.
        incarnation: how often the record has been recovered.
        address: of the agent.
        epoch: the newest that is known; None before the first.
        promised: no smaller ballot for the next epoch will be accepted. While it is set, no step is completed.
        accepted_ballot: under which `accepted` was accepted.
        accepted: the value accepted last for the next epoch.

    Raises:
        ValueError: names the text that is empty or exceeds a limit of the messages.
    """

    job: str
    name: str
    incarnation: int
    address: str
    epoch: Epoch | None = None
    promised: Ballot | None = None
    accepted_ballot: Ballot | None = None
    accepted: Epoch | None = None

    def __post_init__(self) -> None:
        for what, text, limit in (("job", self.job, MAX_NAME), ("name", self.name, MAX_NAME)):
            checked_argument(what, text, limit)
        checked_argument("address", self.address, MAX_ADDRESS)

    def promise(self, ballot: Ballot) -> Record:
        """The record after a promise."""
        return replace(self, promised=ballot)

    def accept(self, ballot: Ballot, value: Epoch) -> Record:
        """The record after accepting a value, which is a promise too."""
        return replace(self, promised=ballot, accepted_ballot=ballot, accepted=value)

    def decide(self, epoch: Epoch) -> Record:
        """The record after a decision: the next one begins without promises."""
        return Record(self.job, self.name, self.incarnation, self.address, epoch)

    def to_bytes(self) -> bytes:
        """For `Persist`."""
        values = [None if each is None else epoch_to_wire(each) for each in (self.epoch, self.accepted)]
        head = [self.job, self.name, self.incarnation, self.address]
        return json.dumps([*head, values[0], self.promised, self.accepted_ballot, values[1]]).encode()

    @classmethod
    def recover(cls, data: bytes) -> Record:
        """The record of a host that has come back, with the next incarnation.

        Raises:
            MessageError: `data` is no record.
        """
        try:
            if len(data) > MAX_RECORD:
                raise MessageError(f"a record of {len(data)} bytes")
            job, name, incarnation, address, epoch, promised, accepted_ballot, accepted = json.loads(data)
            return cls(
                job,
                name,
                int(incarnation) + 1,
                address,
                None if epoch is None else epoch_from_wire(epoch),
                None if promised is None else Ballot(int(promised[0]), str(promised[1])),
                None if accepted_ballot is None else Ballot(int(accepted_ballot[0]), str(accepted_ballot[1])),
                None if accepted is None else epoch_from_wire(accepted),
            )
        except MessageError:
            raise
        except (ValueError, TypeError, IndexError) as error:
            raise MessageError(f"not a record of membership: {error}") from None
