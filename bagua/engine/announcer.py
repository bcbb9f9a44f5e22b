"""Announcements to ranks that have run out of inputs, inside `bagua.join`."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

__all__ = ["Announcer", "Moment"]


class Moment(IntEnum):
    """What ranks do together in a training step, in order. Numbers travel between ranks."""

    FORWARD = 0
    BUFFERS = 1
    BACKWARD = 2
    STEP = 3


class Announcer(Protocol):
    """Protocol by which an engine announces its next collective to ranks without inputs; see `join`."""

    scale: float

    @property
    def early(self) -> bool:
        """Whether every forward pass is to be announced."""
        ...

    def announce(self, moment: Moment, size: int) -> int:
        """Announce a collective before it starts; returns the first rank that still has inputs."""
        ...
