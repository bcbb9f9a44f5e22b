"""What ranks do together in a training step."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Moment"]


class Moment(IntEnum):
    """In the order of a step. Numbers travel between ranks."""

    FORWARD = 0
    BUFFERS = 1
    BACKWARD = 2
    STEP = 3
