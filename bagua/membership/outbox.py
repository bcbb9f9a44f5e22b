"""What an agent asks of its driver, until the driver takes it."""

from __future__ import annotations

from collections.abc import Sequence

from bagua.membership.actions import Action, Send
from bagua.membership.epoch import Epoch
from bagua.membership.messages import Body, Envelope
from bagua.membership.record import Record

__all__ = ["Outbox"]


class Outbox:
    """The actions of one agent, in order; puts the messages among them into envelopes.

    Args:
        sender: who the messages come from.
    """

    def __init__(self, sender: Record) -> None:
        self._job, self._name = sender.job, sender.name
        self._incarnation, self._address = sender.incarnation, sender.address
        self._waiting: list[Action] = []

    def add(self, action: Action) -> None:
        """Ask for an action."""
        self._waiting.append(action)

    def take(self) -> list[Action]:
        """The actions since the last call."""
        actions, self._waiting = self._waiting, []
        return actions

    def send(self, address: str, receiver: str, body: Body) -> None:
        """Send a message to the agent `receiver`; "" if only its address is known."""
        envelope = Envelope(self._job, self._name, self._incarnation, self._address, receiver, body)
        self.add(Send(address, envelope))

    def answer(self, envelope: Envelope, body: Body) -> None:
        """Send a message to where `envelope` came from."""
        self.send(envelope.address, envelope.sender, body)

    def broadcast(self, epoch: Epoch, body: Body, but: Sequence[str] = ()) -> None:
        """Send a message to all other members of `epoch`, except those named in `but`."""
        for member in epoch.members:
            if member.name != self._name and member.name not in but:
                self.send(member.address, member.name, body)
