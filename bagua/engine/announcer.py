"""Announcements to ranks that have run out of inputs, within `bagua.join`."""

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
    """How an engine tells ranks that have run out of inputs what comes; see `join`."""

    scale: float

    @property
    def early(self) -> bool:
        """Whether every forward pass is to be announced."""
        ...

    def announce(self, moment: Moment, size: int) -> int:
        """Before something that all ranks do together; returns the first rank that has inputs."""
        ...
