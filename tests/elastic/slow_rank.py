"""A rank that tells the test whom its agent finds slow."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from bagua.membership import Action, Slow, seat
from tests.elastic.fault_tolerant_rank import train_steps

__all__ = ["train_and_tell_who_is_slow"]


def train_and_tell_who_is_slow(pipe: Connection, job: dict[str, Any]) -> None:
    """As `train_steps`, with a line for each member that is named."""
    original = seat.describe_event

    def describe(event: Action) -> str:
        if isinstance(event, Slow):
            pipe.send({"slow": event.name})
        return original(event)

    seat.describe_event = describe  # type: ignore[assignment]
    train_steps(pipe, job)
