"""The directory of an LMDB cache: persistent, or removed with the job."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

__all__ = ["check_directory", "condemn", "job_directory", "leave_job_directories", "note_synced", "prepare"]

_log = logging.getLogger("bagua")
_MARKER = "bagua-cache.json"
_LOCK = "bagua.lock"
_OWN_FILES = {_MARKER, _LOCK, "data.mdb", "lock.mdb", f"{_MARKER}.new"}
_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK")
_joined: dict[Path, int] = {}  # job directory -> file that holds my lock on it
_joined_pid = 0


def prepare(path: Path, read_last_txn: Callable[[], int | None]) -> bool:
    """Make `path` ready for a cache; throw away what may be torn.

    Writes are not forced to disk one by one, so after a power failure the file may be torn. What it held when it was
    last forced to disk as a whole is known by its transaction number; anything else from another boot is discarded.

    Args:
        read_last_txn: returns the number of the last transaction in the file, None if it cannot be read.

    Returns:
        whether a file was thrown away.

    Raises:
        ValueError: see `check_directory`.
    """
    check_directory(path)
    with _locked(path):
        marker = _read_marker(path)
        discard = (path / "data.mdb").exists() and (
            bool(marker.get("damaged"))
            or (marker.get("boot") != _boot() and marker.get("synced", -1) != read_last_txn())
        )
        if discard:
            _log.info("the cache in %s was not closed properly or is damaged; starting with an empty cache", path)
            for name in ("data.mdb", "lock.mdb"):
                (path / name).unlink(missing_ok=True)
        if discard or marker.get("boot") != _boot():
            _write_marker(path, {"boot": _boot()} if discard else {**marker, "boot": _boot()})
    return discard


def check_directory(path: Path) -> None:
    """Make the directory if there is none.

    Raises:
        ValueError: it, or one above it, is a file; or it holds files that are not a cache's, which must not be thrown
            away.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"path: {path} is a file or lies below one, expected a directory") from None
    present = set(os.listdir(path))
    foreign = present - _OWN_FILES or ({"data.mdb"} & present if not (path / _MARKER).exists() else set())
    if foreign:
        raise ValueError(f"path: {path} holds files that do not belong to a cache ({', '.join(sorted(foreign)[:3])})")


def note_synced(path: Path, txn: int) -> None:
    """Remember that everything up to transaction `txn` is on disk."""
    with _locked(path):
        marker = _read_marker(path)
        before = marker.get("synced")
        _write_marker(path, {**marker, "synced": max(txn, before if isinstance(before, int) else 0)})


def condemn(path: Path) -> None:
    """Mark the file as damaged, so that the next job discards it."""
    with contextlib.suppress(OSError), _locked(path):
        _write_marker(path, {**_read_marker(path), "damaged": True})


def job_directory() -> Path:
    """Return a directory that the ranks of this node and job share and that is removed when the last of them ends.

    Under a launcher its name follows from the launcher's environment, without it is this process's own. Directories
    that crashed jobs of this user left behind are removed.
    """
    global _joined_pid
    if _joined_pid != os.getpid():
        _joined.clear()  # my parent's; it removes them
        _joined_pid = os.getpid()
    if _joined:
        return next(iter(_joined)) / "lmdb"
    prefix = f"bagua-cache-{os.getuid()}-"
    root = Path(tempfile.gettempdir())
    for stale in root.glob(f"{prefix}*"):
        _remove_if_left(stale)
    if "MASTER_PORT" in os.environ and "RANK" in os.environ:
        job = "\n".join(os.environ.get(name, "") for name in _JOB)
        path = root / f"{prefix}{blake2b(job.encode(), digest_size=8).hexdigest()}"
    else:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    for _ in range(100):
        lock = _join(path)
        if lock is not None:
            _joined[path] = lock
            return path / "lmdb"
    raise RuntimeError(f"{path}: other processes keep creating and removing it")


def leave_job_directories() -> None:
    """Remove this process's job directories, unless other ranks still use them."""
    if _joined_pid != os.getpid():
        return
    while _joined:
        path, lock = _joined.popitem()
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _join(path: Path) -> int | None:
    """Take a shared lock on the job's directory; None if it went away meanwhile."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        stat = path.lstat()
        if path.is_symlink() or stat.st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user")
        lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path / "lmdb", ignore_errors=True)  # nobody is here: a crashed job's
    except BlockingIOError:
        pass
    fcntl.flock(lock, fcntl.LOCK_SH)
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(lock), os.stat(path / "lock")):
            return lock
    os.close(lock)
    return None


def _remove_if_left(path: Path) -> None:
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # another process is just making or removing it, or it is not a directory of ours
        return
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        # Closing alone would not do: a child forked meanwhile has inherited the lock, and would wait for itself.
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _read_marker(path: Path) -> dict[str, object]:
    try:
        marker = json.loads((path / _MARKER).read_text())
    except (OSError, ValueError):
        return {}
    return marker if isinstance(marker, dict) else {}


def _write_marker(path: Path, marker: dict[str, object]) -> None:
    new = path / f"{_MARKER}.new"
    with open(new, "w") as file:
        json.dump(marker, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path / _MARKER)


def _boot() -> str:
    """A name for the time since the machine was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
