"""The error of the emulated cluster."""

from __future__ import annotations

__all__ = ["LabError"]


class LabError(RuntimeError):
    """The cluster cannot be made on this machine, or a part of it has ended. The message says what is missing."""
