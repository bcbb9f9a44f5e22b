"""A directory of a launcher's own, for sockets and tracebacks: removed at its end, or by a later launcher."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["run_directory"]

_PREFIX = "bagua-run-"
_LOCK = "lock"


@contextmanager
def run_directory() -> Iterator[Path]:
    """A new directory of mode 0700 in the folder for temporary files, which exists until the block ends.

    Directories of this user's launchers that were killed are removed first.
    """
    _remove_leftovers(Path(tempfile.gettempdir()))
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(directory / "partial", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held before it has its name: nobody takes this one for a leftover
        (directory / "partial").rename(directory / _LOCK)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _remove_leftovers(folder: Path) -> None:
    for directory in folder.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.geteuid():
                continue
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)
