"""The error class of checkpoints."""

from __future__ import annotations

__all__ = ["CheckpointError"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or cannot be read or used. Names the rank and the file or the part.

    Raised on all ranks, whichever of them failed.
    """
