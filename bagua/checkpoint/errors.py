"""The error class of checkpoints."""

from __future__ import annotations

__all__ = ["CheckpointError", "MisfitError"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or cannot be read or used. Names the rank and the file or the part.

    Raised on all ranks, whichever of them failed.
    """


class MisfitError(CheckpointError, ValueError):
    """The state of an algorithm was saved with another algorithm, or does not fit the module. Names what differs."""
