"""The vote of a host on the next epoch, made durable before it is given."""

from __future__ import annotations

from bagua.membership.actions import Persist
from bagua.membership.epoch import Epoch
from bagua.membership.messages import Accept, Accepted, Prepare, Promise, Rejected, Report
from bagua.membership.outbox import Outbox
from bagua.membership.record import Record

__all__ = ["Acceptor"]


class Acceptor:
    """A Paxos acceptor: asks for `Persist` before the answer that depends on the record.

    Attributes:
        record: what must not be forgotten while this host keeps its name.
    """

    def __init__(self, record: Record, outbox: Outbox) -> None:
        self.record = record
        self._outbox = outbox

    def refusal(self, request: Prepare | Accept) -> Rejected | None:
        """The answer to a ballot that is smaller than one promised; None if this one is not."""
        promised = self.record.promised
        if promised is None or request.ballot >= promised:
            return None
        return Rejected(request.epoch, promised)

    def promise(self, prepare: Prepare, report: Report) -> Promise:
        """Promise to accept no smaller ballot, and to stay at what is reported until the epoch is decided."""
        self._keep(self.record.promise(prepare.ballot))
        kept = self.record
        return Promise(prepare.epoch, prepare.ballot, report, kept.accepted_ballot, kept.accepted)

    def accept(self, accept: Accept) -> Accepted:
        """Accept a value."""
        self._keep(self.record.accept(accept.ballot, accept.value))
        return Accepted(accept.epoch, accept.ballot)

    def decide(self, epoch: Epoch) -> None:
        """An epoch was decided: promises made for it are settled."""
        self._keep(self.record.decide(epoch))

    def _keep(self, record: Record) -> None:
        if record != self.record:
            self.record = record
            self._outbox.add(Persist(record.to_bytes()))
