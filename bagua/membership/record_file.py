"""The file of an agent's record, written durably, and again soon if that fails."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["RecordFile"]

_PAUSE_S = 0.1  # between two attempts
_GIVE_UP_S = 30.0


class RecordFile:
    """Replaces the record as a whole.

    Attributes:
        error: of the last attempt, until one goes well.
        due: when to try again (`time.monotonic`); None unless an attempt has failed.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._since = path, 0.0
        self.error: OSError | None = None
        self.due: float | None = None

    @property
    def hopeless(self) -> bool:
        """Whether attempts have failed for so long that this is no passing lack of files or space."""
        return self.error is not None and time.monotonic() > self._since + _GIVE_UP_S

    def write(self, data: bytes) -> bool:
        """Whether `data` is on the disk. If not, call it again when it is `due`; an earlier call changes nothing."""
        now = time.monotonic()
        if self.due is not None and now < self.due:
            return False
        try:
            _replace(self._path, data)
        except OSError as error:
            self._since = now if self.error is None else self._since
            self.error, self.due = error, now + _PAUSE_S
            return False
        self.error = self.due = None
        return True


def _replace(path: Path, data: bytes) -> None:
    """Replace a file, durably."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
